"""The engines, fed with a step's own durations, put its end where it was, and notice a broken dependency."""

import numpy as np
import pytest
from _replay import pipeline_replay_errors, replica_replay_errors

from distlab.measure import RankReport
from distlab.plan import Plan, make_schedule
from distlab.trace import Span, Trace
from simulator import CompiledSchedule, arrays_of, cluster, gpt_workload, simulate
from simulator.pipeline.schedule_arrays import LETTERS

SIZES = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "sequence_length": 128, "vocab_size": 256}


def simulated_reports(num_ranks, late_ns=0):
    """Reports of a simulated step, as if it had been measured; the last rank's update may take longer."""
    plan = Plan(data=num_ranks, bucket_bytes=1_000_000, first_bucket_bytes=100_000)
    step = simulate(gpt_workload(**SIZES, microbatch_size=2), cluster("laptop", num_ranks), plan)
    reports = []
    for rank in range(num_ranks):
        spans = [span for span in step.trace if span.rank == rank]
        more_ns = late_ns if rank == num_ranks - 1 else 0
        trace = Trace.from_spans(s._replace(end_ns=s.end_ns + more_ns * (s.kind == "optimizer")) for s in spans)
        reports.append(RankReport(trace=trace, step_ns=[(int(trace.start_ns.min()), int(trace.end_ns.max()))]))
    return reports


@pytest.mark.parametrize(("num_ranks", "late_ns"), [(1, 0), (4, 0), (2, 50_000_000)])
def test_a_simulated_step_replays_to_its_own_end(num_ranks, late_ns):
    assert replica_replay_errors(simulated_reports(num_ranks, late_ns)) == pytest.approx([0.0], abs=1e-6)


def test_a_dependency_that_was_not_kept_shows():
    """An optimizer that does not wait for the last bucket ends before the engine says it can."""
    reports = simulated_reports(2)
    for report in reports:
        early = max(span.end_ns for span in report.trace if span.kind == "all_reduce") // 2
        moved = [
            span._replace(start_ns=span.start_ns - early, end_ns=span.end_ns - early)
            if span.kind == "optimizer"
            else span
            for span in report.trace
        ]
        report.trace, report.step_ns = Trace.from_spans(moved), [(0, max(span.end_ns for span in moved))]
    assert replica_replay_errors(reports)[0] > 0.03


def traces_of(schedule, *, early_ns=0):
    """Simulate a step with uneven actions, as its ranks would have marked it; the last rank may begin too early."""
    compiled = CompiledSchedule(arrays_of(schedule))
    order = compiled.order
    duration = np.random.default_rng(0).integers(5_000_000, 20_000_000, len(order.kind))
    end = compiled.run(duration, 2_000_000)
    traces = []
    for rank in range(order.num_ranks):
        spans, free = [], 0
        for action in range(order.offsets[rank], order.offsets[rank + 1]):
            kind, stage, microbatch = (
                LETTERS[order.kind[action]],
                int(order.stage[action]),
                int(order.microbatch[action]),
            )
            what = {"stage": stage, "microbatch": microbatch}
            times = int(end[action] - duration[action]), int(end[action])
            if compiled.remote[action]:
                letter = "F" if kind == "F" else "B"
                name = f"{stage}RECV_{letter}{microbatch}"
                spans.append(Span(rank, "receive", name, f"RECV_{letter}", free, max(free, times[0]), **what))
            spans.append(Span(rank, "compute", f"{stage}{kind}{microbatch}", kind, *times, **what))
            free = times[1]
        spans.append(Span(rank, "compute", "optimizer", "optimizer", free, free + 3_000_000))
        traces.append(Trace.from_spans(spans).shifted(-early_ns if rank == order.num_ranks - 1 else 0))
    return traces


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_a_simulated_pipeline_replays_to_its_own_end(name):
    schedule = make_schedule(name, 2, 4, stages_per_rank=2 if name == "zb_v" else 1)
    (error,) = pipeline_replay_errors(schedule, [traces_of(schedule)])
    assert abs(error) < 1e-6


def test_a_dependency_between_stages_that_was_not_kept_shows():
    schedule = make_schedule("one_f_one_b", 2, 4)
    (error,) = pipeline_replay_errors(schedule, [traces_of(schedule, early_ns=60_000_000)])  # before its input was made
    assert error > 0.03


def test_a_trace_without_one_of_the_actions_is_refused():
    schedule = make_schedule("gpipe", 2, 2)
    first, second = traces_of(schedule)
    with pytest.raises(ValueError, match="rank 1: its trace has no 1B1"):
        pipeline_replay_errors(schedule, [[first, second.select(lambda span: span.name != "1B1")]])
