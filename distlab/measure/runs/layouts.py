"""Train the small GPT by any plan on real ranks, with timed windows between calibrations: measured against predicted.

    training = LayoutTraining(plan=Plan(tensor=2))
    result = run_layout(training)                  # starts the ranks; from a notebook, a lab or a benchmark
    print(result.verdict(bar=0.10))                # predicted against measured, as distlab.measure.runs.windows judges
    result.measured, result.predicted.trace        # two Traces of one step, to be drawn together

Inside ranks that run already (under torchrun, say) every rank calls `train_layout(training)`, and one that holds all
their reports makes a `LayoutResult(training, reports)` of them.

The prediction is `simulate` with the plan, of a model counted once, in one process, with what ranks divide of it
(`layout_workload`). How fast ranks compute, what calls cost on the mesh's groups (`layout_calls`), and what a block's
pass costs beside, read off models of other sizes (`layout_calibrate`), come from calibrations beside each window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist

from distlab.comm import run
from distlab.data import python_documentation
from distlab.hybrid import Hybrid
from distlab.measure.count.expert_load import loads_of, with_loads
from distlab.measure.count.gpt import count_gpt, make_gpt, merge_stages
from distlab.measure.machine.facts import num_cores
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import now
from distlab.measure.runs.layout_calibrate import LayoutCalibration
from distlab.measure.runs.layout_predict import (
    LayoutRound,
    median_layout_round,
    predict_layout,
    predicted_step_s,
)
from distlab.measure.runs.programs import device_of
from distlab.measure.runs.timed import Batch, batches_of, middle_step, sgd, time_window, time_windows
from distlab.measure.runs.windows import Verdict, Window, judge, windows_between
from distlab.models import GPTConfig
from distlab.plan import AXES, Plan, Workload
from distlab.trace import SpanWriter, Trace
from simulator import Step


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
        workload: the whole model as counted on the first rank; None without windows.
        rounds: calibration rounds, one more than windows.
        loads: of each window, how uneven each layer's experts were loaded in its last step; see `loads_of`.
        measured_s: seconds of a step in each window: the mean over its steps, of the rank that ends last.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did.
    """

    losses: list[float] = field(default_factory=list)
    workload: Workload | None = None
    rounds: list[LayoutRound] = field(default_factory=list)
    loads: list[tuple[float, ...]] = field(default_factory=list)
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
    if training.num_windows:
        report.workload = on_first_rank(training.count)  # before anything is trained: it may refuse
    hybrid = Hybrid(model.to(device), training.plan, sgd, order=training.order, spans=spans)
    batches = batches_of(training, python_documentation() if data is None else data, device)

    def step(batch: Batch) -> torch.Tensor:
        hybrid.zero_grad()
        loss = hybrid.step(*batch)
        hybrid.update()
        now(device)  # until the device has done it
        return loss

    try:
        for update in range(training.num_updates):
            report.losses.append(float(step(next(batches))))
            progress(update + 1)
        if training.num_windows:
            _time_windows(
                training, report, hybrid, lambda: time_window(training, report, step, batches, device), progress
            )
    finally:
        hybrid.close()
    report.trace = spans.trace()
    return report


def _time_windows(
    training: LayoutTraining,
    report: LayoutReport,
    hybrid: Hybrid,
    window: Callable[[], float],
    progress: Callable[[int], None],
) -> None:
    """Time windows between calibration rounds until enough of them are calm, or time is up."""
    device = device_of(training.device, dist.get_rank())
    calibration = LayoutCalibration(
        training.plan,
        training.order,
        hybrid.groups,
        device=device,
        num_experts=training.num_experts,
        top_k=training.top_k,
    )

    def loaded_window() -> float:
        seconds = window()
        report.loads.append(loads_of(hybrid.stages.values(), training.plan, device))
        return seconds

    with contextlib.closing(calibration):
        time_windows(
            training,
            report,
            window=loaded_window,
            calibrate=lambda: report.rounds.append(calibration.measure()),
            windows_from=lambda start: windows_of_layout(training, report, start=start),
            progress=progress,
        )


def windows_of_layout(
    training: LayoutTraining, report: LayoutReport, workload: Workload | None = None, *, start: int = 0
) -> list[Window]:
    """Predict each window from number `start` on: from the two calibration rounds before it and the two after it.

    What passes cost beyond their work is a small difference of large times: it is the median of all rounds. Experts are
    as busy as they were in the window. The workload is the report's unless another is given.
    """
    counted = workload or report.workload or training.count()
    middle = median_layout_round(report.rounds)

    def predicted_s(loaded: Workload, first: int, stop: int) -> float:
        measured = replace(median_layout_round(report.rounds[first:stop]), passes=middle.passes)
        step = predict_layout(loaded, measured, training.plan, order=training.order)
        return predicted_step_s(step, num_cores())

    if not any(report.loads):
        return windows_between(report.measured_s, partial(predicted_s, counted), start=start)
    windows = []
    for index in range(start, len(report.measured_s)):
        loaded = partial(predicted_s, with_loads(counted, report.loads[index], training.plan, alone=middle.alone))
        windows += windows_between(report.measured_s[: index + 1], loaded, start=index)
    return windows


@dataclass(frozen=True)
class LayoutResult:
    """The reports of all ranks, and what the simulator makes of their calibrations."""

    training: LayoutTraining
    reports: list[LayoutReport]

    @cached_property
    def workload(self) -> Workload:
        """The whole model, as the first rank counted it."""
        return self.reports[0].workload or self.training.count()

    @cached_property
    def windows(self) -> list[Window]:
        """Each window as measured and as predicted from the rounds around it."""
        return windows_of_layout(self.training, self.reports[0], self.workload)

    def verdict(self, *, bar: float) -> Verdict:
        """Judge the prediction by the rule of distlab.measure.runs.windows."""
        return judge(self.windows, bar=bar)

    @cached_property
    def predicted(self) -> Step:
        """The step from the median of all calibration rounds, ranks sharing this machine's cores."""
        report = self.reports[0]
        middle = median_layout_round(report.rounds)
        loads = np.median(report.loads, axis=0).tolist() if report.loads else ()
        loaded = with_loads(self.workload, loads, self.training.plan, alone=middle.alone)
        cores = None if self.training.device == "cuda" else num_cores()
        return predict_layout(loaded, middle, self.training.plan, order=self.training.order, cores=cores)

    @cached_property
    def measured(self) -> Trace:
        """The timed step of median length, as the ranks marked it."""
        return middle_step(self.reports)


def run_layout(training: LayoutTraining, data: bytes | None = None, *, timeout_s: float = 900.0) -> LayoutResult:
    """Train on as many new ranks as the plan has, and return what they saw."""
    reports = run(partial(train_layout, training, data), training.plan.world_size, timeout_s=timeout_s, record=False)
    return LayoutResult(training, reports)
