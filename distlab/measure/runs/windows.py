"""Time windows of steps between calibrations, and judge predictions against them, on a machine whose speed drifts.

`time_beside` is the loop, for the steps of any program; each rank gets a `RankReport`.

Each window of steps has a calibration before it and one after. Where the two predict step times that differ by more
than 5 %, the machine's speed changed and the window says nothing: it is dropped, and counted. The bar is met when the
median error over at least ten kept windows is at most the bar, or twice what repeats of a step differ by.

The time of a step is that of its slowest rank, from the moment at which all begin: see `time_window`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distlab.measure.machine import ranks as on_ranks
from distlab.plan import Workload
from distlab.trace import SpanWriter, Trace

MAX_DRIFT = 0.05
MAX_CHANGE = 0.2
MIN_WINDOWS = 10


@dataclass(frozen=True)
class Window:
    """One window of equal steps and what the calibrations around it predict for a step, in seconds.

    `taken_cores` is how many cores other programs used while the ranks wanted them.
    """

    measured_s: float
    predicted_s: float
    predicted_before_s: float
    predicted_after_s: float
    taken_cores: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether other processes took so much of the cores that the ranks waited for them."""
        return self.taken_cores > on_ranks.MAX_TAKEN_CORES

    @property
    def calm(self) -> bool:
        """Whether the machine kept its speed: the two calibrations are apart by at most 5 % of the prediction."""
        return abs(self.predicted_after_s - self.predicted_before_s) / self.predicted_s <= MAX_DRIFT

    @property
    def error(self) -> float:
        """Signed relative error of the prediction: below zero is too optimistic."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass
class RankReport:
    """What one rank saw.

    Attributes:
        losses: mean loss over the batch: of each update before the windows, and of each window's last step.
        weights: the whole model's state after num_updates updates, by name, on the CPU.
        workload: the whole model as counted on the first rank; None without windows.
        rounds: calibration rounds, one more than windows; of a TrainingRun each is a CalibrationRound.
        expert_loads: of each window, how uneven each layer's experts were loaded in its last step; see `expert_loads`.
        measured_s: seconds of a step in each window; see `time_window`.
        taken_cores: that other processes took from the ranks until the end of each round, from the one before.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    workload: Workload | None = None
    rounds: list[Any] = field(default_factory=list)
    expert_loads: list[tuple[float, ...]] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    taken_cores: list[float] = field(default_factory=list)
    step_ns: list[tuple[int, int]] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace.from_spans([]))

    def step_trace(self, step: int) -> Trace:
        """Return what the rank did in a timed step."""
        start, end = self.step_ns[step]
        return self.trace.select((self.trace.start_ns >= start) & (self.trace.end_ns <= end))


@dataclass(frozen=True)
class Verdict:
    """The prediction against the windows that count.

    Attributes:
        num_kept: windows that count; `num_dropped` are those in which the machine drifted.
        median_error: median of the absolute relative errors.
        signed_error: median of the signed ones.
        repeat_spread: median distance of a window from the median window, relative: the noise of the measurement.
        bar: what was promised for median_error.
        holds: whether median_error <= max(bar, 2 x repeat_spread), or None with fewer than ten windows.
    """

    num_kept: int
    num_dropped: int
    measured_s: float
    predicted_s: float
    median_error: float
    signed_error: float
    repeat_spread: float
    bar: float
    holds: bool | None

    def __str__(self) -> str:
        if self.holds is None:
            num_windows = self.num_kept + self.num_dropped
            return (
                f"not judged: of {num_windows} windows (some steps between two calibrations) {self.num_kept} were "
                f"calm, and {MIN_WINDOWS} are needed. Over all {num_windows} the median step took "
                f"{self.measured_s * 1e3:.3g} ms. The prediction is off by {self.median_error:.1%} (the bar is "
                f"{self.bar:.0%}); windows differ among themselves by {self.repeat_spread:.1%}. "
                "End other programs and run the same command again."
            )
        judged = "holds" if self.holds else "falls short"
        return (
            f"median error {self.median_error:.1%} over {self.num_kept} windows, {self.num_dropped} dropped for drift; "
            f"bar {self.bar:.0%} or twice the repeat spread of {self.repeat_spread:.1%}: {judged}"
        )


def windows_between(report: RankReport, predicted_s: Callable[[int, int, int], float]) -> list[Window]:
    """Predict each window from the calibration rounds around it: the two before it and the two after it.

    Args:
        report: of a rank; round `index` stands before window `index`, and one more after the last. Cores are taken from
            each round's end to the next one's; the first begins before round 0.
        predicted_s: what the rounds from a first to a stop predict together for a window: (window, first, stop).
    """
    windows = []
    for index, seconds in enumerate(report.measured_s):
        first, middle, stop = max(0, index - 1), index + 1, index + 3
        spans = ((first, stop), (first, middle), (middle, stop))
        around, before, after = (predicted_s(index, *rounds) for rounds in spans)
        taken = report.taken_cores[index : index + 2]
        windows.append(Window(seconds, around, before, after, sum(taken) / max(1, len(taken))))
    return windows


def trouble_of(windows: Sequence[Window]) -> str:
    """Say in a sentence why a few windows say nothing about a prediction; "" where they do.

    The machine was busy in most of them, or it changed its speed by more than MAX_CHANGE from their first half to their
    second. (Drift within one window does not count here. With few windows it is the noise of single calibrations, and
    the spread of predictions shows it.)
    """
    taken = [window.taken_cores for window in windows if window.busy]
    if len(taken) > len(windows) / 2:
        return on_ranks.busy_sentence(float(np.median(taken)))
    said = [window.predicted_s for window in windows if not window.busy]
    early, late = np.median(said[: (len(said) + 1) // 2]), np.median(said[len(said) // 2 :])
    if abs(late / early - 1) <= MAX_CHANGE:
        return ""
    return f"The machine changed its speed: the first and the last calibrations differ by {abs(late / early - 1):.0%}."


def time_window(
    step: Callable[[], object], num_steps: int, device: torch.device
) -> tuple[float, list[tuple[int, int]]]:
    """Time steps that all ranks begin together; every rank calls this.

    A synchronous step is over when its slowest rank is done: no rank can use the new parameters before that. So the
    time of a step is the largest over ranks, not their mean. It begins at a moment on which ranks agree (`Starter`),
    and each rank measures from there on its own clock. The simulated step is alike: ranks begin together, and it
    lasts until the last one ends.

    Returns:
        The mean seconds of a step, the same on every rank; and start and end of each step on this rank, in nanoseconds
        of the machine's monotonic clock.
    """
    seconds, step_ns, starter = [], [], on_ranks.Starter(device)
    for _ in range(num_steps):
        begin = starter.begin()
        step()
        seconds.append(on_ranks.now(device) - begin)
        end_ns = time.monotonic_ns()
        step_ns.append((end_ns - round(1e9 * seconds[-1]), end_ns))
    return float(np.mean(on_ranks.largest_over_ranks(seconds, device))), step_ns


def time_beside(
    step: Callable[[], object],
    calibrate: Callable[[], Any],
    spans: SpanWriter,
    *,
    device: torch.device | None = None,
    num_windows: int = 3,
    steps_per_window: int = 4,
    budget_s: float = math.inf,
) -> RankReport:
    """Calibrate, time a window of any program's steps, calibrate, ..., on the same warm ranks; every rank calls this.

    Args:
        step: one step, marked in `spans`.
        calibrate: takes a round of measurements; the same result on every rank.
        spans: what this rank marks.
        device: where the rank computes; None: on the CPU.
        num_windows: windows of steps; there is one calibration more.
        steps_per_window: timed steps in a window, after one that is not timed.
        budget_s: seconds after which no window starts; one window is always timed.
    """
    report, device = RankReport(), device or torch.device("cpu")
    deadline, others, measured_s = time.monotonic() + budget_s, on_ranks.OtherProcesses(), report.measured_s

    def take_round() -> None:
        report.rounds.append(calibrate())
        report.taken_cores.append(others.taken())

    take_round()
    while not measured_s or (
        len(measured_s) < num_windows and on_ranks.on_first_rank(lambda: time.monotonic() < deadline)
    ):
        step()  # a warm cache, as in the middle of training
        seconds, step_ns = time_window(step, steps_per_window, device)
        measured_s.append(seconds)
        report.step_ns += step_ns
        take_round()
    report.trace = spans.trace()
    return report


def judge(windows: Sequence[Window], *, bar: float) -> Verdict:
    """Judge windows against a bar for the median error.

    With fewer than ten calm windows all are used for the figures, and `holds` is None.

    Raises:
        ValueError: the list of windows is empty.
    """
    if not windows:
        raise ValueError("no window was measured; measure at least one")
    calm = [window for window in windows if window.calm]
    used = calm if len(calm) >= MIN_WINDOWS else list(windows)
    measured = np.array([window.measured_s for window in used])
    errors = np.array([window.error for window in used])
    middle = float(np.median(measured))
    spread = float(np.median(np.abs(measured - middle))) / middle
    median_error = float(np.median(np.abs(errors)))
    holds = median_error <= max(bar, 2 * spread) if len(calm) >= MIN_WINDOWS else None
    predicted = float(np.median([window.predicted_s for window in used]))
    found = (len(calm), len(windows) - len(calm), middle, predicted, median_error, float(np.median(errors)))
    return Verdict(*found, repeat_spread=spread, bar=bar, holds=holds)
