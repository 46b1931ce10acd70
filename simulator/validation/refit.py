"""Fit a stack's constants to measured steps, and predict each step by constants that never saw its like.

A step's time is close to linear in the constants' inverse rates and times: each is so much work over a rate. So the fit
needs one simulation per row and constant, then solves for the constants with the least absolute relative error, a few
times over. Constants stay in their bounds, which physics gives: no rate is above the best that was measured.

Leaving one structure out (a size, a cluster, a schedule) solves again without its rows, from the same slopes; the rows
left out are then simulated with the constants found.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.hardware.presets import Stack
from simulator.validation.case import Case

Floats = NDArray[np.float64]
ROUNDS = 4
REWEIGHTS = 6
SMALL = 0.02  # errors below this weigh alike
SHRINK = 0.02  # how much a constant's relative step costs, in per cent of error: keeps what no row tells near its start


class Constant(NamedTuple):
    """A constant of a stack that a fit may change.

    Attributes:
        name: the field of `Stack`.
        is_rate: a fraction of a rate, whose inverse is linear in the time; else a time.
        low: the least value.
        high: the largest value.
        step: by which the slope is measured, in units of the linear variable.
    """

    name: str
    is_rate: bool
    low: float
    high: float
    step: float

    def linear(self, stack: Stack) -> float:
        """Return the variable in which times are linear."""
        value = float(getattr(stack, self.name))
        return 1 / value if self.is_rate else value

    def clip(self, linear: float) -> float:
        """Return the value of the field, inside its bounds."""
        value = 1 / max(linear, 1e-12) if self.is_rate else linear
        return min(max(value, self.low), self.high)


FITS = tomllib.loads(resources.files("simulator.validation").joinpath("fits.toml").read_text(encoding="utf-8"))
CONSTANTS = {name: Constant(name, *row) for name, row in FITS["constants"].items()}


class Slopes(NamedTuple):
    """Predicted times of cases at some constants, and how they change with each.

    Attributes:
        times: predicted over measured [N].
        slopes: of the same with each constant's linear variable [N, C].
        start: the linear variables [C].
        weights: of each row, so that each family counts alike [N].
    """

    times: Floats
    slopes: Floats
    start: Floats
    weights: Floats


def measure_slopes(cases: Sequence[Case], stack: Stack, constants: Sequence[Constant]) -> Slopes:
    """Simulate every case at the stack, and with each constant moved by its step.

    Cost: one simulation per case, and one more for each constant.
    """
    measured = np.array([case.measured_s for case in cases])
    times = np.array([case.predict_s(stack) for case in cases]) / measured
    columns = []
    for constant in constants:
        here = constant.linear(stack) + constant.step
        changed: dict[str, Any] = {constant.name: 1 / here if constant.is_rate else here}
        moved = replace(stack, **changed)
        columns.append((np.array([case.predict_s(moved) for case in cases]) / measured - times) / constant.step)
    counts = {family: sum(case.family == family for case in cases) for family in {case.family for case in cases}}
    weights = np.array([counts[case.family] ** -0.5 for case in cases])
    start = np.array([constant.linear(stack) for constant in constants])
    return Slopes(times, np.stack(columns, axis=1), start, weights)


def solve(slopes: Slopes, stack: Stack, constants: Sequence[Constant], keep: Floats | None = None) -> Stack:
    """Return the stack with the least mean absolute relative error on the rows to keep, families counting alike.

    Absolute, not squared: a step that something disturbed must not move the constants. Solved as a row of least-squares
    problems, each weighing rows by the inverse of the error that the one before left.
    """
    weights = slopes.weights if keep is None else slopes.weights * keep
    moves = np.zeros(len(constants))
    for _ in range(REWEIGHTS):
        errors = np.abs(1 - slopes.times - slopes.slopes @ moves)
        moves = _least_squares(slopes, constants, weights / np.sqrt(np.maximum(errors, SMALL)))
    values = slopes.start + moves
    fields: dict[str, Any] = {each.name: each.clip(value) for each, value in zip(constants, values, strict=True)}
    return replace(stack, **fields)


def _least_squares(slopes: Slopes, constants: Sequence[Constant], weights: Floats) -> Floats:
    """Return the moves of the constants with the least squared error; one that leaves its bounds stays at them."""
    scale = np.maximum(slopes.start, [constant.step for constant in constants])
    left = np.vstack([slopes.slopes * weights[:, None], np.diag(SHRINK / scale)])
    right = np.append((1 - slopes.times) * weights, np.zeros(len(constants)))
    moves, free = np.zeros(len(constants)), np.ones(len(constants), bool)
    while free.any():
        rest = right - left[:, ~free] @ moves[~free]
        moves[free] = np.linalg.lstsq(left[:, free], rest, rcond=None)[0]
        values = slopes.start + moves
        bounded = np.array([each.clip(value) for each, value in zip(constants, values, strict=True)])
        bounded = np.array([1 / one if each.is_rate else one for each, one in zip(constants, bounded, strict=True)])
        outside = free & ~np.isclose(bounded, values, rtol=1e-9, atol=1e-15)
        if not outside.any():
            break
        moves[outside] = (bounded - slopes.start)[outside]
        free &= ~outside
    return moves


def fit_stack(cases: Sequence[Case], stack: Stack, constants: Sequence[Constant]) -> Stack:
    """Return the stack fitted to cases, from a first guess."""
    for _ in range(ROUNDS):
        stack = solve(measure_slopes(cases, stack, constants), stack, constants)
    return stack


def leave_out(cases: Sequence[Case], stack: Stack, constants: Sequence[Constant]) -> tuple[list[float], list[float]]:
    """Predict each case by constants fitted without all cases of its structure, and without all of its family.

    The second are no numbers where no other family has the stack.

    Cost: one simulation per case and constant, and two more per case.
    """
    slopes = measure_slopes(cases, stack, constants)

    def without(keys: Sequence[Any]) -> list[float]:
        predicted = [math.nan] * len(cases)
        for key in dict.fromkeys(keys):
            keep = np.array([other != key for other in keys], np.float64)
            fitted = solve(slopes, stack, constants, keep)
            for index, other in enumerate(keys):
                if other == key:
                    predicted[index] = cases[index].predict_s(fitted)
        return predicted

    families = [case.family for case in cases]
    alone = [math.nan] * len(cases) if len(set(families)) == 1 else None
    return without([(case.family, case.structure) for case in cases]), alone or without(families)
