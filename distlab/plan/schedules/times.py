"""How long the actions of a schedule take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ActionTimes(NamedTuple):
    """Times of a pipeline's actions, in any one unit: each is one number, or one number a stage.

    The zero-bubble papers call `input_gradient` B. A full backward pass takes `input_gradient + weight_gradient`.

    Attributes:
        forward: of F.
        input_gradient: of I.
        weight_gradient: of W.
        communication: from the end of an action to the start of the one on another rank that needs it.
    """

    forward: float | Sequence[float]
    input_gradient: float | Sequence[float]
    weight_gradient: float | Sequence[float]
    communication: float | Sequence[float] = 0.0
