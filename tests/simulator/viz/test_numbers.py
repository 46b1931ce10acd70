"""What pictures compute: winners, parts of a step, owners, chunks of a ring, who waits for whom, states of a step."""

import numpy as np
import pytest
from viz_traces import MS, SPLITS, by_hand, call, choices, cut, data_parallel, ping, ring, weights, within

import simulator as sim
from distlab.plan import ActionTimes, Link, Plan, Protocol, Sharding, gpipe, interleaved, one_f_one_b, parse_schedule
from distlab.trace import Trace
from simulator.memory.memory import KINDS
from simulator.viz import facts_of, run_schedule, step_of
from simulator.viz.collectives.messages import read_diagram
from simulator.viz.collectives.race import race
from simulator.viz.collectives.ring import chunk_name, ring_steps
from simulator.viz.context_parallel import ring_work
from simulator.viz.data_parallel.step import ABSENT, FILLING, MEAN, SENT, best_moment, held_at, read_step
from simulator.viz.drawing.lanes import shaded
from simulator.viz.expert_parallel import routes_of
from simulator.viz.memory import MEMORY_KINDS, fewer_moments
from simulator.viz.panels.schedules import MAX_MOMENTS, moments_of, tell_moment
from simulator.viz.schedules import NAMES, play, textbook_of
from simulator.viz.tensor_parallel import shards_of

TINY = sim.gpt_workload(hidden_size=256, num_layers=6, num_heads=4, sequence_length=64, vocab_size=1000)
PLAIN = Link("plain", (Protocol(1e-5, 1e9),))
EQUAL = ActionTimes(1.0, 1.0, 1.0)


def test_every_kind_of_memory_has_a_letter_and_a_long_step_keeps_its_peak():
    assert tuple(MEMORY_KINDS) == KINDS
    assert len({style.letter for style in MEMORY_KINDS.values()}) == len(KINDS)
    times, rows = sim.memory_of(TINY, Plan(num_microbatches=400)).over_time()
    fewer, kept = fewer_moments(times, rows, 500)
    assert len(fewer) <= 502 < 5000 < len(times)
    assert kept.max() == rows.max()
    assert (np.diff(fewer) > 0).all()


def test_a_plan_is_named_by_what_it_splits_and_the_map_has_what_a_whole_search_finds():
    for plan, name in (
        (Plan(), "one device"),
        (Plan(2, sharding=Sharding(2)), "ZeRO-2"),
        (Plan(2, sharding=Sharding(3)), "FSDP"),
        (Plan(2, tensor=2, sharding=Sharding(3)), "tensor"),
        (Plan(2, 2, 2), "pipeline"),
        (Plan(2, 2, 2, tensor=2), "tensor and pipeline"),
    ):
        assert sim.strategy_of(plan) == name
    machine = sim.cluster("dgx-h100", 128, stack="megatron")  # two samples per rank: bounds rank plain replicas last
    (field,) = sim.strategy_map(("gpt-2-1.5b",), machine, (128,), batch_size=256)
    whole = sim.search(sim.Question(sim.ModelDescription(model="gpt-2-1.5b"), machine, 256))
    assert (field.choice.plan, field.strategy) == (whole.best(1)[0].plan, "data")


def test_a_race_has_the_cost_models_times_and_the_crossing_where_lines_meet():
    for wire, num_ranks in ((PLAIN, 2), (sim.link("nvlink4"), 64)):
        for name, times in race(wire, num_ranks).times_s.items():
            assert times[-1] == pytest.approx(sim.all_reduce_s(1e9, num_ranks, wire, name))
    first, last = race(PLAIN, 8, ("tree", "ring")).stretches  # 14 a + 14/8 S/b = 6 a + 2 S/b: S = 8 a b / (1/4)
    assert (first.algorithm, first.first_bytes, last.last_bytes) == ("tree", 1e3, 1e9)
    assert first.last_bytes == last.first_bytes == pytest.approx(8 * 1e-5 * 1e9 / 0.25, rel=2e-3)
    assert race(PLAIN, 2, ("halving_doubling", "ring")).stretches[0].algorithm == "halving_doubling", "first of equals"
    assert "hierarchical" not in race("nvlink4", 8, inter_node="infiniband-ndr").times_s


def test_every_chunk_of_a_ring_collects_the_ranks_that_it_passed_until_it_is_the_sum():
    for num_ranks in (2, 7):
        steps = ring_steps(ring(num_ranks))
        for number, sent in enumerate(steps.chunk):
            held = steps.parts[number].sum(axis=2)
            assert (held[np.arange(num_ranks), sent] == min(number + 1, num_ranks)).all()
            assert steps.copies(number) == (number >= num_ranks - 1)
        assert (len(steps.chunk), steps.parts[-1].all(), steps.fault) == (2 * (num_ranks - 1), True, "")
    assert [chunk_name(index) for index in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_of_many_calls_the_first_are_drawn_and_the_last_of_a_hang_whatever_the_speed():
    slow, fast = read_diagram(ping(1000)), read_diagram(ping(1))
    assert [event[2:] for event in slow.events] == [event[2:] for event in fast.events]
    calls = [call(0, "send", 1, (n, n, n + 1), channel=n) for n in range(0, 500, 2)]
    first = read_diagram(calls)
    assert (first.num_left_out, first.events[1].start_x) == (10, 2)
    stuck = [*calls, call(1, "recv", 0, (999, 999, 0), channel=1)]
    assert (read_diagram(stuck).waits_for, read_diagram(stuck).num_left_out) == ({1: (0,)}, 11)


def test_owners_are_the_runners():
    import torch

    from distlab.context_parallel import zigzag_positions
    from distlab.expert_parallel import Routing, assign, capacity_of

    owner = np.repeat(ring_work(4).owner, 3)
    for rank in range(4):
        assert np.flatnonzero(owner == rank).tolist() == zigzag_positions(24, 4, rank).tolist()
    asked, capacity = choices(2, 7, 2), capacity_of(7, 6, top_k=2, factor=0.5)
    routes = routes_of(asked, [within(one, capacity) for one in asked], 6, capacity)
    for rank, experts in enumerate(asked):
        found = assign(Routing(torch.tensor(experts), torch.ones(experts.shape), torch.ones(7, 6) / 6), 0.5)
        assert routes.rows[rank].tolist() == list(found.counts)
        assert sum(len(routes.taken(expert, rank)) for expert in range(6)) == len(found.slots)
    assert routes.between[1, 0] == routes.rows[1, :3].sum()


def test_parts_of_weights_go_back_to_where_they_came_from():
    for num_ranks in (1, 2, 4):
        whole, parts = weights(), cut(num_ranks)
        for name, one in shards_of(parts, SPLITS).items():
            assert (one.values == whole[name]).all()
            for rank in range(num_ranks if one.dim is not None else 0):
                own = np.concatenate([np.arange(low, high) for low, high in one.slices(rank)])
                owned = np.take(one.values, np.flatnonzero(one.owner == rank), axis=one.dim)
                assert (owned == np.take(whole[name], own, axis=one.dim)).all()


def test_schedules_have_their_bubbles_and_a_closed_form_only_where_the_order_has_one():
    for name in NAMES:
        run = play(name, 4, 8)
        assert run.bubble_fraction == pytest.approx(1 - run.speedup / 4)
        assert run.rank_span_s <= run.duration_s + 1e-12
        known = textbook_of(run.trace)
        assert (known is not None) == (name in ("naive", "gpipe", "one_f_one_b", "interleaved", "looped_bfs")), name
        if known:
            assert (known[0], known[2]) == (run.name, pytest.approx(run.bubble_fraction))
    own = run_schedule("own", parse_schedule("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0"), EQUAL).trace
    odd = play("interleaved", 2, 3).trace  # micro-batches that the ranks do not divide
    assert [textbook_of(trace) for trace in (own, odd, data_parallel(2))] == [None] * 3
    kinds = shaded(sim.simulate_schedule(interleaved(2, 4, stages_per_rank=3), EQUAL).trace)
    for stage, kind in ((0, "F"), (2, "F~1"), (5, "F~2")):
        assert (kinds.is_word("kind", kind) & (kinds.stage == stage)).sum() == 4
    one = sim.simulate_schedule(gpipe(3, 2), EQUAL).trace
    assert shaded(one) is one


def test_a_moment_says_what_each_rank_does_and_for_whom_it_waits():
    run = run_schedule("1F1B", one_f_one_b(3, 4), ActionTimes(1.0, 1.0, 1.0, 0.5))
    said = "At 500 us, 1F1B: rank 0 runs 0F0; rank 1 waits for 0F0 of rank 0; rank 2 waits for 1F0 of rank 1."
    assert tell_moment([run], 0.5e-3) == said
    assert "rank 1 waits for 0F0 of rank 0, which is on its way" in tell_moment([run], 1.25e-3)
    assert "rank 1 waits for 2B0 of rank 2" in tell_moment([run], 4.6e-3)
    assert tell_moment([run], run.duration_s).endswith("1F1B: ranks 0, 1 and 2 are done.")
    moments = moments_of(play("gpipe", 8, 200, times=ActionTimes(1.0, 1.1, 0.7)).trace)
    assert len(moments) == MAX_MOMENTS + 1
    assert (np.diff(moments) > 0).all()


def states(own, at_ms):
    return [state for state, _ in held_at(own, at_ms / 1e3).gradients]


def test_a_gradient_is_made_then_sent_then_the_mean_and_ranks_say_what_they_do():
    own = read_step(by_hand()).ranks[0]
    made = {5: [ABSENT, ABSENT], 20: [FILLING, ABSENT], 35: [SENT, FILLING], 50: [MEAN, SENT], 61: [MEAN, MEAN]}
    assert {at: states(own, at) for at in made} == made
    doing = {5: ("forward 50 %", 0.5), 30: ("backward 50 %", 0.5), 55: ("waits for bucket 1", 0.0)}
    doing |= {65: ("updates weights", 0.0), 70: ("step done", 0.0)}
    held = {at: held_at(own, at / 1e3) for at in doing}
    assert {at: (one.doing, round(one.activations, 3)) for at, one in held.items()} == doing
    assert [one.updated for one in held.values()] == [False] * 4 + [True]
    assert (own.hidden_s, own.exposed_s, own.reductions[1].end_s) == pytest.approx((19e-3, 11e-3, 61e-3))
    late = read_step(Trace.concatenate([by_hand(), by_hand(1, late=4)])).ranks[0]
    assert (late.reductions[1].met_s, late.reductions[1].missing(0.048)) == (pytest.approx(50e-3), (1,))
    assert held_at(late, 0.0555).gradients[1] == (SENT, pytest.approx(0.5))


def test_every_rung_of_the_ladder_is_read_and_agrees_with_the_timeline():
    sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "sequence_length": 64, "vocab_size": 256}
    gpt = sim.gpt_workload(**sizes, bytes_per_parameter=4)
    options = {"data": 4, "bucket_bytes": 100_000, "first_bucket_bytes": 30_000}
    for sync in ("per_parameter", "flat", "bucketed", "overlapped"):
        step = sim.simulate(gpt, sim.cluster("laptop", 4), Plan(gradient_sync=sync, **options))
        for trace in (step.trace, step.layer_trace):
            whole = read_step(trace)
            own = whole.ranks[0]
            assert len(own.reductions) == {"per_parameter": 38, "flat": 1}.get(sync, len(step.stages[0].buckets))
            assert all(r.fill_s <= r.ready_s <= r.start_s + 1e-9 < r.end_s for r in own.reductions)
            ready = [reduction.ready_s for reduction in own.reductions]
            assert ready == sorted(ready, reverse=sync == "per_parameter"), "sent first to last, made last to first"
            assert np.mean([one.exposed_s for one in whole.ranks]) == pytest.approx(facts_of(trace).exposed_s)
            assert SENT in states(own, best_moment(whole) * 1e3)
    parts = [data_parallel(2, jitter=0.05).shifted(number * 200 * MS) for number in range(3)]
    assert sorted(step_of(Trace.concatenate(parts), 1)) == sorted(parts[1].from_zero())
