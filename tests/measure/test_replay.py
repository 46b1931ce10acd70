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


def simulated_reports(num_ranks, late_ns=0, early=0.0):
    """Reports of a simulated step, as if it had been measured; updates that take longer, or do not wait for sums."""
    plan = Plan(data=num_ranks, bucket_bytes=1_000_000, first_bucket_bytes=100_000)
    step = simulate(gpt_workload(**SIZES, microbatch_size=2), cluster("laptop", num_ranks), plan)
    sums_end = max((span.end_ns for span in step.trace if span.kind == "all_reduce"), default=0)
    reports = []
    for rank in range(num_ranks):
        moved, longer = -int(early * sums_end), late_ns if rank == num_ranks - 1 else 0
        trace = Trace.from_spans(
            span._replace(start_ns=span.start_ns + moved, end_ns=span.end_ns + moved + longer)
            if span.kind == "optimizer"
            else span
            for span in step.trace
            if span.rank == rank
        )
        reports.append(RankReport(trace=trace, step_ns=[(int(trace.start_ns.min()), int(trace.end_ns.max()))]))
    return reports


def test_a_simulated_step_replays_to_its_own_end_unless_an_update_does_not_wait_for_the_last_bucket():
    for num_ranks, late_ns in ((1, 0), (4, 0), (2, 50_000_000)):
        assert replica_replay_errors(simulated_reports(num_ranks, late_ns)) == pytest.approx([0.0], abs=1e-6)
    assert replica_replay_errors(simulated_reports(2, early=0.5))[0] > 0.03


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
            kind = LETTERS[order.kind[action]]
            what = {"stage": int(order.stage[action]), "microbatch": int(order.microbatch[action])}
            name, times = (
                f"{what['stage']}{kind}{what['microbatch']}",
                (int(end[action] - duration[action]), end[action]),
            )
            if compiled.remote[action]:
                receive = f"RECV_{'F' if kind == 'F' else 'B'}"
                spans.append(Span(rank, "receive", receive, receive, free, max(free, times[0]), **what))
            spans.append(Span(rank, "compute", name, kind, *times, **what))
            free = times[1]
        spans.append(Span(rank, "compute", "optimizer", "optimizer", free, free + 3_000_000))
        traces.append(Trace.from_spans(spans).shifted(-early_ns if rank == order.num_ranks - 1 else 0))
    return traces


def test_a_simulated_pipeline_replays_to_its_own_end_unless_a_rank_did_not_wait_for_its_input():
    for name in ("one_f_one_b", "zb_v"):
        schedule = make_schedule(name, 2, 4)
        (error,) = pipeline_replay_errors(schedule, [traces_of(schedule)])
        assert abs(error) < 1e-6
    schedule = make_schedule("one_f_one_b", 2, 4)
    (error,) = pipeline_replay_errors(schedule, [traces_of(schedule, early_ns=60_000_000)])
    assert error > 0.03
    first, second = traces_of(make_schedule("gpipe", 2, 2))
    with pytest.raises(ValueError, match="rank 1: its trace has no 1B1"):
        pipeline_replay_errors(make_schedule("gpipe", 2, 2), [[first, second.select(lambda span: span.name != "1B1")]])
