"""The frame of every timed training of the small GPT: its batches, its optimizer, and windows between calibrations.

What is trained differs (replicas, a pipeline, any layout), and so does what a calibration measures. Alike are the order
of things: some updates; then calibrate, time a window of steps, calibrate, ... until enough windows are calm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.agree import group_device
from distlab.data import ByteCorpus
from distlab.measure.machine.speed import now
from distlab.measure.runs.windows import Window
from distlab.models import GPTConfig
from distlab.trace import Trace

Batch = tuple[Tensor, Tensor]

LEARNING_RATE = 0.03
MOMENTUM = 0.9


class TimedTraining(Protocol):
    """What the frame reads of a training."""

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT; sequences are as long as its context."""

    @property
    def batch_size(self) -> int:
        """Samples of a step over all ranks."""

    @property
    def seed(self) -> int:
        """Of the weights and of the order of the data."""

    @property
    def num_updates(self) -> int:
        """Updates before any is timed."""

    @property
    def num_windows(self) -> int:
        """Calm windows to time; 0 for none."""

    @property
    def steps_a_window(self) -> int:
        """Steps in a window."""

    @property
    def budget_s(self) -> float:
        """Seconds after which no further window starts."""


class TimedReport(Protocol):
    """What the frame writes down of a training.

    Attributes:
        measured_s: seconds of a step in each window.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did.
    """

    measured_s: list[float]
    step_ns: list[tuple[int, int]]
    trace: Trace


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of every timed training."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def batches_of(
    training: TimedTraining, data: bytes, device: torch.device, *, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Yield a rank's slice of the batches, of which all together are the same for any number of ranks."""
    corpus = ByteCorpus(data, training.model.context)
    step = 0
    while True:
        inputs, targets = corpus.batch(step, training.batch_size, training.seed, rank=rank, world_size=world_size)
        yield inputs.to(device), targets.to(device)
        step += 1


def time_window(
    training: TimedTraining,
    report: TimedReport,
    step: Callable[[Batch], object],
    batches: Iterator[Batch],
    device: torch.device,
) -> float:
    """Time a window of steps that all ranks begin together; return the mean seconds of a step, of the slowest rank."""
    step(next(batches))  # a warm cache, as in the middle of training
    ready = [next(batches) for _ in range(training.steps_a_window)]
    seconds = torch.zeros(len(ready), dtype=torch.float64, device=device)
    for index, batch in enumerate(ready):
        dist.barrier()  # ranks begin a step together, as the simulated ones do
        begin, start_ns = now(device), time.monotonic_ns()
        step(batch)
        seconds[index] = now(device) - begin
        report.step_ns.append((start_ns, time.monotonic_ns()))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step is over when the last rank's is
    return float(seconds.mean())


def time_windows(
    training: TimedTraining,
    report: TimedReport,
    *,
    window: Callable[[], float],
    calibrate: Callable[[], None],
    windows_from: Callable[[int], Sequence[Window]],
    progress: Callable[[int], None],
) -> None:
    """Run on every rank: calibrate, time a window, calibrate, ... until num_windows are calm or budget_s is over.

    Args:
        training: how many windows, and the seconds after which none starts; one is always timed.
        report: its measured_s is filled in, one number a window.
        window: runs a window of steps and returns the seconds of a step.
        calibrate: takes a round of measurements and keeps it.
        windows_from: judges the windows so far, from a number on; asked on rank 0.
        progress: told how many updates and windows are done.
    """
    deadline = time.monotonic() + training.budget_s
    calm: list[bool] = []  # of windows that no later round can change

    def num_calm() -> int:
        """Count calm windows. Each is judged when it is over, and once more with the second round after it."""
        *judged, newest = [each.calm for each in windows_from(len(calm))]
        calm.extend(judged)
        return sum(calm) + newest

    def finished() -> bool:
        """Decide on rank 0, since clocks differ."""
        done = len(report.measured_s) > 0 and time.monotonic() > deadline
        if dist.get_rank() == 0 and len(report.measured_s) >= training.num_windows:
            done |= num_calm() >= training.num_windows
        agreed = torch.tensor(int(done), device=group_device())
        dist.broadcast(agreed, 0)
        return bool(agreed)

    calibrate()
    while not finished():
        seconds = window()
        calibrate()
        report.measured_s.append(seconds)
        progress(training.num_updates + len(report.measured_s))


def step_spans(report: TimedReport, step: int) -> Trace:
    """Return what the rank did in a timed step."""
    start, end = report.step_ns[step]
    return report.trace.select((report.trace.start_ns >= start) & (report.trace.end_ns <= end))


def middle_step(reports: Sequence[TimedReport]) -> Trace:
    """Return what all ranks did in the timed step of median length, from its beginning."""
    lengths = [end - start for start, end in reports[0].step_ns]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    return Trace.concatenate(step_spans(report, middle) for report in reports).from_zero()
