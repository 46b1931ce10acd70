"""Pieces: what a rank owns of parameters, and where that came from."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Origin(NamedTuple):
    """Name and shape of the parameter that a piece was cut from: `piece.origin`, for `make_optimizer` to tell apart."""

    name: str
    shape: tuple[int, ...]


class OwnPiece(NamedTuple):
    """What this rank owns of one parameter.

    Attributes:
        name: of the whole parameter.
        slot: place of the parameter in its bucket.
        start: first element of the parameter, seen as a row.
        stop: one past its last element.
        parameter: shares the memory of those elements; what the optimizer updates.
    """

    name: str
    slot: int
    start: int
    stop: int
    parameter: nn.Parameter
