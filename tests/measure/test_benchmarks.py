"""Benchmarks: ratios of blocks, bars and intervals; steps that replay to their own end through the engines."""

import sys

import numpy as np
import pytest
from _replay import pipeline_replay_errors, replica_replay_errors
from _rows import absolute, compare, compare_counts, median_interval, noise, paired_ratio, ratio_holds
from _script import run_script

from distlab.measure import RankReport, interleave
from distlab.plan import Plan, make_schedule
from distlab.trace import Span, Trace
from simulator import CompiledSchedule, arrays_of, cluster, gpt_workload, simulate
from simulator.pipeline.schedule_arrays import LETTERS


def test_ratios_are_of_blocks_and_bars_are_judged_by_intervals():
    # the machine slowed down by 10x half way; each block still says that ours takes half as long
    assert paired_ratio([1, 1, 10, 10], [2, 2, 20, 20]) == (0.5, (0.5, 0.5))
    with pytest.raises(ValueError, match="2 blocks of ours and 3 of the peer"):
        paired_ratio([1, 2], [1, 2, 3])
    assert ratio_holds(1.04, (0.99, 1.09), 1.0)  # median within 1.05 and the interval reaches 1.00
    assert not ratio_holds(1.04, (1.01, 1.09), 1.0)
    assert not ratio_holds(1.06, (0.99, 1.09), 1.0)
    assert ratio_holds(0.75, (0.70, 0.79), 0.8)
    assert not ratio_holds(0.75, (0.70, 0.81), 0.8)  # the upper end decides
    low, high = median_interval([1.0, 1.2, 0.9, 1.1, 1.05, 5.0])
    assert low <= 1.075 <= high


def test_rows_say_what_was_measured():
    row = compare("ours as fast as theirs", [1.0] * 20, [1.0] * 20)
    assert (row.holds, row.bar) == (True, "<= 1x")
    counts = compare_counts("fewer bytes", 90, 100)
    assert (counts.ratio, counts.interval, counts.holds, counts.unit) == (0.9, (0.9, 0.9), True, "B")
    assert not compare_counts("more bytes", 101, 100).holds
    assert "smoke" in compare("too few", [1.0] * 3, [1.0] * 3).note
    assert noise("x", [1.0, 1.1], [1.0, 1.0]).holds is None
    assert absolute("start", [0.2, 0.1, 0.3], bar=0.15, unit="s").holds is False


def test_programs_take_turns():
    order = []
    interleave([lambda: order.append("a") or 1.0, lambda: order.append("b") or 2.0], blocks=3)
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_rows_are_printed_as_they_come_and_a_device_is_asked_for_only_where_there_is_a_choice(capsys, monkeypatch):
    def rows(quick=False, device="cpu"):
        yield absolute(f"quick is {quick} on {device}", [1.0], bar=2.0, unit="s")
        assert "quick is True on cpu" in capsys.readouterr().out  # before the next one is measured
        raise ValueError("no such machine")

    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    with pytest.raises(SystemExit, match="error: no such machine"):
        run_script("What it is.", rows, devices=True)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit, match="2"):
        run_script("What it is.", lambda quick: iter(()))
    assert "--device" in capsys.readouterr().err


SIZES = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "sequence_length": 128, "vocab_size": 256}


def simulated_reports(num_ranks, late_ns=0, early=0.0):
    """Reports of a simulated step, as if it had been measured; updates that take longer, or do not wait for sums."""
    plan = Plan(data=num_ranks, bucket_bytes=1_000_000, first_bucket_bytes=100_000)
    step = simulate(gpt_workload(**SIZES, microbatch_size=2), cluster("laptop", num_ranks), plan)
    sums_end = max((span.end_ns for span in step.trace if span.kind == "all_reduce"), default=0)
    reports = []
    for rank in range(num_ranks):
        moved, longer = -int(early * sums_end), late_ns if rank == num_ranks - 1 else 0
        *spans, update = sorted((span for span in step.trace if span.rank == rank), key=lambda one: one.end_ns)
        assert update.kind == "optimizer"
        times = {"start_ns": update.start_ns + moved, "end_ns": update.end_ns + moved + longer}
        trace = Trace.from_spans([*spans, update._replace(**times)])
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
            name = f"{what['stage']}{kind}{what['microbatch']}"
            times = int(end[action] - duration[action]), end[action]
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
