"""Shards and their gradients, which refuse torch's tools that would take a part for the whole.

Work by element is right on a shard. A norm, a number of dimensions or a decision about NaN is not: each rank would get
its own answer. `FlatShard` is a unit's shard. `ShardGradient` is the gradient of any shard. `AbsentGradient` stands in
a module's parameter while the mean gradients are in pieces. Each of them refuses such tools, so every rank that calls
them hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
}
DATA = Tensor.data.__get__  # type: ignore[attr-defined]
ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "nbytes"),
    *("requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_cuda"),
)
METHODS = ("size", "dim", "numel", "element_size", "untyped_storage", "data_ptr")  # who counts memory asks for these


class ShardGradient(Tensor):
    """The gradient of a shard: a tensor as any other, but for norms and GradScaler, which every rank refuses in words.

    What is computed from it is a plain tensor. `gradient.detach()` is the tensor itself, for code that knows of shards.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is in `REFUSED_FOR_GRADIENTS`; run anything else on plain tensors.

        Raises:
            ValueError: the function would take a part for the whole.
        """
        return _unless_refused(REFUSED_FOR_GRADIENTS, func, args, kwargs)


class ShardValues(Tensor):
    """The `data` of a shard: it refuses what the shard refuses. What is computed from it is a plain tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is in `REFUSED_FOR_SHARDS`; run anything else on plain tensors.

        Raises:
            ValueError: the function would take a part for the whole.
        """
        return _unless_refused(_refused_for(types), func, args, kwargs)


class FlatShard(nn.Parameter):
    """A parameter in which several whole ones lie end to end, this rank's part of them. Optimizers update it.

    Attributes:
        is_shard: checkpoints refuse to take rank 0's for all.
        parts: which tensors lie in it, and which of them have no gradient.
    """

    is_shard = True
    parts: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is in `REFUSED_FOR_SHARDS`; run anything else on plain tensors.

        Raises:
            ValueError: the function would take a part for the whole.
        """
        return _unless_refused(_refused_for(types), func, args, kwargs)


class AbsentGradient(Tensor):
    """The gradient of a whole parameter while the mean gradients are in pieces: it has a shape, and no values."""

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
        raise ValueError(
            f"rank {_rank()}: the module's parameters have no gradients after ShardedOptimizer.synchronize(): the mean "
            f"is in this rank's pieces (named_pieces()). In place of torch's clip_grad_norm_, {OWN_CLIP}; to forget "
            "gradients, call the optimizer's zero_grad()"
        )


def of_shard(gradient: Tensor) -> Tensor:
    """Return a gradient that refuses what would take it for the whole; it shares the memory.

    Shapes: any; the same
    """
    marked: Tensor = gradient.as_subclass(ShardGradient)
    return marked


def absent(parameter: Tensor, memory: Tensor) -> Tensor:
    """Return what stands for a parameter's gradient while there is none; it takes no memory of its own.

    Args:
        parameter: whose gradient it is.
        memory: a tensor of the same dtype and device; one number of it stands for all.

    Shapes: any, [E]; the same as the parameter's
    """
    one = memory[:1] if memory.numel() else torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    nothing: Tensor = one.as_strided(parameter.shape, [0] * parameter.dim()).as_subclass(AbsentGradient)
    return nothing


def _refused_for(types: Sequence[type]) -> dict[Any, str]:
    """Return what a call with a shard among its arguments may not be; a gradient among them refuses its own too."""
    has_gradient = any(issubclass(one, ShardGradient) for one in types)
    return REFUSED_FOR_SHARDS | REFUSED_FOR_GRADIENTS if has_gradient else REFUSED_FOR_SHARDS


def _unless_refused(
    refused: Mapping[Any, str], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    if func in refused:
        raise ValueError(f"rank {_rank()}: {refused[func]}")
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
    if func == DATA:  # is no way around what is refused
        return result.as_subclass(ShardGradient if isinstance(args[0], ShardGradient) else ShardValues)
    return result


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
