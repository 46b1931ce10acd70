import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import ActionTimes, add_communication, gpipe, make_schedule, one_f_one_b, parse_schedule
from simulator import CompiledSchedule, arrays_of, peak_in_flight, simulate_schedule
from simulator.pipeline.compiled import Frontier, find_chain
from simulator.pipeline.schedule_arrays import F, W


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
                    needed = place[key]
                    if end[needed] is None:
                        break
                    start = max(start, end[needed] + (int(latency[action]) if rank_of[needed] != rank else 0))
                end[action] = free[rank] = start + int(duration[action])
                pointer[rank] += 1
                moved = True
        assert moved, "deadlock"
    return np.array(end)


# Families and shapes whose steady part is many times as long as the pipeline.
LONG = {
    "naive": (4, 96),
    "gpipe": (4, 96),
    "looped_bfs": (4, 96),
    "one_f_one_b": (4, 96),
    "interleaved": (3, 96),
    "zb_h1": (4, 128),
    "zb_h2": (4, 128),
    "interleaved_zero_bubble": (3, 96),
    "zb_v": (4, 96),
    "v_half": (4, 96),
    "v_min": (8, 256),
    "dualpipe": (4, 96),
    "dualpipe_v": (4, 96),
}
EQUAL = ActionTimes(100.0, 100.0, 100.0, 3.0)


def many_times(num_stages, seed):
    """Equal stages, one slow stage, slow messages, and all different."""
    draw = np.random.default_rng(seed)
    yield EQUAL
    yield ActionTimes(130.0, 90.0, 70.0, 10.0)
    yield EQUAL._replace(communication=600.0)
    yield EQUAL._replace(forward=tuple(100.0 + 40 * (stage == 1) for stage in range(num_stages)))
    yield ActionTimes(*(tuple(column.tolist()) for column in draw.integers(0, 300, (4, num_stages))))


def plain_ends(schedule, times):
    """The ends of all actions by the plain event loop."""
    order = arrays_of(schedule)
    columns = np.broadcast_arrays(*times, np.zeros(schedule.num_stages))[:4]
    forward, inputs, weights, handover = (column.astype(np.int64) for column in columns)
    table = np.stack([forward, inputs + weights, inputs, weights], axis=1)
    backward = np.isin(order.kind, (1, 2))
    sender = np.clip(order.stage + np.where(backward, 1, -1), 0, schedule.num_stages - 1)
    return plain_event_loop(order, table[order.stage, order.kind], handover[sender])


def simulated_ends(schedule, times):
    return simulate_schedule(schedule, times, unit_s=1e-9).end_ns


def outcome(schedule):
    """The ends, or the words of the error."""
    try:
        return simulated_ends(schedule, EQUAL)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", LONG)
def test_long_schedules_equal_a_plain_event_loop(name):
    schedule = make_schedule(name, *LONG[name])
    for times in many_times(schedule.num_stages, seed=len(schedule)):
        run = simulate_schedule(schedule, times, unit_s=1e-9)
        assert np.array_equal(run.end_ns, plain_ends(schedule, times))
        with_factors = simulate_schedule(schedule, times, unit_s=1e-9, slow_ranks={0: 1.0})
        assert np.array_equal(run.start_ns, with_factors.start_ns)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_a_schedule_that_differs_somewhere_runs_as_it_is_or_is_refused(name):
    """Swap or double any two actions of a rank: the ends are a plain loop's, or the error names the fault."""
    draw = np.random.default_rng(0)
    text = str(make_schedule(name, 3, 64)).splitlines()
    refused = 0
    for case in range(60):
        lines = [line.split(",") for line in text]
        row = lines[case % 3]
        place, other = draw.integers(0, len(row), 2)
        if case % 2:
            row[place], row[other] = row[other], row[place]
        else:
            row[place] = row[other]
        schedule = parse_schedule("\n".join(",".join(line) for line in lines))
        found = outcome(schedule)
        if isinstance(found, str):
            refused += 1
            assert any(fault in found for fault in ("deadlock", "twice", "in no rank's order"))
        else:
            assert np.array_equal(found, plain_ends(schedule, EQUAL))
    assert 0 < refused < 60


def test_spelled_out_sends_and_receives_are_derived_anew():
    schedule = one_f_one_b(3, 4)
    with_messages = arrays_of(add_communication(schedule))
    for mine, theirs in zip(with_messages, arrays_of(schedule), strict=True):
        assert np.array_equal(mine, theirs)


def test_a_deadlock_names_ranks_and_what_they_wait_for():
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1"):
        CompiledSchedule(arrays_of(parse_schedule(text)))


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
        CompiledSchedule(arrays_of(parse_schedule(text)))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 2), (1, 3)])
def test_peak_in_flight(stages, microbatches):
    assert peak_in_flight(arrays_of(gpipe(stages, microbatches))).tolist() == [microbatches] * stages
    expected = [min(microbatches, stages - rank) for rank in range(stages)]
    assert peak_in_flight(arrays_of(one_f_one_b(stages, microbatches))).tolist() == expected


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_chain_equals_level_by_level(ranks, microbatches, seed):
    order = arrays_of(make_schedule("naive", ranks, microbatches))
    compiled = CompiledSchedule(order)
    needed = np.where(compiled.remote, compiled.needed, -1)
    chain, by_level = find_chain(order, needed), Frontier(order, needed)
    generator = np.random.default_rng(seed)
    duration, latency = generator.integers(0, 1000, len(order.kind)), generator.integers(0, 500, len(order.kind))
    assert np.array_equal(chain.run(duration, latency), by_level.run(duration, latency))
    assert sorted(chain.actions.tolist()) == list(range(len(order.kind)))
    assert np.array_equal(chain.level, by_level.level)
