"""Gradients of shards, which refuse torch's tools that would take a part for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CLIP = "its norm is of this rank's part alone; call clip_gradients_(max_norm) of FullyShard or ShardedOptimizer"
SCALER = "each rank would judge by its part alone; use distlab.precision.LossScaler, whose ranks skip together"
REFUSED = {
    torch._foreach_norm: f"torch's clip_grad_norm_ on shards: {CLIP}",
    torch.linalg.vector_norm: f"a norm of a shard's gradient: {CLIP}",
    Tensor.norm: f"a norm of a shard's gradient: {CLIP}",
    torch.norm: f"a norm of a shard's gradient: {CLIP}",
    torch._amp_foreach_non_finite_check_and_unscale_: f"torch.amp.GradScaler on shards: {SCALER}",
}


class ShardGradient(Tensor):
    """The gradient of a shard: a tensor as any other, but for norms and GradScaler, which every rank refuses in words.

    What is computed from it is a plain tensor. `gradient.detach()` is the tensor itself, for code that knows of shards.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is in `REFUSED`; run anything else on plain tensors.

        Raises:
            ValueError: the function would take a part for the whole.
        """
        if func in REFUSED:
            raise ValueError(f"rank {dist.get_rank() if dist.is_initialized() else 0}: {REFUSED[func]}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def of_shard(gradient: Tensor) -> Tensor:
    """Return a gradient that refuses what would take it for the whole; it shares the memory.

    Shapes: any; the same
    """
    marked: Tensor = gradient.as_subclass(ShardGradient)
    return marked
