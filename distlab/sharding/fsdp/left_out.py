"""Tensors of a unit that backward left out on every rank: an optimizer's step passes them by, as in one process.

Several tensors lie in one flat shard, and an optimizer sees the shard as one tensor with one gradient. Two questions
follow.

Who knows that no rank had a gradient? A rank without one adds -0.0 to the sum; no rank adds it otherwise. A sum is -0.0
only if all its parts are. So the sum itself tells, and nothing more is sent (`mark`, `is_marked`).

How is a part of a shard kept from an optimizer? During a step each tensor's piece is a parameter of its own, and pieces
without a gradient have None: see `step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.plan import FlatLayout


class Pieces:
    """Which tensors a shard holds a piece of, and which of these no rank has a gradient of.

    Attributes:
        names: of the tensors, by their number.
        pieces: of this rank.
        unused: numbers of tensors.
    """

    def __init__(self, layout: FlatLayout, rank: int) -> None:
        self.names, self.pieces = layout.names, layout.pieces(rank)
        self.unused: set[int] = set()

    def note(self, total: Tensor, left_out: set[int], *, adds: bool) -> None:
        """Read from a sum over ranks which tensors no rank had a gradient of.

        Args:
            total: the sum, before anything else is done to it.
            left_out: tensors that this rank had no gradient of; no others are looked at.
            adds: it is added to a gradient that the shard has.

        Shapes: total [L]
        """
        found = {one.tensor for one in self.pieces if one.tensor in left_out and is_marked(total[one.offset])}
        self.unused = self.unused & found if adds else found


def put_end_to_end(flat: Tensor, gradients: Sequence[Tensor | None], layout: FlatLayout) -> None:
    """Copy gradients into a flat one: zeros for None, and 0.0 for -0.0.

    Shapes: flat [n L]
    """
    flat[layout.num_elements :].zero_()
    both = list(zip(flat[: layout.num_elements].split(layout.sizes), gradients, strict=True))
    if all(one is None or (one.is_cpu and one.dtype == flat.dtype) for one in gradients):
        for part, one in both:  # one pass for both; on a GPU it would be many kernels
            part.zero_() if one is None else torch.add(one.reshape(-1), 0.0, out=part)
        return
    rows = [torch.zeros_like(part) if one is None else one.reshape(-1) for part, one in both]
    torch.cat(rows, out=flat[: layout.num_elements])
    flat.add_(0.0)  # -0.0 becomes 0.0


def mark(flat: Tensor, layout: FlatLayout, left_out: Iterable[int]) -> None:
    """Make the gradients of tensors that were left out -0.0; no other number is.

    Shapes: flat [n L]
    """
    for tensor in left_out:
        flat[layout.offsets[tensor] :][: layout.sizes[tensor]].fill_(-0.0)


def refuse_sparse(names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that have no place in a flat buffer.

    Raises:
        RuntimeError: naming their tensors.
    """
    sparse = [name for name, one in zip(names, gradients, strict=True) if one is not None and one.is_sparse]
    if sparse:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {', '.join(sparse)} got a sparse gradient, and shards hold dense ones. Build the "
            "layer with sparse=False"
        )


def is_marked(number: Tensor) -> bool:
    """Return whether a number is -0.0."""
    return bool((number == 0) & torch.signbit(number))
