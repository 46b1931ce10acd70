"""Train the small GPT as a pipeline: what every rank runs, with timed windows between calibration rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from distlab.data import python_documentation
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import now
from distlab.measure.runs.pipeline_calibrate import PipelineCalibration
from distlab.measure.runs.pipeline_predict import (
    Layout,
    PipelineRound,
    build_stages,
    count_stages,
    median_pipeline_round,
    predict_step,
)
from distlab.measure.runs.programs import device_of
from distlab.measure.runs.timed import Batch, batches_of, sgd, time_window, time_windows
from distlab.measure.runs.windows import Window, windows_between
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline
from distlab.plan import Workload
from distlab.trace import SpanWriter, Trace


@dataclass(frozen=True)
class PipelineTraining:
    """A training run of the small GPT as a pipeline.

    Attributes:
        model: sizes of the GPT; its output layer has a weight of its own.
        schedule: a name of distlab.plan.schedules.SCHEDULES.
        num_microbatches: micro-batches of a step.
        stages_per_rank: stages on each rank, for schedules that interleave.
        batch_size: samples of a step, a multiple of num_microbatches.
        seed: of the weights and of the order of the data.
        device: where ranks compute: "cpu" or "cuda".
        num_updates: updates before any is timed.
        num_windows: calm windows of steps to time after that; 0 for none.
        steps_a_window: steps in a window.
        budget_s: seconds after which no further window starts.
    """

    model: GPTConfig = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128, tied=False)
    schedule: str = "one_f_one_b"
    num_microbatches: int = 4
    stages_per_rank: int = 1
    batch_size: int = 16
    seed: int = 0
    device: str = "cpu"
    num_updates: int = 3
    num_windows: int = 10
    steps_a_window: int = 4
    budget_s: float = 36.0

    def __post_init__(self) -> None:
        if self.batch_size % self.num_microbatches:
            raise ValueError(
                f"PipelineTraining: {self.batch_size} samples do not make {self.num_microbatches} equal micro-batches; "
                f"use a batch_size that is a multiple of {self.num_microbatches}"
            )
        if self.model.tied:
            raise ValueError(
                "PipelineTraining: the model's output layer shares the embedding's weight, which two stages would have "
                "to sum in each step; that is not timed here: use GPTConfig(tied=False)"
            )

    def layout(self, num_ranks: int) -> Layout:
        """Return the schedule for so many ranks, by its name and numbers."""
        return Layout(self.schedule, num_ranks, self.num_microbatches, self.stages_per_rank)

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.batch_size // self.num_microbatches


@dataclass
class PipelineReport:
    """What one rank saw.

    Attributes:
        losses: mean loss over the batch, of each update; the same on every rank.
        workload: the stages as layers of a model, at one micro-batch.
        rounds: calibration rounds, one more than windows.
        measured_s: seconds of a step in each window: the mean over its steps, of the rank that ends last.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did.
        peak_in_flight: most micro-batches whose activations the rank held at once.
    """

    losses: list[float] = field(default_factory=list)
    workload: Workload | None = None
    rounds: list[PipelineRound] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    step_ns: list[tuple[int, int]] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace.from_spans([]))
    peak_in_flight: int = 0


def train_pipeline(
    training: PipelineTraining, data: bytes | None = None, progress: Callable[[int], None] = lambda done: None
) -> PipelineReport:
    """Run on every rank: train num_updates steps, then time windows of further steps between calibrations."""
    rank = dist.get_rank()
    device = device_of(training.device, rank)
    layout = training.layout(dist.get_world_size())
    schedule, spans = layout.make(), SpanWriter(rank)
    modules = build_stages(training.model, schedule.num_stages, training.seed, device)
    own = {stage: modules[stage] for stage in range(schedule.num_stages) if schedule.home[stage] == rank}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, spans=spans)
    optimizer = sgd(list(pipeline.parameters()))
    batches = batches_of(training, python_documentation() if data is None else data, device)
    report = PipelineReport()

    def step(batch: Batch) -> torch.Tensor | None:
        pipeline.zero_grad()
        loss = pipeline.step(*batch)
        with spans.span("optimizer", "optimizer"):
            optimizer.step()
            now(device)  # until the device has done it
        return loss

    try:
        for update in range(training.num_updates):
            report.losses.append(float(pipeline.mean_loss(step(next(batches)))))
            progress(update + 1)
        if training.num_windows:
            batch = next(batches)
            report.workload = on_first_rank(lambda: _count(training, schedule.num_stages, batch))
            _time_windows(
                training, report, lambda: time_window(training, report, step, batches, device), progress=progress
            )
        report.peak_in_flight = pipeline.peak_in_flight
    finally:
        pipeline.close()
    report.trace = spans.trace()
    return report


def _count(training: PipelineTraining, num_stages: int, batch: Batch) -> Workload:
    """Count the work of a micro-batch, on stages that no pipeline runs."""
    inputs, targets = (part[: training.samples] for part in batch)
    return count_stages(build_stages(training.model, num_stages, training.seed, inputs.device), inputs, targets)


def _time_windows(
    training: PipelineTraining,
    report: PipelineReport,
    window: Callable[[], float],
    *,
    progress: Callable[[int], None],
) -> None:
    """Time windows between calibration rounds until enough of them are calm, or time is up."""
    num_ranks = dist.get_world_size()
    device = device_of(training.device, dist.get_rank())
    with contextlib.closing(PipelineCalibration(training.layout(num_ranks), device)) as calibration:
        time_windows(
            training,
            report,
            window=window,
            calibrate=lambda: report.rounds.append(calibration.measure()),
            windows_from=lambda start: windows_of_pipeline(training, report, num_ranks, start=start),
            progress=progress,
        )


def windows_of_pipeline(
    training: PipelineTraining, report: PipelineReport, num_ranks: int, *, start: int = 0
) -> list[Window]:
    """Predict each window from number `start` on: from the two calibration rounds before it and the two after it.

    What an action costs beyond its work is a small difference of large times: it is the median of all rounds.
    """
    assert report.workload is not None, "windows are timed after the stages were counted"
    workload, layout = report.workload, training.layout(num_ranks)
    action_s = median_pipeline_round(report.rounds).action_s

    def predicted_s(first: int, stop: int) -> float:
        measured = replace(median_pipeline_round(report.rounds[first:stop]), action_s=action_s)
        return predict_step(workload, measured, layout).duration_s

    return windows_between(report.measured_s, predicted_s, start=start)
