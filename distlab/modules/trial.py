"""Try a module's forward and leave no trace: a copy of the module runs, so the module itself stays as it was.

What shapes does a module make? One must run its forward to know. But a forward may do more than compute: it fills a
cache at its first call, counts its calls, appends to a list, updates running statistics, draws random numbers; or it
raises in the middle of all that. On the meta device a cache would even be filled with tensors without numbers.

So `call_a_copy` copies the module first, with all that the module can reach: attributes, containers, hooks, what
functions remember of the place where they were defined. Each tensor is copied once, wherever it is used, as a tensor
without numbers (meta device) or as a clone. Classes, process groups, streams and what cannot be copied are shared.
`Copier` has a line for each kind of object.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from distlab.rng import keep_random_state

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout)
SHARED = (
    *PLAIN,
    type,
    ModuleType,
    Enum,
    dist.ProcessGroup,
    dist.Work,
    DeviceMesh,
    torch.Stream,
    torch.Event,
)
Object = TypeVar("Object")
MOST_ITEMS = 10_000  # of a global container that is looked into


def call_a_copy(module: nn.Module, arguments: Sequence[Any], device: torch.device) -> Any:
    """Call a copy of a module; the module and all random numbers stay as they were, also when the copy raises.

    What forward does to the outside world (it prints, writes a file, counts in a global variable) happens once more.
    But no global variable and no class keeps a tensor of the meta device.

    Args:
        module: any module. Compiled parts run without their compiled code.
        arguments: of the call.
        device: "meta" computes no numbers and needs no memory; a real one needs a copy of all tensors.

    Raises:
        Exception: what the module raises.
    """
    copier = Copier(without_numbers if device.type == "meta" else clone)
    with keep_random_state(), warnings.catch_warnings(), _eager():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copying counters (itertools)
        twin = copier.copy(module)
        with _no_meta_tensors_outside(twin):
            return twin(*arguments)


def without_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type on the meta device.

    Shapes: [...] -> [...]
    """
    return _like(tensor, lambda: torch.empty_like(tensor.detach(), device="meta"), "meta")


def clone(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, outside of any graph.

    Shapes: [...] -> [...]
    """
    return _like(tensor, lambda: _freed_too(tensor) if _is_freed(tensor) else tensor.detach().clone(), tensor.device)


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory was given back (parameters of a sharded module); reading it would crash."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()


def _freed_too(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor.detach())
    twin.untyped_storage().resize_(0)
    return twin


def _like(tensor: Tensor, make: Callable[[], Tensor], device: torch.device | str) -> Tensor:
    if is_lazy(tensor):
        kind: Any = type(tensor)
        lazy: Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
        return lazy
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(make(), requires_grad=tensor.requires_grad)
    return make().requires_grad_(tensor.requires_grad)


class Copier:
    """Copies objects with everything in them, each once: what was one object in two places is one copy in two places.

    `copy.deepcopy` is not enough: it refuses tensors that are part of a graph, process groups and parametrized modules,
    and it does not copy functions, so a hook would still write to the original.

    Args:
        stand_in: makes the copy of a tensor; it may return the tensor itself.
    """

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        self._stand_in = stand_in
        self._copies: dict[int, Any] = {}  # by the id of the original; also what copy.deepcopy calls its memo
        self._alive: list[Any] = []  # originals: no id may be used twice

    def copy(self, value: Object) -> Object:
        """Return the copy of an object, or the object where it is shared."""
        if isinstance(value, SHARED):
            return value
        if id(value) not in self._copies:
            try:
                self._note(value, self._copy(value))
            except Exception:  # whatever an object does when it is copied: it is shared
                self._note(value, value)
        copied: Object = self._copies[id(value)]
        return copied

    def _note(self, value: Any, copied: Object) -> Object:
        """Remember a copy; where an object can hold itself this comes before its contents are copied."""
        self._alive += [value, copied]
        self._copies[id(value)] = copied
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, dict | list | set | deque):
            return self._container(value)
        if isinstance(value, tuple | frozenset):
            items = [self.copy(item) for item in value]
            changed = any(one is not other for one, other in zip(items, value, strict=True))
            return (getattr(value, "_make", type(value))(items)) if changed else value
        if isinstance(value, FunctionType | MethodType | BuiltinMethodType | partial | CellType):
            return self._function(value)
        if type(value) is weakref.ref:
            return value if value() is None else weakref.ref(self.copy(value()))
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        return self._object(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        twin = self._note(tensor, self._stand_in(tensor))
        if twin is tensor:
            return twin
        for name, value in vars(tensor).items():  # what programs note at their parameters
            setattr(twin, name, self.copy(value))
        return twin

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # its tensors lie in C++
            return copy.deepcopy(module)
        inner = module._modules.get("_orig_mod")
        if type(module).__name__ == "OptimizedModule" and inner is not None:  # torch.compile(module)
            return self.copy(inner)
        twin: nn.Module = self._with_attributes(module)
        vars(twin).pop("_compiled_call_impl", None)  # module.compile()
        return twin

    def _container(self, value: Any) -> Any:
        twin = self._note(value, type(value)() if type(value) in (dict, list, set) else copy.copy(value))
        twin.clear()
        if isinstance(value, dict):
            for key, item in value.items():
                twin[self.copy(key)] = self.copy(item)
        elif isinstance(value, set):
            twin.update([self.copy(item) for item in value])
        else:
            twin.extend([self.copy(item) for item in value])
        return twin

    def _function(self, value: Any) -> Any:
        """Copy what a function remembers: closures, defaults, the object that a method belongs to."""
        if isinstance(value, CellType):
            return self._cell(value)
        if isinstance(value, partial):
            return partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if isinstance(value, BuiltinMethodType):
            owner = self.copy(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, MethodType):
            return MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if hasattr(value, "_torchdynamo_orig_callable"):  # torch.compile(function)
            return self.copy(value._torchdynamo_orig_callable)
        if not any((value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))):
            return value
        cells = tuple(self.copy(cell) for cell in value.__closure__ or ())
        if id(value) in self._copies:  # it remembers itself
            return self._copies[id(value)]
        defaults = self.copy(value.__defaults__)
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        twin.__kwdefaults__ = self.copy(value.__kwdefaults__)
        vars(twin).update({name: self.copy(item) for name, item in vars(value).items()})
        return twin

    def _cell(self, value: CellType) -> CellType:
        twin = self._note(value, CellType())
        try:
            contents = value.cell_contents
        except ValueError:  # it has none
            return twin
        twin.cell_contents = self.copy(contents)
        return twin

    def _object(self, value: Any) -> Any:
        """Copy an object of a class that is written in Python; others say themselves how they are copied."""
        kind = type(value)
        if kind is object or hasattr(kind, "__del__"):  # a mark; or it would end what the original still uses
            return value
        says_how = any(name in vars(base) for base in kind.__mro__[:-1] for name in ("__deepcopy__", "__reduce__"))
        if says_how or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return copy.deepcopy(value, self._copies)
        return self._with_attributes(value)

    def _with_attributes(self, value: Any) -> Any:
        """Copy an object attribute by attribute, past what its class does when attributes are set."""
        attributes = getattr(value, "__dict__", {})
        has_slots = any(vars(base).get("__slots__") for base in type(value).__mro__)
        if not attributes and not has_slots:
            return value  # often a mark that is compared by identity
        twin = self._note(value, copy.copy(value) if has_slots else object.__new__(type(value)))
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if hasattr(value, name):
                object.__setattr__(twin, name, self.copy(getattr(value, name)))
        for name, item in attributes.items():
            vars(twin)[name] = self.copy(item)
        return twin


@contextmanager
def _no_meta_tensors_outside(module: nn.Module) -> Iterator[None]:
    """Take out of classes and global containers the tensors of the meta device that were put there in this block.

    A cache may belong to a class or to a Python module. A tensor without numbers must not stay in it.
    """
    kinds = {kind for one in module.modules() for kind in type(one).__mro__ if not kind.__module__.startswith("torch.")}
    modules = {kind.__module__ for kind in kinds - {object}} & sys.modules.keys()
    spaces: list[Any] = [*(kinds - {object}), *(sys.modules[name] for name in modules)]
    before = [(space, dict(vars(space))) for space in spaces]
    containers = {id(one): (one, copy.copy(one)) for _, names in before for one in names.values() if _is_cache(one)}
    try:
        yield
    finally:
        for space, names in before:
            for name, value in list(vars(space).items()):
                if value is not names.get(name) and _holds_meta(value):
                    delattr(space, name)
                    if name in names:
                        setattr(space, name, names[name])
        for one, contents in containers.values():
            if _holds_meta(one) and not _holds_meta(contents):
                one.clear()
                (one.extend if isinstance(one, list) else one.update)(contents)


def _is_cache(value: Any) -> bool:
    return type(value) in (dict, list, set, OrderedDict, defaultdict) and len(value) <= MOST_ITEMS


def _holds_meta(value: Any) -> bool:
    leaves = tree_leaves(list(value) if isinstance(value, set) else value)
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled functions without their compiled code; only where the compiler is in use."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
