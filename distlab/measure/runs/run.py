"""Train the small GPT by a plan on real ranks, in timed windows between calibrations, and predict the same step.

    run = TrainingRun(plan=Plan(tensor=2))
    result = time_on_new_ranks(run)                # starts the ranks; from a notebook, a lab or a benchmark
    print(result.verdict(bar=0.10))                # predicted against measured, as `windows` judges
    overlay_of_run(result)                         # a measured step over the predicted one, to be drawn

Inside ranks that run already (under torchrun, for example) every rank calls `time_training(run)`. One that holds all
their reports makes a `RunResult(run, reports)` of them.

The frame is the same for every plan, and so is what trains: `Hybrid`. Some updates; then calibrate, time a window of
steps, calibrate, and so on. The plan chooses what a calibration measures: the machine's speed always, then the plan's
calls and codec (`calls`), and the overhead of steps of other models (`calibrate`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPTConfig
from distlab.comm import run as run_on_ranks
from distlab.comm.device import span_writer
from distlab.hybrid import Hybrid
from distlab.measure.count.gpt import expert_loads, make_gpt, with_expert_loads
from distlab.measure.machine.ranks import device_of, on_first_rank, shared_cores
from distlab.measure.runs import calibrate as by_plan
from distlab.measure.runs.calls import is_pipeline_alone
from distlab.measure.runs.windows import RankReport, Verdict, Window, judge, time_beside, trouble_of, windows_between
from distlab.plan import AXES, Plan, Workload
from distlab.trace import Trace
from simulator import Step

if TYPE_CHECKING:
    from simulator.viz import Overlay


@dataclass(frozen=True)
class TrainingRun:
    """A training run of the small GPT by a plan.

    Attributes:
        model: sizes of the GPT; sequences are as long as its context.
        plan: degrees, schedule, buckets, compression and sharding.
        batch_size: samples of a step over all ranks.
        num_experts: experts of each block; 0 for ordinary feed-forward layers.
        top_k: experts of each token.
        order: axes of the mesh, slowest first.
        seed: for the weights and the order of the data.
        device: where ranks compute: "cpu" or "cuda".
        num_updates: updates before any is timed.
        num_windows: windows of steps to time after that; 0 for none.
        steps_per_window: steps in a window.
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
    num_windows: int = 14
    steps_per_window: int = 4
    budget_s: float = 36.0

    def __post_init__(self) -> None:
        plan = self.plan
        parts = plan.num_replicas * plan.num_microbatches
        if self.batch_size < 1 or self.batch_size % parts:
            raise ValueError(
                f"TrainingRun: {self.batch_size} samples do not make {plan.num_replicas} equal parts (data x expert) "
                f"of {plan.num_microbatches} equal micro-batches; use a batch_size that is a multiple of {parts}"
            )
        if is_pipeline_alone(self.plan) and self.model.tied:
            raise ValueError(
                "TrainingRun: the model's output layer shares the embedding's weight, which two stages would have "
                "to sum in each step; that is not timed here: use GPTConfig(tied=False)"
            )

    @property
    def samples(self) -> int:
        """Samples of a micro-batch of one replica."""
        return self.batch_size // (self.plan.num_replicas * self.plan.num_microbatches)

    def count(self) -> Workload:
        """Count a micro-batch of the whole model in this process; of a pipeline, each stage as a layer.

        Raises:
            ValueError: a pipeline of layers with experts.
        """
        experts = {"num_experts": self.num_experts, "top_k": self.top_k}
        return by_plan.count_model(self.model, self.samples, self.plan, device=device_of(self.device, 0), **experts)

    def batches(self, data: bytes) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all steps, whole and the same on every rank."""
        corpus = ByteCorpus(data, self.model.context)
        for step in itertools.count():
            yield corpus.batch(step, self.batch_size, self.seed)


def time_training(run: TrainingRun, data: bytes | None = None) -> RankReport:
    """Run on every rank: train num_updates steps, then time windows of further steps between calibrations.

    Args:
        run: what to train, the same on every rank.
        data: text to train on; Python's documentation unless given.
    """
    device = device_of(run.device, dist.get_rank())
    spans, experts = span_writer(dist.get_rank(), device), {"num_experts": run.num_experts, "top_k": run.top_k}
    workload = on_first_rank(run.count) if run.num_windows else None  # before anything is trained: it may refuse
    whole = run.batches(python_documentation() if data is None else data)
    batches = ((inputs.to(device), targets.to(device)) for inputs, targets in whole)
    losses, loads = list[float](), list[tuple[float, ...]]()
    ahead, seen = list[tuple[Tensor, Tensor]](), list[Tensor]()  # batches of a window, and their losses
    with ExitStack() as stack:
        model = make_gpt(run.model, run.seed, **experts).to(device)
        hybrid = Hybrid(model, run.plan, by_plan.sgd, order=run.order, spans=spans)
        stack.callback(hybrid.close)
        losses += [float(hybrid.train_step(*next(batches))) for _ in range(run.num_updates)]
        weights = {name: value.cpu() for name, value in hybrid.full_state_dict().items()}
        if not run.num_windows:
            return RankReport(losses, weights, trace=spans.trace())
        sizes = {"num_layers": run.model.num_layers} | experts
        calibration = by_plan.CalibrationOfRun(run.plan, run.order, hybrid.groups, device=device, **sizes)
        stack.callback(calibration.close)

        def calibrate() -> by_plan.CalibrationRound:
            if seen:  # of the window that has just ended
                losses.append(float(seen[-1]))
                loads.append(expert_loads(hybrid.stages.values(), run.plan, device))
            ahead[:] = [next(batches) for _ in range(run.steps_per_window + 1)]
            return calibration.measure()

        def step() -> None:
            seen.append(hybrid.train_step(*ahead.pop()))

        most = {"num_windows": run.num_windows, "steps_per_window": run.steps_per_window}
        report = time_beside(step, calibrate, spans, device=device, budget_s=run.budget_s, **most)
    return replace(report, losses=losses, weights=weights, workload=workload, expert_loads=loads)


@dataclass(frozen=True)
class RunResult:
    """The reports of all ranks, and what the simulator makes of their calibrations."""

    run: TrainingRun
    reports: Sequence[RankReport]

    @cached_property
    def windows(self) -> list[Window]:
        """Each window as measured, and as predicted by the rounds around it; experts are as busy as they were in it."""
        report, middle = self.reports[0], self._middle

        @cache  # the two rounds after a window are those before the next but one
        def predicted_s(load: tuple[float, ...], first: int, stop: int) -> float:
            return self._step(load, by_plan.between_windows(report.rounds[first:stop], middle)).duration_s

        loads = report.expert_loads or [()] * len(report.measured_s)
        return windows_between(report, lambda window, first, stop: predicted_s(loads[window], first, stop))

    def verdict(self, *, bar: float) -> Verdict:
        """Judge the prediction by the rule of distlab.measure.runs.windows."""
        return judge(self.windows, bar=bar)

    @cached_property
    def predicted(self) -> Step:
        """The step from the median of all calibration rounds, ranks sharing this machine's cores."""
        loads = self.reports[0].expert_loads
        return self._step(np.median(loads, axis=0).tolist() if loads else (), self._middle)

    @cached_property
    def _middle(self) -> by_plan.CalibrationRound:
        return by_plan.median_calibration(self.reports[0].rounds)

    def _step(self, loads: Sequence[float], measured: by_plan.CalibrationRound) -> Step:
        run, cores = self.run, shared_cores(torch.device(self.run.device))
        workload = self.reports[0].workload
        assert workload is not None, "windows were timed, so the workload was counted"
        loaded = with_expert_loads(workload, loads, run.plan, cores=cores)
        return by_plan.predict_step(loaded, measured, run.plan, order=run.order, cores=cores)


def time_on_new_ranks(run: TrainingRun, data: bytes | None = None) -> RunResult:
    """Train on as many new ranks as the plan has, and return what they saw."""
    backend = "cpu" if run.device == "cpu" else None
    job = partial(time_training, run, data)
    return RunResult(run, run_on_ranks(job, run.plan.world_size, timeout_s=900.0, backend=backend, record=False))


def overlay_of(
    reports: Sequence[RankReport], predict: Callable[[Sequence[Any]], Trace], *, calls: Trace | None = None
) -> Overlay:
    """Lay the steps that `time_beside` timed over predictions from the calibrations around them.

    Args:
        reports: of all ranks.
        predict: the step as calibration rounds together say it is.
        calls: what a recorder saw of all ranks, to be drawn too.
    """
    first = reports[0]
    windows = windows_between(first, lambda _, start, stop: predict(first.rounds[start:stop]).duration_s)
    return _overlay(reports, windows, predict(first.rounds), calls)


def overlay_of_run(result: RunResult, *, calls: Trace | None = None) -> Overlay:
    """Lay the timed steps of a run over the predictions from its calibrations; see `overlay_of`."""
    return _overlay(result.reports, result.windows, result.predicted.trace, calls)


def _overlay(
    reports: Sequence[RankReport], windows: Sequence[Window], predicted: Trace, calls: Trace | None
) -> Overlay:
    """Take the windows in which the machine was not busy, or else all. A step lasts as long as on its slowest rank."""
    from simulator.viz import Overlay  # here: ranks that only time steps need no pictures

    kept = [index for index, window in enumerate(windows) if not window.busy] or range(len(windows))
    lengths_ns = np.array([np.diff(report.step_ns, axis=1)[:, 0] for report in reports]).max(axis=0)
    timed = np.arange(len(lengths_ns)).reshape(len(windows), -1)[kept].ravel()
    counted_ns = lengths_ns[timed]
    middle = int(timed[counted_ns.argsort(kind="stable")[(len(timed) - 1) // 2]])
    traces = [report.step_trace(middle) for report in reports]
    if calls is not None:
        for rank, (report, marked) in enumerate(zip(reports, list(traces), strict=True)):
            # A rank that had no core when the step began still makes the call in which ranks agree on that moment.
            begin = min(marked.start_ns.tolist(), default=0)
            own = calls.select((calls.rank == rank) & (calls.start_ns >= begin))
            traces.append(replace(report, trace=own).step_trace(middle))
    measured = Trace.concatenate(traces).shifted(-min(report.step_ns[middle][0] for report in reports))
    said = [(one.predicted_s, one.predicted_before_s, one.predicted_after_s) for one in map(windows.__getitem__, kept)]
    return Overlay(measured, predicted, (counted_ns / 1e9).tolist(), np.ravel(said).tolist(), trouble_of(windows))
