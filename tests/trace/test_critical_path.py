"""The critical path is the longest of all paths, and a gain what is missing when all is timed anew."""

import random
from dataclasses import replace

import numpy as np
import pytest
from seeded import draw, seeded, simulate_job

from distlab.plan import ActionTimes, make_schedule
from distlab.profile import Profile, report
from distlab.profile.read import align
from distlab.trace import CriticalPath, Span, Trace
from distlab.trace.critical_path import Need
from simulator import simulate_schedule
from simulator.engine.event_engine import run
from simulator.engine.task_graph import Graph

MS = 1_000_000


def length_ns(path):
    assert all(one.end_ns == other.start_ns for one, other in zip(path.spans, path.spans[1:], strict=False))
    return path.spans[-1].end_ns - path.spans[0].start_ns if path.spans else 0


def chains(needs, lengths, row):
    """Yield the length of every chain that ends with a row."""
    yield lengths[row]
    yield from (so_far + lengths[row] for need in needs[row] for so_far in chains(needs, lengths, need))


def test_of_350_random_graphs_path_and_gains_are_those_of_all_chains():
    for seed in range(350):
        chance, graph, needs = random.Random(seed), Graph(), []
        for row in range(chance.randint(1, 9)):
            needs.append([each for each in range(row) if chance.random() < 0.3])
            graph.add(chance.randrange(3), chance.randrange(2), chance.randint(0, 4), needs=needs[row])
        kinds, times = chance.choices("abc", k=len(needs)), run(graph)
        words = {"lane": list(map(str, graph.lane)), "name": "one", "kind": kinds}
        spans = list(Trace.from_columns(rank=graph.rank, **words, **times._asdict()))
        lanes = list(zip(graph.rank, graph.lane, strict=True))
        every = [[*given, *(e for e in range(row) if lanes[e] == lanes[row])] for row, given in enumerate(needs)]
        moments = [
            [Need(e, spans[e].end_ns, 0) for e in its] or [Need(-1, spans[row].start_ns, 0)]
            for row, its in enumerate(every)
        ]
        path = CriticalPath.through(spans, moments, range(len(spans)))
        longest = {}
        for shorter in ("", *"abc"):
            tenths = [length * (10 - (kind == shorter)) for length, kind in zip(graph.duration_ns, kinds, strict=True)]
            longest[shorter] = max(length for row in range(len(every)) for length in chains(every, tenths, row))
        assert 10 * length_ns(path) == longest[""], seed
        gains = {kind: (longest[""] - longest[kind]) / 1e10 for kind in "abc"}
        assert {kind: path.gains_s.get(kind, 0.0) for kind in "abc"} == pytest.approx(gains), seed


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v", "naive"])
def test_of_schedules_a_gain_is_what_the_simulator_saves(name):
    for seed in range(8):
        chance = random.Random(seed)
        ranks, parts = chance.randint(2, 5), 2 if name in ("interleaved", "zb_v") else 1
        schedule = make_schedule(name, ranks, 2 * ranks * chance.randint(1, 2), stages_per_rank=parts)
        times = ActionTimes(*([10 * chance.randint(1, 30) for _ in range(ranks * parts)] for _ in range(4)))
        before = simulate_schedule(schedule, times, unit_s=1e-6)
        path = before.trace.critical_path()
        assert length_ns(path) == round(before.duration_s * 1e9)
        backward = {"I": [1], "W": [2]} if name.startswith("zb") else {"B": [1, 2]}
        for kind, columns in ({"F": [0], "send": [3]} | backward).items():
            less = [[value * (1 - 0.1 * (at in columns)) for value in column] for at, column in enumerate(times)]
            after = simulate_schedule(schedule, ActionTimes(*less), unit_s=1e-6)
            saved_s = before.duration_s - after.duration_s
            assert path.gains_s.get(kind, 0.0) == pytest.approx(saved_s, abs=1e-12), (seed, kind)


def test_1f1b_of_4_ranks_and_8_micro_batches_by_hand():
    path = simulate_schedule(make_schedule("one_f_one_b", 4, 8), ActionTimes(1, 1, 1)).trace.critical_path()
    assert length_ns(path) == 33 * MS  # (4 - 1 + 8) times forward and backward
    assert path.gains_s == pytest.approx({"F": 1.1e-3, "B": 2.2e-3})
    said = "With 10 % less of one kind all would be shorter: backward 6.7 %, forward 3.3 %."
    assert str(path) == f"Critical path: backward 67 %, forward 33 %. {said}"
    assert path.waits_for(3, 500_000) == "3F0 waits for 2F0 of rank 2, and so for 0F0 of rank 0"
    assert [path.waits_for(*at) for at in ((0, 500_000), (0, 33 * MS), (3, 33 * MS))] == ["", "", ""]


def test_a_slow_rank_is_named_and_what_is_missing_is_said():
    trace = align(seeded(1).trace)[0]  # rank 1 of 6 is slow
    (line,) = [line for line in report(Profile.of(trace)).splitlines() if line.startswith("Critical path")]
    assert line.startswith("Critical path: backward 56 % on rank 1, forward 28 % on rank 1, all_reduce 11 %. With 10 %")
    for kept, missing in (
        (trace.is_word("kind", "step", "all_reduce"), "ranks 0, 1, 2, 3, 4, 5 marked no section"),
        (~trace.is_word("kind", "all_reduce", "wait"), "no call that ranks made together is in the trace"),
    ):
        assert f"Critical path: not known, since {missing}." in report(Profile.of(trace.select(kept)))


def test_inferred_gains_are_those_of_a_run_whose_layers_or_wire_are_faster():
    for number in range(5):
        job = draw(np.random.default_rng(number))
        layers = replace(job, forward_ns=tuple(round(0.9 * length) for length in job.forward_ns))
        wire = replace(job, latency_ns=round(0.9 * job.latency_ns), ns_per_byte=0.9 * job.ns_per_byte)
        usual, faster, quicker = (simulate_job(one, np.random.default_rng(number)) for one in (job, layers, wire))
        path = usual.critical_path()
        gains = path.gain_s(lambda span: 10 * (span.kind in "FB")), path.gains_s["all_reduce"]
        saved = [usual.duration_s - other.duration_s for other in (faster, quicker)]
        assert gains == pytest.approx(saved, abs=1e-4 * usual.duration_s)


def test_of_equal_paths_one_is_taken_and_neither_alone_wins_anything():
    both = Trace.from_spans(Span(rank, "compute", "x", "FB"[rank], 0, 10) for rank in (0, 1))
    path = both.critical_path()
    assert (path.rows, path.gains_s, path.gain_s(lambda span: 50)) == ((0,), {"F": 0.0}, 5e-9)
    one = Trace.from_spans([Span(0, "compute", "x", "F", 5, 10), Span(0, "compute", "y", "B", 20, 30)]).critical_path()
    assert [(span.name, span.end_ns) for span in one.spans] == [("x", 10), ("idle", 20), ("y", 30)]
    assert (one.rows, one.gains_s) == ((0, -1, 1), {"B": 1e-9, "F": 0.5e-9})
    empty = Trace.from_spans([]).critical_path()
    assert (empty.spans, empty.gains_s, str(empty)) == ((), {}, "Critical path: no span takes any time.")
