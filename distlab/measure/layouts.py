"""Train the small GPT by any plan on real ranks, with timed windows between calibrations: measured against predicted.

    training = LayoutTraining(plan=Plan(tensor=2))
    result = run_layout(training)                  # starts the ranks; from a notebook, a lab or a benchmark
    print(result.verdict(bar=0.10))                # predicted against measured, as distlab.measure.windows judges
    result.measured, result.predicted.trace        # two Traces of one step, to be drawn together

Inside ranks that run already (under torchrun, say) every rank calls `train_layout(training)`, and one that holds all
their reports makes a `LayoutResult(training, reports)` of them.

The prediction is `simulate` with the plan, of a model counted once, in one process, with what ranks divide of it
(`layout_workload`). How fast ranks compute, what calls cost on the mesh's groups (`layout_calls`), and what a block's
pass costs beside, read off models of other sizes (`layout_calibrate`), come from calibrations beside each window.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import run
from distlab.data import ByteCorpus, python_documentation
from distlab.hybrid import Hybrid
from distlab.measure.calibrate import now
from distlab.measure.layout_calibrate import LayoutCalibration
from distlab.measure.layout_predict import (
    LayoutRound,
    median_layout_round,
    num_cores,
    predict_layout,
    predicted_step_s,
)
from distlab.measure.layout_workload import count_gpt, make_gpt, merge_stages
from distlab.measure.programs import device_of
from distlab.measure.timed import time_windows
from distlab.measure.windows import Verdict, Window, judge, windows_between
from distlab.models import GPTConfig
from distlab.plan.axes import AXES
from distlab.plan.records import Plan, Workload
from distlab.trace import SpanWriter, Trace
from simulator import Step

Batch = tuple[torch.Tensor, torch.Tensor]

LEARNING_RATE = 0.03
MOMENTUM = 0.9


@dataclass(frozen=True)
class LayoutTraining:
    """A training run of the small GPT by a plan.

    Attributes:
        model: sizes of the GPT; sequences are as long as its context.
        plan: degrees and schedule.
        batch_size: samples of a step over all ranks.
        num_experts: experts of each block; 0 for ordinary feed-forward layers.
        top_k: experts of each token.
        order: axes of the mesh, slowest first.
        seed: of the weights and of the order of the data.
        device: where ranks compute: "cpu" or "cuda".
        num_updates: updates before any is timed.
        num_windows: calm windows of steps to time after that; 0 for none.
        steps_a_window: steps in a window.
        budget_s: seconds after which no further window starts.
    """

    model: GPTConfig = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128, tied=False)
    plan: Plan = Plan()
    batch_size: int = 16
    num_experts: int = 0
    top_k: int = 2
    order: tuple[str, ...] = AXES
    seed: int = 0
    device: str = "cpu"
    num_updates: int = 3
    num_windows: int = 10
    steps_a_window: int = 4
    budget_s: float = 36.0

    def __post_init__(self) -> None:
        parts = self.plan.num_replicas * self.plan.num_microbatches
        if self.batch_size < 1 or self.batch_size % parts:
            raise ValueError(
                f"LayoutTraining: {self.batch_size} samples do not make {self.plan.num_replicas} equal parts (data x "
                f"expert) of {self.plan.num_microbatches} micro-batches; use a batch_size that is a multiple of {parts}"
            )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all its ranks."""
        return self.plan.pipeline * self.plan.stages_per_rank

    @property
    def samples(self) -> int:
        """Samples of a micro-batch of one replica."""
        return self.batch_size // (self.plan.num_replicas * self.plan.num_microbatches)

    def count(self) -> Workload:
        """Count the whole model in this process; of a pipeline, each stage as a layer.

        Raises:
            ValueError: a pipeline of layers with experts.
        """
        device = device_of(self.device, 0)
        whole = count_gpt(
            self.model, self.samples, num_experts=self.num_experts, top_k=self.top_k, optimizer=sgd, device=device
        )
        return merge_stages(whole, self.num_stages)


@dataclass
class LayoutReport:
    """What one rank saw.

    Attributes:
        losses: mean loss over the batch, of each update.
        rounds: calibration rounds, one more than windows.
        measured_s: seconds of a step in each window: the mean over its steps, of the rank that ends last.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did.
    """

    losses: list[float] = field(default_factory=list)
    rounds: list[LayoutRound] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    step_ns: list[tuple[int, int]] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace.from_spans([]))


def train_layout(
    training: LayoutTraining, data: bytes | None = None, progress: Callable[[int], None] = lambda done: None
) -> LayoutReport:
    """Run on every rank: train num_updates steps, then time windows of further steps between calibrations."""
    device = device_of(training.device, dist.get_rank())
    model = make_gpt(training.model, training.seed, num_experts=training.num_experts, top_k=training.top_k)
    spans, report = SpanWriter(dist.get_rank()), LayoutReport()
    workload = training.count() if training.num_windows else None  # before ranks work together: it may refuse
    hybrid = Hybrid(model.to(device), training.plan, sgd, order=training.order, spans=spans)
    batches = _batches(training, python_documentation() if data is None else data, device)

    def step(batch: Batch) -> torch.Tensor:
        hybrid.zero_grad()
        loss = hybrid.step(*batch)
        with spans.span("optimizer", "optimizer"):
            hybrid.update()
            now(device)  # until the device has done it
        return loss

    try:
        for update in range(training.num_updates):
            report.losses.append(float(step(next(batches))))
            progress(update + 1)
        if workload is not None:
            calibration = LayoutCalibration(
                training.plan,
                training.order,
                hybrid.groups,
                device=device,
                num_experts=training.num_experts,
                top_k=training.top_k,
            )
            with contextlib.closing(calibration):
                _time_windows(
                    training, report, _Timed(step, calibration, workload), batches, device=device, progress=progress
                )
    finally:
        hybrid.close()
    report.trace = spans.trace()
    return report


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of the run."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


class _Timed(NamedTuple):
    """What is timed: a step, what is measured beside it, and the model that predictions are made of."""

    step: Callable[[Batch], torch.Tensor]
    calibration: LayoutCalibration
    workload: Workload


def _time_windows(
    training: LayoutTraining,
    report: LayoutReport,
    timed: _Timed,
    batches: Iterator[Batch],
    *,
    device: torch.device,
    progress: Callable[[int], None],
) -> None:
    """Time windows between calibration rounds until enough of them are calm, or time is up."""

    def window() -> float:
        timed.step(next(batches))  # a warm cache, as in the middle of training
        ready = [next(batches) for _ in range(training.steps_a_window)]
        seconds = torch.zeros(len(ready), dtype=torch.float64, device=device)
        for index, batch in enumerate(ready):
            dist.barrier()  # ranks begin a step together, as the simulated ones do
            begin, start_ns = now(device), time.monotonic_ns()
            timed.step(batch)
            seconds[index] = now(device) - begin
            report.step_ns.append((start_ns, time.monotonic_ns()))
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step is over when the last rank's is
        return float(seconds.mean())

    time_windows(
        window,
        lambda: report.rounds.append(timed.calibration.measure()),
        report.measured_s,
        calm=lambda: sum(each.calm for each in windows_of_layout(training, report, timed.workload)),
        num_windows=training.num_windows,
        budget_s=training.budget_s,
        progress=lambda done: progress(training.num_updates + done),
    )


def windows_of_layout(training: LayoutTraining, report: LayoutReport, workload: Workload | None = None) -> list[Window]:
    """Predict each window from the calibrations around it: the two rounds before it and the two after it.

    What a pass costs beyond its work is a small difference of large times: it is the median of all rounds.
    """
    counted = training.count() if workload is None else workload
    pass_s = median_layout_round(report.rounds).pass_s

    def predicted_s(first: int, stop: int) -> float:
        measured = replace(median_layout_round(report.rounds[first:stop]), pass_s=pass_s)
        step = predict_layout(counted, measured, training.plan, order=training.order)
        return predicted_step_s(step, num_cores())

    return windows_between(report.measured_s, predicted_s)


@dataclass(frozen=True)
class LayoutResult:
    """The reports of all ranks, and what the simulator makes of their calibrations."""

    training: LayoutTraining
    reports: list[LayoutReport]

    @cached_property
    def workload(self) -> Workload:
        """The whole model, counted in this process."""
        return self.training.count()

    @cached_property
    def windows(self) -> list[Window]:
        """Each window as measured and as predicted from the rounds around it."""
        return windows_of_layout(self.training, self.reports[0], self.workload)

    def verdict(self, *, bar: float) -> Verdict:
        """Judge the prediction by the rule of distlab.measure.windows."""
        return judge(self.windows, bar=bar)

    @cached_property
    def predicted(self) -> Step:
        """The step from the median of all calibration rounds, each rank on a core of its own."""
        middle = median_layout_round(self.reports[0].rounds)
        return predict_layout(self.workload, middle, self.training.plan, order=self.training.order)

    @cached_property
    def measured(self) -> Trace:
        """The timed step of median length, as the ranks marked it."""
        lengths = [end - start for start, end in self.reports[0].step_ns]
        middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
        times = [(report.trace, *report.step_ns[middle]) for report in self.reports]
        own = [trace.select((trace.start_ns >= start) & (trace.end_ns <= end)) for trace, start, end in times]
        return Trace.concatenate(own).from_zero()


def run_layout(training: LayoutTraining, data: bytes | None = None, *, timeout_s: float = 900.0) -> LayoutResult:
    """Train on as many new ranks as the plan has, and return what they saw."""
    reports = run(partial(train_layout, training, data), training.plan.world_size, timeout_s=timeout_s, record=False)
    return LayoutResult(training, reports)


def _batches(training: LayoutTraining, data: bytes, device: torch.device) -> Iterator[Batch]:
    """Yield whole batches: each rank takes its own part of them."""
    corpus = ByteCorpus(data, training.model.context)
    step = 0
    while True:
        inputs, targets = corpus.batch(step, training.batch_size, training.seed)
        yield inputs.to(device), targets.to(device)
        step += 1
