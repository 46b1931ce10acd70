"""The norm of gradients, and clipping by it, where ranks hold parts of some parameters and the whole of others.

The squares of parts are summed over ranks. A parameter that every rank holds whole has the same gradient on all: summed
with the others it would count t times, so one rank counts it for all.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.clip import Gradient, clip_counted_, counted_norm
from distlab.blocks.modules.split import splits_of
from distlab.comm.p2p import group_rank


def tensor_parallel_norm(model: nn.Module, group: ProcessGroup | None = None) -> Tensor:
    """Return the norm that one process would find for the gradients of the whole model; equal on every rank.

    Cost: an all-reduce of 8 bytes.
    Error: as one process', up to the order of additions.
    """
    return counted_norm(_gradients(model, group), [group])


def clip_tensor_parallel_(
    model: nn.Module, max_norm: float, group: ProcessGroup | None = None, *, check_finite: bool = True
) -> Tensor:
    """Scale gradients in place so that the whole model's norm is at most `max_norm`; return the norm that it had.

    Cost: as `tensor_parallel_norm`.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: the norm is not finite, on every rank; nothing is changed.
    """
    return clip_counted_(_gradients(model, group), max_norm, [group], check_finite=check_finite)


def _gradients(model: nn.Module, group: ProcessGroup | None) -> Iterator[Gradient]:
    split, counts_whole = splits_of(model), group_rank(group) == 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield Gradient(name, parameter.grad, name in split or counts_whole)
