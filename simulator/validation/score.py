"""Errors, biases, rank correlations and the cost of a choice, of predicted against measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_ALTERNATIVES = 2


class Score(NamedTuple):
    """How near predictions come to measurements. Errors are parts: 0.05 is 5 %.

    Attributes:
        rows: measurements.
        error: mean of |predicted / measured - 1|.
        bias: mean of predicted / measured - 1: below 0, predictions are too short.
        tau: Kendall's rank correlation over all rows; None: fewer than two.
        choices: sets of alternatives for one model and batch.
        choice_cost: how much slower than the fastest measured one the alternative with the shortest prediction is,
            on average over the sets; None: there are none.
        choice_tau: rank correlation inside the sets, on average; None: there are none.
    """

    rows: int
    error: float
    bias: float
    tau: float | None
    choices: int
    choice_cost: float | None
    choice_tau: float | None


def score(predicted: Sequence[float], measured: Sequence[float], choices: Sequence[str]) -> Score:
    """Compare predictions with measurements.

    Args:
        predicted: times.
        measured: times.
        choices: the set of alternatives that each row belongs to, or "".

    Raises:
        ValueError: there is no row.
    """
    if not len(predicted):
        raise ValueError("there is no row to compare; pass at least one")
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    sets: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(choices):
        if name:
            sets[name].append(index)
    costs, taus = [], []
    for members in sets.values():
        if len(members) >= MIN_ALTERNATIVES:
            times = [measured[index] for index in members]
            best = min(members, key=lambda index: predicted[index])
            costs.append(measured[best] / min(times) - 1)
            taus.append(kendall_tau([predicted[index] for index in members], times))
    known = [tau for tau in taus if tau is not None]
    return Score(
        rows=len(relative),
        error=float(np.abs(relative).mean()),
        bias=float(relative.mean()),
        tau=kendall_tau(predicted, measured),
        choices=len(costs),
        choice_cost=float(np.mean(costs)) if costs else None,
        choice_tau=float(np.mean(known)) if known else None,
    )


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Kendall's tau-b: 1 where both have the same order, -1 the opposite; None where one of them has no order.

    Source: Kendall 1945, Biometrika 33: ties count for neither order.
    """
    first, second = (np.sign(np.subtract.outer(values, values)) for values in (one, other))
    pairs = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / pairs if pairs else None
