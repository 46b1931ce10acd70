"""Shards and their gradients, which refuse torch's tools that would take a part for the whole.

Work by element is right on a shard, and gives a tensor of the shard's shape. What gives anything else (a norm, a sum,
a shape, a decision about NaN) is not: each rank would get its own answer. So it is refused, unless the code that asks
knows of parts (`askers`), or asks for the part: `to_local()`. What work by element gives is refused in the same way.

`FlatShard` is a unit's shard, `ShardValues` what is computed from it, `ShardGradient` the gradient of any shard.
`AbsentGradient` stands in a module's parameter while the mean gradients are in pieces. Every rank hears of a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distlab.comm.together import place_in
from distlab.sharding.askers import knows_of_parts

OWN_CLIP = "call clip_gradients_(max_norm) of FullyShard or ShardedOptimizer"
CLIP = f"its norm is of this rank's part alone; {OWN_CLIP}"
SCALER = "each rank would judge by its part alone; use distlab.precision.LossScaler, whose ranks skip together"
WHOLE = (
    "each rank has a part of several parameters end to end; use an optimizer that works by element (SGD, Adam), "
    'ShardedOptimizer(split="tensors"), or no sharding'
)
DIMENSIONS = (
    "it is flat, and parameters of all shapes lie in it. FullyShard cannot make such groups; use ShardedOptimizer, "
    "whose groups are made of whole parameters"
)
PART = (
    "the answer would be of this rank's part alone, and other ranks' would differ. The norm of all gradients is "
    "clip_gradients_(math.inf); whole parameters are there `with model.summon() as module:`, on all ranks; for the "
    "part itself call to_local()"
)
NORMS = (torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, Tensor.norm, torch.norm)
REFUSED_FOR_GRADIENTS: dict[Any, str] = {
    **dict.fromkeys(NORMS, f"a norm of a shard's gradient (torch's clip_grad_norm_ takes one): {CLIP}"),
    **dict.fromkeys((Tensor.view, Tensor.reshape), f"a shard's gradient seen as one long vector (LBFGS): {WHOLE}"),
    torch._amp_foreach_non_finite_check_and_unscale_: f"torch.amp.GradScaler on shards: {SCALER}",
}
REFUSED_FOR_SHARDS: dict[Any, str] = {
    **dict.fromkeys(NORMS, f"a norm of a shard (Adafactor, LAMB and LARS take one): {WHOLE}"),
    **dict.fromkeys(
        (Tensor.dim, Tensor.ndimension, Tensor.ndim.__get__),  # type: ignore[attr-defined]
        f"the number of dimensions of a shard (groups for weight decay use it): {DIMENSIONS}",
    ),
    torch.autograd.grad: "torch.autograd.grad by a shard, whose gradient is summed over ranks: call loss.backward() "
    "and synchronize(), and read shard.grad",
}
DATA = Tensor.data.__get__  # type: ignore[attr-defined]
SHAPES = ("shape", "size", "__len__", "dim", "ndimension", "ndim")
COUNTS = ("numel", "nelement")
MIXES = (  # numbers of different places, though the shape stays
    *("softmax", "log_softmax", "softmin", "normalize", "renorm", "layer_norm", "rms_norm", "group_norm"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll", "fft", "sort", "argsort"),
)
_ABOUT = (
    "element_size untyped_storage data_ptr is_floating_point is_complex is_contiguous is_signed is_pinned is_shared "
    "is_inference is_conj is_neg get_device stride storage_offset requires_grad is_leaf retains_grad itemsize nbytes "
    "is_cpu is_cuda is_meta is_sparse is_sparse_csr is_nested is_quantized is_mkldnn is_mps is_xpu is_hpu is_mtia "
    "is_vulkan is_ipu is_maia is_xla _version output_nr name names grad _grad grad_fn _grad_fn _base __hash__ "
    "__reduce_ex__ __deepcopy__ register_hook register_post_accumulate_grad_hook _backward_hooks has_names is_tensor "
    "_post_accumulate_grad_hooks equal allclose _has_compatible_shallow_copy_type _is_view"
)
ABOUT = frozenset(_ABOUT.split())  # what is not of the values
ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "nbytes"),
    *("requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_cuda"),
)
METHODS = ("size", "dim", "numel", "element_size", "untyped_storage", "data_ptr")  # who counts memory asks for these


class HeldCount(int):
    """How many numbers a rank holds of a unit: to be added up and shown. Parameters cannot be told apart by it."""

    def _refuse(self, other: object) -> bool:
        raise ValueError(f"rank {place_in(None)[0]}: the size of a shard compared (groups of parameters): {DIMENSIONS}")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = int.__hash__


class _Part(Tensor):
    """What is a part, or was computed from parts: a tensor as any other for work by element; the rest is refused."""

    def to_local(self) -> Tensor:
        """Return this rank's part as a plain tensor, with the same memory: for code that knows what it holds.

        Shapes: any; the same
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what `_refused_for` names, and to those who do not know of parts, all but work by element.

        Raises:
            ValueError: the function would take a part for the whole; every rank raises it.
        """
        return _unless_refused(_refused_for(types), func, types, args, kwargs)


class ShardGradient(_Part):
    """The gradient of a shard."""


class ShardValues(_Part):
    """The `data` of a shard, and what is computed from it by element: it refuses what the shard refuses."""


class FlatShard(_Part, nn.Parameter):
    """A parameter in which several whole ones lie end to end, this rank's part of them. Optimizers update it.

    Attributes:
        is_shard: checkpoints refuse to take rank 0's for all.
        parts: which tensors lie in it, and which of them have no gradient.
    """

    is_shard = True
    parts: Any = None


class AbsentGradient(Tensor):
    """The gradient of a whole parameter while the mean gradients are in pieces: it has a shape, and no values."""

    why = (
        "the module's parameters have no gradients after ShardedOptimizer.synchronize(): the mean is in this rank's "
        f"pieces (named_pieces()). In place of torch's clip_grad_norm_, {OWN_CLIP}; to forget gradients, call the "
        "optimizer's zero_grad()"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell shape, type and place; refuse everything else.

        Raises:
            ValueError: the function wants values.
        """
        name = getattr(func, "__name__", "")
        if name in METHODS or (name == "__get__" and func.__self__.__name__ in ATTRIBUTES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ValueError(f"rank {place_in(None)[0]}: {cls.why}")


def of_shard(gradient: Tensor) -> Tensor:
    """Return a gradient that refuses what would take it for the whole; it shares the memory.

    Shapes: any; the same
    """
    marked: Tensor = gradient.as_subclass(ShardGradient)
    return marked


def taken_over(now: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Return the gradient of a piece with the values that a user has put in its place; None where it was taken away.

    Shapes: any; the same
    """
    if now is not None and now.data_ptr() != gradient.data_ptr():
        gradient.copy_(now.as_subclass(Tensor))
    return None if now is None else gradient


Absent = TypeVar("Absent", bound=AbsentGradient)


def absent(parameter: Tensor, memory: Tensor, kind: type[Absent]) -> Absent:
    """Return what stands for a parameter's gradient while there is none; it takes no memory of its own.

    Args:
        parameter: whose gradient it is.
        memory: a tensor of the same dtype and device; one number of it stands for all.
        kind: what to return.

    Shapes: any, [E]; the same as the parameter's
    """
    one = memory[:1] if memory.numel() else torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    nothing: Absent = one.as_strided(parameter.shape, [0] * parameter.dim()).as_subclass(kind)
    return nothing


def _refused_for(types: Sequence[type]) -> dict[Any, str]:
    """Return the functions that refuse a shard's gradient, a shard, or both, whichever are among the arguments."""
    if not any(issubclass(one, ShardGradient) for one in types):
        return REFUSED_FOR_SHARDS
    has_shard = any(issubclass(one, (FlatShard, ShardValues)) for one in types)
    return REFUSED_FOR_SHARDS | REFUSED_FOR_GRADIENTS if has_shard else REFUSED_FOR_GRADIENTS


def _unless_refused(
    refused: Mapping[Any, str],
    func: Any,
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    if any(issubclass(one, AbsentGradient) for one in types):
        return NotImplemented  # it answers by itself
    if func in refused:
        raise ValueError(f"rank {place_in(None)[0]}: {refused[func]}")
    name = _name_of(func)
    if name in ("__reduce_ex__", "__deepcopy__") and not isinstance(args[0], FlatShard):
        return getattr(args[0].to_local(), name)(*args[1:])
    knows = name in ABOUT or knows_of_parts()
    if knows and func != DATA:  # many times per step
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    parts = [one for one in tree_leaves([args, kwargs]) if isinstance(one, _Part)]
    kind = ShardGradient if any(isinstance(one, ShardGradient) for one in parts) else ShardValues
    if not knows and name in (*SHAPES, *MIXES):
        raise ValueError(f"rank {place_in(None)[0]}: {_why(name)}")
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
        if func == DATA:  # is no way around what is refused
            return result.as_subclass(kind)
        if name.startswith("new_"):
            return result
        if name in COUNTS:
            return HeldCount(result)
        shapes = {one.shape for one in parts}
        return tree_map(lambda one: _marked(one, shapes, kind, name), result)


def _marked(one: Any, shapes: set[torch.Size], kind: type[_Part], name: str) -> Any:
    """Return a result such that it refuses what a shard refuses; refuse one that is not by element."""
    if isinstance(one, _Part) or one is None or isinstance(one, (str, torch.dtype, torch.device, torch.layout)):
        return one
    if not isinstance(one, Tensor) or one.shape not in shapes:
        raise ValueError(f"rank {place_in(None)[0]}: {_why(name)}")
    return one.as_subclass(kind)


def _why(name: str) -> str:
    if name in SHAPES:
        return f"the shape of a shard ({name}; groups for weight decay use it): {DIMENSIONS}"
    return f"{name or 'a function'} of a shard: {PART}"


def _name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that is read."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(func.__self__, "__name__", "")) if name == "__get__" else name
