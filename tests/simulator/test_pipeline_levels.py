import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.plan import ActionTimes, add_communication, gpipe, make_schedule, one_f_one_b, parse_schedule
from simulator import CompiledOrder, order_of, peak_in_flight, simulate_schedule
from simulator.pipeline import compiled as compiling
from simulator.pipeline.sequential import Walk
from simulator.pipeline.simulate_schedule import F, Order, W
from simulator.units import to_ns

MAKE = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}

# 2401.10241 (zero bubble): Table 9's times in ms (their T_B is our I) and Table 5's bubble rate of 1F1B.
# stages, micro-batches, F, I, W, communication, bubble rate
ZERO_BUBBLE_1F1B = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352),
)


def plain_event_loop(order, duration, latency):
    """The definition, one action at a time: max(rank's previous, what it needs + latency) + duration."""
    place = {}
    for action, (kind, stage, mb) in enumerate(zip(order.kind, order.stage, order.microbatch, strict=True)):
        place["FBIW"[kind].replace("B", "I"), int(stage), int(mb)] = action
    last_stage = int(order.stage.max())
    end = [None] * len(order.kind)
    pointer = [int(first) for first in order.offsets[:-1]]
    free = [0] * order.num_ranks
    rank_of = np.repeat(np.arange(order.num_ranks), np.diff(order.offsets))
    while any(at < stop for at, stop in zip(pointer, order.offsets[1:], strict=True)):
        moved = False
        for rank in range(order.num_ranks):
            while pointer[rank] < order.offsets[rank + 1]:
                action = pointer[rank]
                kind, stage, mb = order.kind[action], int(order.stage[action]), int(order.microbatch[action])
                if kind == F:
                    key = ("F", stage - 1, mb) if stage else None
                elif kind == W:
                    key = ("I", stage, mb)
                else:
                    key = ("I", stage + 1, mb) if stage < last_stage else ("F", stage, mb)
                start = free[rank]
                if key is not None:
                    need = place[key]
                    if end[need] is None:
                        break
                    start = max(start, end[need] + (int(latency[action]) if rank_of[need] != rank else 0))
                end[action] = free[rank] = start + int(duration[action])
                pointer[rank] += 1
                moved = True
        assert moved, "deadlock"
    return np.array(end)


@pytest.mark.parametrize(("stages", "microbatches", "f", "i", "w", "communication", "rate"), ZERO_BUBBLE_1F1B)
def test_zero_bubble_table_5_from_the_times_of_table_9(stages, microbatches, f, i, w, communication, rate):
    f, i, w, communication = (to_ns(ms * 1e-3) for ms in (f, i, w, communication))
    order = order_of(one_f_one_b(stages, microbatches))
    cost = CompiledOrder(order).run(np.where(order.kind == F, f, i + w), communication).max()
    assert round((cost - microbatches * (f + i + w)) / cost, 4) == rate


@settings(deadline=None, max_examples=120)
@given(
    st.sampled_from(sorted(MAKE)),
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from(["constant", "by stage", "any"]),
    st.integers(0, 2**32 - 1),
)
def test_levels_equal_a_plain_event_loop_bit_for_bit(name, stages, microbatches, durations, seed):
    generator = np.random.default_rng(seed)
    order = order_of(MAKE[name](stages, microbatches))
    n = len(order.kind)
    if durations == "any":
        duration, latency = generator.integers(0, 1000, n), generator.integers(0, 500, n)
    else:
        table = generator.integers(1, 1000, (stages if durations == "by stage" else 1, 2))
        duration = table[order.stage % len(table), order.kind]
        latency = np.full(n, generator.integers(0, 300))
    compiled = CompiledOrder(order)
    assert np.array_equal(
        compiled.run(duration, np.where(compiled.remote, latency, 0)), plain_event_loop(order, duration, latency)
    )


@pytest.mark.parametrize("name", sorted(MAKE))
@pytest.mark.parametrize("latency", [0, 77])
def test_skipping_the_steady_state_changes_nothing(name, latency, monkeypatch):
    order = order_of(MAKE[name](8, 300))
    for duration in (np.where(order.kind == F, 100, 200), (order.stage * 7) % 5 * 10 + 50 + 100 * order.kind):
        skipped = CompiledOrder(order).run(duration, latency)
        with monkeypatch.context() as patch:
            patch.setattr("simulator.pipeline.frontier.BLOCK", 10**9)
            assert np.array_equal(CompiledOrder(order).run(duration, latency), skipped)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(MAKE)), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_any_legal_order_equals_the_event_loop(name, stages, microbatches, seed):
    """Swap neighbours of the built-in orders at random: some swaps deadlock, all others run exactly."""
    generator = np.random.default_rng(seed)
    order = order_of(MAKE[name](stages, microbatches))
    permutation = np.arange(len(order.kind))
    for _ in range(3):
        rank = generator.integers(stages)
        at = generator.integers(order.offsets[rank], order.offsets[rank + 1] - 1)
        permutation[[at, at + 1]] = permutation[[at + 1, at]]
    mixed = Order(*(column[permutation] for column in order[:3]), order.offsets)
    duration, latency = generator.integers(1, 100, len(permutation)), generator.integers(0, 50, len(permutation))
    refused = ""
    try:
        compiled = CompiledOrder(mixed)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "deadlock" in refused
        return
    assert np.array_equal(
        compiled.run(duration, np.where(compiled.remote, latency, 0)), plain_event_loop(mixed, duration, latency)
    )


def test_split_backwards_several_stages_a_rank_and_ragged_orders_run():
    order = order_of(parse_schedule("0F0,0F1,2F0,2I0,2F1,2W0,2B1,0B0,0B1\n1F0,1F1,1I0,1W0,1B1"))
    duration = np.arange(1, len(order.kind) + 1) * 10
    latency = np.full(len(duration), 3)
    compiled = CompiledOrder(order)
    assert np.array_equal(compiled.run(duration, 3), plain_event_loop(order, duration, latency))


def test_spelled_out_sends_and_receives_are_derived_anew():
    schedule = one_f_one_b(3, 4)
    with_messages = order_of(add_communication(schedule))
    for mine, theirs in zip(with_messages, order_of(schedule), strict=True):
        assert np.array_equal(mine, theirs)


def test_a_deadlock_names_ranks_and_what_they_wait_for():
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1"):
        CompiledOrder(order_of(parse_schedule(text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0", "0F0 is in the schedule twice"),
        ("0F0,0B0\n1F0", "what 0B0 needs is in no rank's order"),
        ("0B0,0F0", "0B0 comes before its own forward"),
        ("0F0,0W0", "what 0W0 needs"),
    ],
)
def test_an_order_that_makes_no_sense_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        CompiledOrder(order_of(parse_schedule(text)))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 2), (1, 3)])
def test_peak_in_flight(stages, microbatches):
    assert peak_in_flight(order_of(gpipe(stages, microbatches))).tolist() == [microbatches] * stages
    expected = [min(microbatches, stages - rank) for rank in range(stages)]
    assert peak_in_flight(order_of(one_f_one_b(stages, microbatches))).tolist() == expected


def test_built_in_schedules_have_levels_in_closed_form():
    for name, make in MAKE.items():
        for shape in ((1, 1), (4, 8), (8, 8), (8, 40)):
            order = order_of(make(*shape))
            compiled = CompiledOrder(order)
            found = compiling.closed_form_levels(order, np.where(compiled.remote, compiled.need, -1))
            assert found is not None, (name, shape)


def test_an_empty_order_has_no_times():
    empty = Order(*(np.zeros(0, np.int64) for _ in range(3)), np.zeros(3, np.int64))
    assert CompiledOrder(empty).run(np.zeros(0, np.int64)).tolist() == []


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(("naive", "zb_h1", "zb_v")), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_action_after_action_equals_level_by_level(name, ranks, microbatches, seed):
    order = order_of(make_schedule(name, ranks, microbatches))
    by_level = CompiledOrder(order)
    walk = Walk(order, np.where(by_level.remote, by_level.need, -1))
    generator = np.random.default_rng(seed)
    duration, latency = generator.integers(0, 1000, len(order.kind)), generator.integers(0, 500, len(order.kind))
    assert np.array_equal(walk.run(duration, latency), by_level.run(duration, latency))
    assert sorted(walk.sequence) == list(range(len(order.kind)))
    if name == "naive":
        assert np.array_equal(walk.level, by_level.level)


def test_sparse_orders_go_action_after_action(monkeypatch):
    schedule, times = make_schedule("naive", 6, 20), ActionTimes(1.0, 1.0, 1.0, 0.1)
    by_level = CompiledOrder(order_of(schedule)).run(np.arange(240), 7)
    expected = simulate_schedule(schedule, times).end_ns
    monkeypatch.setattr(compiling, "MANY", 16)
    compiled = CompiledOrder(order_of(schedule))
    assert compiled._walk is not None
    assert np.array_equal(compiled.run(np.arange(240), 7), by_level)
    table, handover = np.full((6, 4), 10**6) * [1, 2, 1, 1], np.full(6, 10**5)
    assert np.array_equal(compiled.run_by_stage(table, handover), expected)
    stuck = parse_schedule(str(schedule).replace("2F15,2B15,2F16", "2F16,2F15,2B15"))
    with pytest.raises(ValueError, match=r"deadlock: .*waits for"):
        CompiledOrder(order_of(stuck))
