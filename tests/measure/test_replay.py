"""The engine, fed with a step's own durations, puts its end where it was."""

import pytest

from distlab.measure.runs.replay import replay_errors
from distlab.measure.runs.training import RankReport
from distlab.plan import Plan
from distlab.trace import Trace
from simulator import cluster, gpt_workload, simulate

SIZES = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "sequence_length": 128, "vocab_size": 256}


def simulated_reports(num_ranks, late_ns=0):
    """Reports of a simulated step, as if it had been measured; the last rank's backward may be late."""
    plan = Plan(data=num_ranks, bucket_bytes=1_000_000, first_bucket_bytes=100_000)
    step = simulate(gpt_workload(**SIZES, microbatch_size=2), cluster("laptop", num_ranks), plan)
    reports = []
    for rank in range(num_ranks):
        spans = [span for span in step.trace if span.rank == rank]
        if late_ns and rank == num_ranks - 1:
            spans = [
                span._replace(end_ns=span.end_ns + late_ns) if span.kind == "optimizer" else span for span in spans
            ]
        trace = Trace.from_spans(spans)
        reports.append(RankReport(trace=trace, step_ns=[(int(trace.start_ns.min()), int(trace.end_ns.max()))]))
    return reports, step


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_simulated_step_replays_to_its_own_end(num_ranks):
    reports, step = simulated_reports(num_ranks)
    (error,) = replay_errors(reports)
    assert abs(error) < 1e-6, (error, step.duration_s)


def test_a_rank_that_is_late_moves_the_end():
    on_time, _ = simulated_reports(2)
    late, _ = simulated_reports(2, late_ns=50_000_000)
    assert replay_errors(late) == pytest.approx([0.0], abs=1e-6)
    assert max(end for _, end in (late[1].step_ns)) - max(end for _, end in on_time[1].step_ns) == 50_000_000


def test_a_dependency_that_was_not_kept_shows():
    """An optimizer that does not wait for the last bucket ends before the engine says it can."""
    reports, _ = simulated_reports(2)
    for report in reports:
        last = max(span.end_ns for span in report.trace if span.kind == "all_reduce")
        moved = [
            span._replace(start_ns=span.start_ns - last // 2, end_ns=span.end_ns - last // 2)
            if span.kind == "optimizer"
            else span
            for span in report.trace
        ]
        report.trace = Trace.from_spans(moved)
        report.step_ns = [(0, max(span.end_ns for span in moved))]
    (error,) = replay_errors(reports)
    assert error > 0.03
