"""Plain data: what a process that is not trusted may send back, and what reading it can never do.

A pickle may name any function of the reader's process and call it. So a learner's object could end the program that
checks it, or answer `==` with True. Here `pack` writes numbers, text, tensors, arrays and containers of them, and of
any other object only the name of its class. `unpack` calls nothing but the builders in this file.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, SupportsIndex

RECORDS = ("distlab", "simulator")  # packages whose own records come back as what they are
ITERABLES = ("dict_keys", "dict_values", "dict_items", "map", "filter", "zip", "generator", "list_reverseiterator")
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Stands for an object that is not plain data. It is not a container, so it is not mistaken for the object itself.

    Attributes:
        kind: the name of its class.
    """

    kind: str

    def __repr__(self) -> str:
        if self.kind in ITERABLES:
            return f"<{self.kind}: write list(...) around it>"
        return f"an object of class {self.kind}, which is not a plain value or tensor"


def pack(value: object) -> bytes:
    """Return a value as bytes for `unpack`; an object of another class leaves its class's name only (`Foreign`).

    Subclasses of numbers, text and containers count as what they are based on, and those of tensors as plain tensors.

    Raises:
        Exception: the value is nested too deeply, or a tensor in it cannot be read.
    """
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return what `pack` wrote. Whatever the bytes are, no code of theirs runs.

    Raises:
        ValueError: the bytes are not plain data.
    """
    try:
        return _Unpacker(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"this is not plain data ({type(error).__name__}: {error})") from None


class _Packer(pickle.Pickler):
    """Writes exact builtin values itself; everything else comes by `reducer_override`."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and BUILDERS.get(obj.__name__) is obj:
            return NotImplemented  # a builder is written by its name
        try:
            return _reduced(obj)
        except Exception:  # its class does not let itself be read
            return _foreign, (_name_of(type(obj)),)


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module != __name__ or name not in BUILDERS:
            raise ValueError(f"{module}.{name} is not allowed")
        return BUILDERS[name]


def _name_of(kind: type) -> str:
    """Return a class's name, whatever its metaclass says."""
    return str(type.__dict__["__name__"].__get__(kind))


def _reduced(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the builder of an object that is not exactly a builtin value, and the builder's arguments."""
    kind, torch, numpy = type(obj), sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor, _tensor_parts(obj)
    if torch is not None and kind in (torch.dtype, torch.device, torch.layout):
        return (_device, (str(obj),)) if kind is torch.device else (_torch_name, (str(obj).removeprefix("torch."),))
    if torch is not None and kind is torch.Size:
        return _size, (tuple(obj),)
    if numpy is not None and issubclass(kind, numpy.generic | numpy.ndarray) and obj.dtype.kind in "biufc":
        array = numpy.ascontiguousarray(numpy.asarray(obj))
        return _array, (array.dtype.str, obj.shape, array.tobytes(), issubclass(kind, numpy.generic))
    if kind is complex:
        return _complex, (obj.real, obj.imag)
    if kind in (range, slice):
        return (_range if kind is range else _slice), (obj.start, obj.stop, obj.step)
    if kind.__module__.startswith(RECORDS):
        if issubclass(kind, enum.Enum):
            return _member, (kind.__module__, kind.__qualname__, obj.name)
        names = getattr(kind, "_fields", None) or tuple(f.name for f in dataclasses.fields(kind))
        return _record, (kind.__module__, kind.__qualname__, tuple((name, getattr(obj, name)) for name in names))
    return _based_on_builtin(obj)


def _based_on_builtin(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce an object to the builtin value that its class is based on, by the builtin's own methods alone."""
    kind = type(obj)
    for base, convert in _SCALARS:
        if issubclass(kind, base):
            return _same, (convert(obj),)
    if issubclass(kind, dict):
        return _mapping, (list(dict.items(obj)),)
    if issubclass(kind, list):
        return _same, (list.__getitem__(obj, slice(None)),)
    if issubclass(kind, tuple):
        return _same, (tuple.__getitem__(obj, slice(None)),)
    if issubclass(kind, set | frozenset):
        return _same, (set((set if issubclass(kind, set) else frozenset).__iter__(obj)),)
    return _foreign, (_name_of(kind),)


def _tensor_parts(tensor: Any) -> tuple[Any, ...]:
    """Return dtype, shape, bytes, device, layout, whether it requires a gradient, and whether it is a parameter."""
    import torch

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        plain = tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else torch.Tensor.clone(tensor)
        dense = (plain if plain.layout is torch.strided else plain.to_dense()).as_subclass(torch.Tensor)
        flat = torch.empty(0, dtype=torch.uint8)
        if not dense.is_meta and dense.numel():
            row = dense.cpu().resolve_conj().resolve_neg().contiguous()  # of one element with any stride
            flat = row.as_strided((row.numel(),), (1,)).view(torch.uint8)
        return (
            str(dense.dtype).removeprefix("torch."),
            tuple(dense.shape),
            flat.numpy().tobytes(),
            "meta" if dense.is_meta else "cpu",
            str(plain.layout).removeprefix("torch."),
            bool(tensor.requires_grad),
            type(tensor) is torch.nn.Parameter,
        )


def _tensor(
    dtype: str, shape: tuple[int, ...], data: bytes, device: str, layout: str, wants_grad: bool, is_parameter: bool
) -> Any:
    import torch

    kind = _torch_name(dtype)
    if device == "meta":
        tensor = torch.empty(shape, dtype=kind, device="meta")
    elif data:
        tensor = torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
    elif 0 in shape:
        tensor = torch.empty(shape, dtype=kind)
    else:
        raise ValueError(f"no bytes for a tensor of shape {list(shape)}")
    if layout == "sparse_coo":
        tensor = tensor.to_sparse()
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=wants_grad)
    return tensor.requires_grad_(wants_grad)


def _torch_name(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype | torch.layout):
        raise ValueError(f"torch.{name} is neither a dtype nor a layout")
    return found


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _size(shape: tuple[int, ...]) -> Any:
    import torch

    return torch.Size(shape)


def _array(dtype: str, shape: tuple[int, ...], data: bytes, is_scalar: bool) -> Any:
    import numpy

    array = numpy.frombuffer(data, dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


def _range(start: SupportsIndex, stop: SupportsIndex, step: SupportsIndex) -> range:
    return range(start, stop, step)


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)


def _same(value: Any) -> Any:
    return value


def _mapping(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return dict(items)


def _foreign(kind: str) -> Foreign:
    return Foreign(str(kind))


def _class_of(module: str, qualname: str) -> Any:
    """Return a class of distlab's, the simulator's or a lesson's that this process has loaded."""
    found: Any = sys.modules[module] if module.startswith(RECORDS) else None
    for name in qualname.split("."):
        found = vars(found)[name]
    if not isinstance(found, type):
        raise ValueError(f"{module}.{qualname} is not a class")
    return found


def _member(module: str, qualname: str, name: str) -> Any:
    kind = _class_of(module, qualname)
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"{qualname} is not an enumeration")
    return kind[name]


def _record(module: str, qualname: str, fields: tuple[tuple[str, Any], ...]) -> Any:
    """Build a NamedTuple or a dataclass from its fields; no method of it runs."""
    kind = _class_of(module, qualname)
    if issubclass(kind, tuple):
        if tuple(name for name, _ in fields) != kind._fields:
            raise ValueError(f"{qualname} has other fields")
        return tuple.__new__(kind, [value for _, value in fields])
    declared = {field.name for field in dataclasses.fields(kind)}
    record = object.__new__(kind)
    for name, value in fields:
        if name not in declared:
            raise ValueError(f"{qualname} has no field {name}")
        object.__setattr__(record, name, value)
    return record


BUILDERS: dict[str, Callable[..., Any]] = {
    builder.__name__: builder
    for builder in (
        *(_tensor, _torch_name, _device, _size, _array, _complex, _range, _slice),
        *(_same, _mapping, _foreign, _member, _record),
    )
}
