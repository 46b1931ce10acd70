"""Run a pipeline on real ranks, predict its step from a calibration, and lay one timeline over the other.

    training = PipelineTraining(schedule="one_f_one_b", num_microbatches=4)
    result = run_pipeline(training, num_ranks=2)   # starts the ranks; from a notebook, a lab or a benchmark
    print(result.verdict(bar=0.10))                # predicted against measured, as distlab.measure.runs.windows judges
    result.measured, result.predicted.trace        # two Traces of one step with the same actions, to be drawn together
    result.replay_errors                           # the engine, fed with measured durations (see pipeline_replay)

Inside ranks that run already (under torchrun, say) every rank calls `train_pipeline(training)`, and one that holds all
their reports makes a `PipelineResult(training, reports)` of them.

The prediction knows three things of the machine, each from a calibration beside the windows of steps: how fast its
ranks compute (`measure_round`), what a message costs, and what an action costs beyond its layers' work, which is read
off pipelines of other models (both in distlab.measure.runs.pipeline_calibrate).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distlab.comm import run
from distlab.data import python_documentation
from distlab.measure.runs.pipeline_predict import median_pipeline_round, predict_step
from distlab.measure.runs.pipeline_replay import replay_errors
from distlab.measure.runs.pipeline_training import (
    PipelineReport,
    PipelineTraining,
    train_pipeline,
    windows_of_pipeline,
)
from distlab.measure.runs.timed import middle_step, step_spans
from distlab.measure.runs.windows import Verdict, Window, judge
from distlab.trace import Trace
from simulator import Step

__all__ = ["PipelineReport", "PipelineResult", "PipelineTraining", "run_pipeline", "train_pipeline"]


@dataclass(frozen=True)
class PipelineResult:
    """The reports of all ranks, and what the simulator makes of their calibrations."""

    training: PipelineTraining
    reports: list[PipelineReport]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.reports)

    @cached_property
    def windows(self) -> list[Window]:
        """Each window as measured and as predicted from the rounds around it."""
        return windows_of_pipeline(self.training, self.reports[0], self.num_ranks)

    def verdict(self, *, bar: float) -> Verdict:
        """Judge the prediction by the rule of distlab.measure.runs.windows."""
        return judge(self.windows, bar=bar)

    @cached_property
    def predicted(self) -> Step:
        """The step from the median of all calibration rounds."""
        report = self.reports[0]
        assert report.workload is not None, "windows were timed, so the stages were counted"
        middle = median_pipeline_round(report.rounds)
        return predict_step(report.workload, middle, self.training.layout(self.num_ranks))

    @cached_property
    def measured(self) -> Trace:
        """The timed step of median length, as the ranks marked it."""
        return middle_step(self.reports)

    @cached_property
    def replay_errors(self) -> list[float]:
        """Relative error of the engine's end of each timed step, fed with what was measured in it."""
        schedule = self.training.layout(self.num_ranks).make()
        steps = range(len(self.reports[0].step_ns))
        return replay_errors(schedule, [[step_spans(report, step) for report in self.reports] for step in steps])


@dataclass(frozen=True)
class _Job:
    """What a rank runs."""

    training: PipelineTraining
    data: bytes

    def __call__(self) -> PipelineReport:
        return train_pipeline(self.training, self.data)


def run_pipeline(training: PipelineTraining, num_ranks: int = 2, *, data: bytes | None = None) -> PipelineResult:
    """Start the ranks, train, and return what they saw. The data is Python's documentation unless given."""
    job = _Job(training, python_documentation() if data is None else data)
    backend = "gloo" if training.device == "cpu" else None
    return PipelineResult(training, run(job, num_ranks, timeout_s=900.0, backend=backend, record=False))
