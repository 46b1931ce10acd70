"""Tensors of a unit that backward left out on every rank: an optimizer's step passes them by, as in one process.

Several tensors lie in one flat shard, and an optimizer sees the shard as one tensor with one gradient. Two questions
follow.

Who knows that no rank had a gradient? A rank without one adds -0.0 to the sum; no rank adds it otherwise. A sum is -0.0
only if all its parts are. So the sum itself tells, and nothing more is sent (`mark`, `is_marked`).

How is a part of a shard kept from an optimizer? During a step each tensor's piece is a parameter of its own, with its
own state. Pieces without a gradient have None (`step_by_pieces`). What the optimizer counts per parameter, such as
Adam's steps, is kept per tensor where tensors differ, also in what is saved.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from distlab.plan import FlatLayout
from distlab.plan.sharding import Piece
from distlab.sharding.by_element import refuse_whole_tensor_optimizers
from distlab.sharding.shard_gradient import FlatShard
from distlab.sharding.state.assemble import BY_TENSOR, of_row


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


class _Taken(NamedTuple):
    """A group of an optimizer whose shards are in pieces, and its parameters as they were."""

    group: dict[str, Any]
    parameters: list[Any]
    cut: list[tuple[FlatShard, list[nn.Parameter]]]


@functools.cache  # one pair of hooks for all models
def step_by_pieces() -> None:
    """From now on, optimizers of flat shards pass by the tensors that no rank has a gradient of.

    Those that do not work by element are refused.
    """
    taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Taken]] = weakref.WeakKeyDictionary()

    def take_apart(optimizer: torch.optim.Optimizer) -> None:
        taken[optimizer] = [
            _take_apart(optimizer, group) for group in optimizer.param_groups if _needs(optimizer, group)
        ]

    def put_together(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, parameters, cut in taken.pop(optimizer, []):
            group["params"] = parameters
            for shard, pieces in cut:
                _put_together(optimizer.state, shard, pieces)

    refuse_whole_tensor_optimizers(take_apart, put_together)
    register_optimizer_step_post_hook(put_together)


def _needs(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return any(_is_cut(optimizer, one) for one in group["params"])


def _is_cut(optimizer: torch.optim.Optimizer, shard: Tensor) -> bool:
    """Return whether a shard's tensors differ in what this step does to them, or an earlier one did."""
    if not isinstance(shard, FlatShard) or shard.grad is None or shard.parts is None:
        return False
    return bool(shard.parts.unused) or BY_TENSOR in optimizer.state.get(shard, {})


def _take_apart(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> _Taken:
    parameters, cut = group["params"], []
    group["params"] = []
    for one in parameters:
        if _is_cut(optimizer, one):
            cut.append((one, _pieces(optimizer.state, one)))
            group["params"] += cut[-1][1]
        else:
            group["params"].append(one)
    return _Taken(group, parameters, cut)


def _pieces(state: dict[Tensor, dict[str, Any]], shard: FlatShard) -> list[nn.Parameter]:
    """Return the pieces of a shard as parameters; give each its part of the state."""
    assert shard.parts is not None, "it is cut"
    assert shard.grad is not None, "it is cut"
    kept, made = state.get(shard, {}), []
    values = {key: value for key, value in kept.items() if _is_like(value, shard)}
    numbers = {key: value for key, value in kept.items() if key not in values and key != BY_TENSOR}
    of_tensor = kept.get(BY_TENSOR, {})
    for piece in shard.parts.pieces:
        part = _part(piece)
        one = nn.Parameter(shard.detach()[part])
        one.grad = None if piece.tensor in shard.parts.unused else shard.grad.detach()[part]
        own = of_tensor.get(shard.parts.names[piece.tensor], numbers)
        if kept and own is not None:
            state[one] = {**{key: value[part] for key, value in values.items()}, **copy.deepcopy(own)}
        made.append(one)
    return made


def _put_together(state: dict[Tensor, dict[str, Any]], shard: FlatShard, pieces: list[nn.Parameter]) -> None:
    """Collect the states of pieces in that of their shard."""
    assert shard.parts is not None, "it is cut"
    shard.detach()[:0].zero_()  # counts as a change of the shard: units gather it anew
    kept: dict[str, Any] = {key: value for key, value in state.get(shard, {}).items() if _is_like(value, shard)}
    of_tensor: dict[str, dict[str, Any] | None] = {}
    for piece, one in zip(shard.parts.pieces, pieces, strict=True):
        own = state.pop(one, {})
        for key, value in own.items():
            if _is_like(value, one):
                whole = kept.setdefault(key, torch.zeros(shard.detach().shape, dtype=value.dtype, device=value.device))
                whole[_part(piece)] = value
        numbers = {key: value for key, value in own.items() if not _is_like(value, one)}
        of_tensor[shard.parts.names[piece.tensor]] = numbers if own else None  # None: never updated
    if any(numbers is not None for numbers in of_tensor.values()):
        state[shard] = {**kept, **of_row(of_tensor)}


def _is_like(value: Any, one: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == one.detach().shape


def _part(piece: Piece) -> slice:
    return slice(piece.offset, piece.offset + piece.stop - piece.start)
