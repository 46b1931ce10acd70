"""Pieces: what a rank owns of parameters; and an optimizer of pieces, whose groups are made of whole parameters.

`make_optimizer` is called with whole parameters, so groups by `p.dim()`, by shape or by name are those of one process.
Then each whole parameter is replaced by the piece that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from distlab.sharding.by_element import what_it_needs
from distlab.sharding.part import OwnPiece
from distlab.sharding.zero.offload import OffloadedOptimizer

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Origin(NamedTuple):
    """Name and shape of the parameter that a piece was cut from: `piece.origin`, for `make_optimizer` to tell apart."""

    name: str
    shape: tuple[int, ...]


class Grouped(NamedTuple):
    """An optimizer of this rank's pieces.

    Attributes:
        optimizer: of the pieces.
        names: of all parameters in each of its groups, in the order in which they were given: the same on all ranks.
    """

    optimizer: torch.optim.Optimizer
    names: list[list[str]]


def group_pieces(
    named: Sequence[tuple[str, nn.Parameter]],
    pieces: Sequence[OwnPiece],
    make_optimizer: MakeOptimizer,
) -> Grouped:
    """Build the optimizer of whole parameters, then give it the pieces in their place.

    An optimizer that copies its parameters (`OffloadedOptimizer`) is built again, of the pieces.

    Shapes: parameters of any shape -> pieces of [stop - start], or of the parameter's shape

    Raises:
        ValueError: the optimizer is of other parameters, or groups pieces in another way than whole parameters.
    """
    for name, parameter in named:
        parameter.origin = Origin(name, tuple(parameter.shape))  # type: ignore[attr-defined]
    optimizer = make_optimizer([parameter for _, parameter in named])
    whole_names = {id(parameter): name for name, parameter in named}
    names = _names_of(optimizer, whole_names)
    own = {piece.name: piece for piece in pieces}
    if isinstance(optimizer, OffloadedOptimizer):
        # A model of few elements may leave a rank with none, and torch's optimizers refuse to have nothing to do.
        nothing = nn.Parameter(named[0][1].detach().reshape(-1)[:0])
        optimizer = make_optimizer([piece.parameter for piece in pieces] or [nothing])
        _check_same_groups(optimizer, names, own)
        return Grouped(optimizer, names)
    wholes = dict(named)
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"][:] = [own[name].parameter for name in members if name in own]
    for name in [name for members in names for name in members]:
        state = optimizer.state.pop(wholes[name], None)
        if state and name in own:  # Adagrad makes its state when it is built
            optimizer.state[own[name].parameter] = _cut(state, wholes[name], own[name])
    return Grouped(optimizer, names)


def _names_of(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> list[list[str]]:
    groups = [group["params"] for group in optimizer.param_groups]
    if any(id(parameter) not in known for group in groups for parameter in group):
        raise ValueError(
            "make_optimizer made an optimizer of other parameters; build it of those that it is called with, or of "
            "the module's own that require a gradient"
        )
    return [[known[id(parameter)] for parameter in group] for group in groups]


def _check_same_groups(
    optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], own: Mapping[str, OwnPiece]
) -> None:
    known = {id(piece.parameter): name for name, piece in own.items()}
    found = [[known[id(one)] for one in group["params"] if id(one) in known] for group in optimizer.param_groups]
    expected = [[name for name in members if name in own] for members in names]
    if [sorted(group) for group in found] != [sorted(group) for group in expected]:
        raise ValueError(
            f"make_optimizer groups whole parameters as {[len(group) for group in expected]} and pieces of them as "
            f"{[len(group) for group in found]}; with offload it is called with flat pieces too: group by "
            "`p.origin.name` or `len(p.origin.shape)` and not by `p.dim()`"
        )


def _cut(state: Mapping[str, Any], whole: Tensor, piece: OwnPiece) -> dict[str, Any]:
    return {
        key: value.reshape(-1)[piece.start : piece.stop].reshape(piece.parameter.shape).clone()
        if isinstance(value, Tensor) and value.shape == whole.shape and value.dim() > 0
        else value
        for key, value in state.items()
    }


def check_by_element(optimizer: torch.optim.Optimizer, split: str) -> None:
    """Refuse an optimizer that looks at more than its own piece.

    Raises:
        ValueError: its update of a piece differs from its update of the whole.
    """
    worker = optimizer.inner if isinstance(optimizer, OffloadedOptimizer) else optimizer
    name = type(worker).__name__
    needs = what_it_needs(worker)
    if split == "elements" and needs == "tensors":
        raise ValueError(f'{name} looks at whole tensors, and split="elements" cuts them; pass split="tensors"')
    if needs == "all":
        raise ValueError(f"{name} looks at all parameters at once, and each rank has some; use it without sharding")
