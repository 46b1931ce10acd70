"""Each moment belongs to one section: a hand-made step, sections that sum to the step, and the plainest profile."""

import numpy as np
import pytest
from hypothesis import given, strategies as some, strategies as st

from distlab.plan import Plan
from distlab.profile import SECTIONS, Profile, find, plain_profile, report
from distlab.trace import Span, Trace
from simulator import cluster, gpt_workload, simulate

MS = 1_000_000


def spans(rank, *rows):
    """Spans in milliseconds: lane, name, kind, start, end."""
    return [Span(rank, lane, name, kind, start * MS, end * MS, 1000) for lane, name, kind, start, end in rows]


def test_a_step_of_two_ranks_is_taken_apart_moment_by_moment():
    """Rank 1 computes longer. Rank 0 waits for it (idle), then for bytes (sync); bytes under backward are hidden."""
    early = spans(
        0,
        ("step", "step 0", "step", 0, 20),
        ("compute", "data", "data", 0, 1),
        ("compute", "forward", "F", 1, 4),
        ("compute", "backward", "B", 4, 10),
        ("communication", "all_reduce #1", "all_reduce", 6, 9),
        ("communication", "all_reduce #2", "all_reduce", 10, 17),
        ("wait", "all_reduce #2", "wait", 10, 17),
        ("compute", "optimizer", "optimizer", 17, 19),
    )
    late = spans(
        1,
        ("step", "step 0", "step", 0, 20),
        ("compute", "forward", "F", 0, 5),
        ("compute", "backward", "B", 5, 14),
        ("communication", "all_reduce #1", "all_reduce", 8, 9),
        ("communication", "all_reduce #2", "all_reduce", 14, 17),
        ("wait", "all_reduce #2", "wait", 14, 17),
        ("compute", "optimizer", "optimizer", 17, 20),
    )
    profile = Profile.of(Trace.from_spans(early + late))
    first, second = ({name: round(seconds * 1e3) for name, seconds in row.items()} for row in profile.mean_s().values())
    assert first == {"data": 1, "forward": 3, "backward": 6, "sync": 3, "optimizer": 2, "idle": 5}
    assert second == {"data": 0, "forward": 5, "backward": 9, "sync": 3, "optimizer": 3, "idle": 0}
    assert profile.overlap(0) == pytest.approx((0.004, 0.001))  # rank 1 came at 8 ms: nothing travels before


def test_a_gpu_loads_data_only_where_it_has_nothing_else_to_do():
    rows = spans(
        0,
        ("step", "step 0", "step", 0, 20),
        ("host", "data", "data", 0, 6),
        ("compute", "gemm", "F", 2, 10),
        ("compute", "gemm", "B", 8, 12),  # on a different stream
        ("communication", "nccl", "all_reduce", 11, 15),
        ("host", "wait for the host", "wait", 15, 18),
        ("compute", "adam", "optimizer", 18, 20),
    )
    row = {name: round(s * 1e3) for name, s in Profile.of(Trace.from_spans(rows)).mean_s()[0].items()}
    assert row == {"data": 2, "forward": 8, "backward": 2, "sync": 3, "optimizer": 2, "idle": 3}


def test_a_message_that_was_not_sent_yet_is_waited_for_idle():
    rows = spans(0, ("compute", "0F0", "F", 0, 6), ("send", "0SEND_F0", "SEND_F", 6, 7))
    rows += spans(1, ("receive", "1RECV_F0", "RECV_F", 0, 8), ("compute", "1F0", "F", 8, 12))
    profile = Profile.of(Trace.from_spans(rows))
    assert profile.mean_s()[1]["idle"] == pytest.approx(0.006)
    assert profile.mean_s()[1]["sync"] == pytest.approx(0.002)


TIMES = some.tuples(some.integers(0, 60), some.integers(0, 25))
LANES = [("compute", kind) for kind in ("F", "B", "I", "W", "optimizer", "data", "encode", "wait")]
LANES += [("communication", "all_reduce"), ("gather", "all_gather"), ("0 to 1", "send")]
LANES += [("wait", "wait"), ("host", "data")]


@given(some.lists(some.tuples(some.integers(0, 2), some.sampled_from(LANES), TIMES), min_size=1, max_size=30))
def test_sections_sum_to_the_step_whatever_overlaps(rows):
    made = [
        Span(rank, lane, f"{kind} #{number}", kind, start, start + length, 8)
        for number, (rank, (lane, kind), (start, length)) in enumerate(rows)
    ]
    profile = Profile.of(Trace.from_spans(made))
    for rank, own in zip(profile.ranks, profile.seconds, strict=True):
        length = np.diff(profile.windows_ns[rank], axis=1)[:, 0] / 1e9
        np.testing.assert_allclose(own.sum(axis=1), length, atol=1e-15)
        moving_s, hidden_s = profile.overlap(rank)
        assert 0 <= hidden_s <= moving_s
    assert profile.seconds.min(initial=0.0) >= 0
    assert report(profile).startswith("A step takes")
    assert all(finding.cost_s > 0 for finding in find(profile))


def test_steps_are_those_that_all_ranks_have_and_updates_end_them_without_marks():
    rows = spans(0, *[("step", f"step {n}", "step", 10 * n, 10 * n + 10) for n in (0, 1, 2)])
    rows += spans(1, *[("step", f"step {n}", "step", 10 * n, 10 * n + 10) for n in (1, 2, 3)])
    assert Profile.of(Trace.from_spans(rows)).windows_ns[1].tolist() == [[10 * MS, 20 * MS], [20 * MS, 30 * MS]]
    rows = spans(0, *[("compute", "optimizer", "optimizer", 10 * n + 8, 10 * n + 10) for n in range(3)])
    assert Profile.of(Trace.from_spans(rows)).num_steps == 3
    rows = spans(0, ("step", "step 0", "step", 0, 1)) + spans(1, ("step", "step 7", "step", 0, 1))
    with pytest.raises(ValueError, match=r"no step in common \(rank 0: step 0; rank 1: step 7\)"):
        Profile.of(Trace.from_spans(rows))
    with pytest.raises(ValueError, match="no spans; profile at least one step"):
        Profile.of(Trace.from_spans([]))


def test_a_simulated_step_is_taken_apart_as_a_measured_one():
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_heads": 8, "sequence_length": 512, "vocab_size": 32_000}
    step = simulate(gpt_workload(**sizes), cluster("dgx-a100"), Plan(data=8))
    row = Profile.of(step.trace).mean_s()[0]
    assert sum(row.values()) == pytest.approx(step.duration_s)
    assert row["sync"] == pytest.approx(step.exposed_communication_s, rel=0.05)
    assert set(row) <= set(SECTIONS)


def span(rank, lane, start, end):
    return Span(rank, lane, lane, "B" if lane == "compute" else "all_reduce", start, end, 8)


def test_a_late_rank_makes_the_other_wait_and_what_is_under_computing_costs_nothing():
    spans = [
        span(0, "compute", 0, 40),
        span(0, "communication", 40, 90),  # rank 1 comes at 70
        span(1, "compute", 0, 80),
        span(1, "communication", 70, 90),  # 10 of it under computing
        span(0, "compute", 95, 100),
    ]
    early = {"computing": 45, "waiting": 30, "exposed": 20, "idle": 5}
    assert plain_profile(spans) == [early, {"computing": 80, "waiting": 0, "exposed": 10, "idle": 10}]


def test_ranks_that_make_other_numbers_of_calls_are_refused():
    with pytest.raises(ValueError, match="zip"):
        plain_profile([span(0, "communication", 0, 1), span(1, "compute", 0, 1)])


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=5))
def test_the_parts_sum_to_the_step_and_agree_with_the_whole_profile(rounds):
    now, spans, end = [0, 0], [], 0
    for first, second, sent, between in rounds:
        for rank, length in enumerate((first, second)):
            spans.append(span(rank, "compute", now[rank], now[rank] + length))
            now[rank] += length
        end = max(now) + sent
        spans += [span(rank, "communication", now[rank], end) for rank in (0, 1)]
        spans += [span(rank, "compute", end, end + between) for rank in (0, 1)]
        now = [end + between] * 2
    profile = plain_profile(spans)
    assert all(sum(parts.values()) == now[0] for parts in profile)
    for rank, seconds in Profile.of(Trace.from_spans(spans)).mean_s().items():
        parts = profile[rank]
        mine = parts["computing"], parts["exposed"], parts["waiting"] + parts["idle"]
        assert mine == tuple(round(1e9 * seconds[name]) for name in ("backward", "sync", "idle"))
