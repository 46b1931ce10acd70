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

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Origin(NamedTuple):
    """Name and shape of a parameter: `p.origin`, for `make_optimizer` to tell them apart."""

    name: str
    shape: tuple[int, ...]


def group_pieces(
    named: Sequence[tuple[str, nn.Parameter]],
    pieces: Sequence[OwnPiece],
    make_optimizer: MakeOptimizer,
) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """Build the optimizer of whole parameters, then give it the pieces in their place.

    Shapes: parameters of any shape -> pieces of [stop - start], or of the parameter's shape

    Returns:
        The optimizer of this rank's pieces; the names of all parameters in each of its groups, in the order in which
        they were given: the same on all ranks.

    Raises:
        ValueError: the optimizer is of other parameters.
    """
    for name, parameter in named:
        parameter.origin = Origin(name, tuple(parameter.shape))  # type: ignore[attr-defined]
    optimizer = make_optimizer([parameter for _, parameter in named])
    known, own = {id(parameter): name for name, parameter in named}, {piece.name: piece for piece in pieces}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(id(parameter) not in known for group in groups for parameter in group):
        raise ValueError(
            "make_optimizer made an optimizer of other parameters; build it of those that it is called with, or of "
            "the module's own that require a gradient"
        )
    names = [[known[id(parameter)] for parameter in group] for group in groups]
    for group, members in zip(groups, names, strict=True):
        for name, whole in zip(members, list(group), strict=True):
            state = optimizer.state.pop(whole, None)
            if state and name in own:  # Adagrad makes its state when it is built
                optimizer.state[own[name].parameter] = _cut(state, whole, own[name])
        group[:] = [own[name].parameter for name in members if name in own]
    return optimizer, names


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
    name, needs = type(optimizer).__name__, what_it_needs(optimizer)
    if split == "elements" and needs == "tensors":
        raise ValueError(f'{name} looks at whole tensors, and split="elements" cuts them; pass split="tensors"')
    if needs == "all":
        raise ValueError(f"{name} looks at all parameters at once, and each rank has some; use it without sharding")
