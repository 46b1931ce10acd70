"""Train the small GPT as a pipeline: what every rank runs, with timed windows between calibration rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from distlab.data import ByteCorpus, python_documentation
from distlab.measure.calibrate import now
from distlab.measure.pipeline_calibrate import PipelineCalibration
from distlab.measure.pipeline_predict import (
    Layout,
    PipelineRound,
    build_stages,
    count_stages,
    median_pipeline_round,
    predict_step,
)
from distlab.measure.programs import device_of
from distlab.measure.timed import time_windows
from distlab.measure.windows import Window, windows_between
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline
from distlab.plan.records import Workload
from distlab.trace import SpanWriter, Trace

Batch = tuple[torch.Tensor, torch.Tensor]

LEARNING_RATE = 0.03
MOMENTUM = 0.9


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
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = _batches(training, python_documentation() if data is None else data, device)
    report = PipelineReport()

    def step(batch: Batch) -> torch.Tensor | None:
        pipeline.zero_grad()
        loss = pipeline.step(*batch)
        with spans.span("optimizer", "optimizer"):
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return loss

    try:
        for update in range(training.num_updates):
            report.losses.append(float(pipeline.mean_loss(step(next(batches)))))
            progress(update + 1)
        if training.num_windows:
            report.workload = _count(training, schedule.num_stages, next(batches))
            _time_windows(training, report, step, batches, progress=progress)
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
    step: Callable[[Batch], torch.Tensor | None],
    batches: Iterator[Batch],
    *,
    progress: Callable[[int], None],
) -> None:
    """Time windows between calibration rounds until enough of them are calm, or time is up."""
    num_ranks = dist.get_world_size()
    device = device_of(training.device, dist.get_rank())
    calibration = PipelineCalibration(training.layout(num_ranks), device)

    def window() -> float:
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

    def calm() -> int:
        return sum(each.calm for each in windows_of_pipeline(training, report, num_ranks))

    try:
        time_windows(
            window,
            lambda: report.rounds.append(calibration.measure()),
            report.measured_s,
            calm=calm,
            num_windows=training.num_windows,
            budget_s=training.budget_s,
            progress=lambda done: progress(training.num_updates + done),
        )
    finally:
        calibration.close()


def windows_of_pipeline(training: PipelineTraining, report: PipelineReport, num_ranks: int) -> list[Window]:
    """Predict each window from the calibrations around it: the two rounds before it and the two after it.

    What an action costs beyond its work is a small difference of large times: it is the median of all rounds.
    """
    assert report.workload is not None, "windows are timed after the stages were counted"
    workload, layout = report.workload, training.layout(num_ranks)
    action_s = median_pipeline_round(report.rounds).action_s

    def predicted_s(first: int, stop: int) -> float:
        measured = replace(median_pipeline_round(report.rounds[first:stop]), action_s=action_s)
        return predict_step(workload, measured, layout).duration_s

    return windows_between(report.measured_s, predicted_s)


def step_spans(report: PipelineReport, step: int) -> Trace:
    """Return what the rank did in a timed step."""
    start, end = report.step_ns[step]
    return report.trace.select((report.trace.start_ns >= start) & (report.trace.end_ns <= end))


def _batches(training: PipelineTraining, data: bytes, device: torch.device) -> Iterator[Batch]:
    """Yield whole batches: of a pipeline's ranks the first reads the inputs and the last the targets."""
    corpus = ByteCorpus(data, training.model.context)
    step = 0
    while True:
        inputs, targets = corpus.batch(step, training.batch_size, training.seed)
        yield inputs.to(device), targets.to(device)
        step += 1
