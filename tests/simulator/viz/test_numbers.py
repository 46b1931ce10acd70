"""What pictures compute beside the simulator: peaks, parts of a step, goodput, races, speed-ups and maps."""

import math
from dataclasses import replace

import numpy as np
import pytest
from picture_facts import with_gid

from distlab.plan import AXES, Link, Mesh, Plan, Protocol, Sharding
from simulator import (
    Failures,
    ModelDescription,
    Question,
    all_reduce_s,
    cluster,
    gpt_workload,
    hierarchical_all_reduce_s,
    link,
    memory_of,
    search,
    simulate,
    strategy_map,
    strategy_of,
    with_bandwidth,
)
from simulator.memory.memory import KINDS
from simulator.viz import draw_goodput, draw_memory
from simulator.viz.collectives.race import race, race_takeaway
from simulator.viz.large_batch import NUM_RANKS, scaling
from simulator.viz.memory import MEMORY_KINDS, fewer_moments
from simulator.viz.mesh.degrees import parts_of

TINY = gpt_workload(hidden_size=256, num_layers=6, num_heads=4, sequence_length=64, vocab_size=1000)


def memory(**options):
    return memory_of(TINY, Plan(**options))


def test_every_kind_has_its_own_colour_and_letter():
    assert tuple(MEMORY_KINDS) == KINDS
    assert len({style.colour for style in MEMORY_KINDS.values()}) == len(KINDS)
    assert len({style.letter for style in MEMORY_KINDS.values()}) == len(KINDS)


def bar_widths(axes):
    (bars,) = (artist for artist in axes.collections if artist.get_gid() == "bars")
    return np.array([np.ptp(path.vertices[:4, 0]) for path in bars.get_paths()])


def test_bars_add_up_to_the_peaks():
    held = memory(pipeline=2, num_microbatches=4)
    bars, _ = draw_memory(held).figure.axes
    widths = bar_widths(bars).reshape(-1, 2)
    np.testing.assert_allclose(widths.sum(axis=0), held.total_bytes)


def test_a_long_step_is_drawn_by_pixels_and_keeps_its_peak():
    times, rows = memory(num_microbatches=400).over_time()
    fewer, kept = fewer_moments(times, rows, 500)
    assert len(times) > 5000
    assert len(fewer) <= 502
    assert kept.max() == rows.max()
    assert (np.diff(fewer) > 0).all()


CUBE = Mesh({"pipeline": 2, "data": 2, "tensor": 2})


def test_an_axis_leaves_the_node_when_a_group_has_ranks_in_two():
    assert [CUBE.crosses_nodes(axis, 4) for axis in CUBE.names] == [True, False, False]
    assert [CUBE.crosses_nodes(axis, 2) for axis in CUBE.names] == [True, True, False]
    assert not any(CUBE.crosses_nodes(axis, 8) for axis in CUBE.names)
    assert Mesh({"data": 2, "tensor": 3}).crosses_nodes("tensor", 4)  # ranks 3, 4 and 5: the second node begins at 4


GPT = gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
H100 = cluster("dgx-h100", 32)
PLANS = [
    Plan(data=4),
    Plan(data=2, tensor=8, sequence_parallel=True),
    Plan(data=2, pipeline=4, tensor=4, num_microbatches=8),
    Plan(context=4, tensor=2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_parts_sum_to_the_step_and_are_the_steps_own(plan):
    step = simulate(GPT, H100, plan)
    parts = {part.name: part.seconds for part in parts_of(step)}
    assert sum(parts.values()) == pytest.approx(step.duration_s)
    assert all(seconds >= 0 for seconds in parts.values())
    assert {axis: parts[axis] for axis in AXES} == step.exposed_by_axis
    assert (parts["bubble"] > 0) == (plan.pipeline > 1)
    assert all((parts[axis] > 0) <= (getattr(plan, axis) > 1 or axis == "data") for axis in AXES)


FAILURES = Failures("llama-3-all", restart_s=600)


def line(figure, gid):
    (found,) = with_gid(figure, gid)
    return found.get_xdata(), found.get_ydata()


def test_goodput_is_computed_drawn_and_split_into_parts():
    figure = draw_goodput(FAILURES, 16_384, 30.0).figure
    intervals, useful = line(figure, "computed")
    tried, drawn = line(figure, "drawn")
    assert np.interp(np.log(tried), np.log(intervals), useful) == pytest.approx(drawn, abs=0.02)
    best = FAILURES.goodput(16_384, 30.0)
    assert line(figure, "chosen")[0][0] == best.interval_s
    assert useful.max() == pytest.approx(best.useful, abs=1e-3)


SMALL = gpt_workload(hidden_size=128, num_layers=4, num_heads=4, sequence_length=64, vocab_size=500)
LAPTOP = with_bandwidth(cluster("laptop", 4), Plan(data=4), 5e8)


def test_the_best_bucket_size_lies_between_too_small_and_too_large():
    each = SMALL.gradient_bytes
    plans = [Plan(data=4, bucket_bytes=size, first_bucket_bytes=size) for size in (each // 1000, each // 10, each)]
    small, middle, large = (simulate(SMALL, LAPTOP, plan) for plan in plans)
    assert middle.duration_s < min(small.duration_s, large.duration_s)
    assert len(small.stages[0].buckets) > len(middle.stages[0].buckets) > len(large.stages[0].buckets)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(), "one device"),
        (Plan(2), "data"),
        (Plan(2, sharding=Sharding(1)), "ZeRO-1"),
        (Plan(2, sharding=Sharding(2)), "ZeRO-2"),
        (Plan(2, sharding=Sharding(3)), "FSDP"),
        (Plan(2, tensor=2, sharding=Sharding(3)), "tensor"),
        (Plan(2, 2, 2), "pipeline"),
        (Plan(2, 2, 2, tensor=2), "tensor and pipeline"),
    ],
)
def test_a_plan_is_named_by_what_it_splits(plan, name):
    assert strategy_of(plan) == name


def test_the_map_has_a_field_for_each_model_and_count_and_the_wire_moves_it():
    fast, slow = (
        strategy_map(("llama-2-7b",), replace(H100, inter_node=link(wire)), (1, 32), batch_size=64)
        for wire in ("infiniband-ndr", "ethernet-10g")
    )
    assert [(field.num_devices, field.strategy) for field in fast] == [(1, ""), (32, "tensor")]
    assert fast[1].choice.seconds < slow[1].choice.seconds


def test_the_map_has_the_plan_that_a_whole_search_finds():
    """Two samples per rank, where bounds rank plain replicas behind plans that gather."""
    machine = cluster("dgx-h100", 128, stack="megatron")
    (field,) = strategy_map(("gpt-2-1.5b",), machine, (128,), batch_size=256)
    whole = search(Question(ModelDescription(model="gpt-2-1.5b"), machine, 256))
    assert field.choice.plan == whole.best(1)[0].plan
    assert field.strategy == "data"


PLAIN = Link("plain", (Protocol(1e-5, 1e9),))


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 8, 64])
@pytest.mark.parametrize("wire", [PLAIN, link("nvlink4"), link("infiniband-hdr"), link("ethernet-10g")])
def test_times_are_the_cost_models(num_ranks, wire):
    facts = race(wire, num_ranks)
    assert list(facts.times_s) == ["ring", "tree", "halving_doubling"]
    for name, times in facts.times_s.items():
        for index in (0, 180, -1):
            assert times[index] == pytest.approx(all_reduce_s(facts.sizes_bytes[index], num_ranks, wire, name))


def test_winners_cover_all_sizes_and_are_the_fastest():
    facts = race(PLAIN, 6, ("naive", "ring", "binomial_tree", "halving_doubling"))
    stretches = facts.stretches
    assert (stretches[0].first_bytes, stretches[-1].last_bytes) == (1e3, 1e9)
    assert [a.last_bytes for a in stretches[:-1]] == [b.first_bytes for b in stretches[1:]]
    for stretch in stretches:
        middle = math.sqrt(stretch.first_bytes * stretch.last_bytes)
        index = int(np.argmin(np.abs(np.log(facts.sizes_bytes / middle))))
        assert min(facts.times_s, key=lambda name: facts.times_s[name][index]) == stretch.algorithm


def test_the_crossing_is_where_the_lines_meet():
    facts = race(PLAIN, 8, ("tree", "ring"))
    # 14 a + 14/8 S/b = 6 a + 2 S/b: S = 8 a b / (1/4)
    assert facts.stretches[0].algorithm == "tree"
    assert facts.stretches[0].last_bytes == pytest.approx(8 * 1e-5 * 1e9 / 0.25, rel=2e-3)
    assert race_takeaway(facts) == "Double tree wins below 320 kB, ring above"


def test_of_equals_the_first_named_wins():
    assert [s.algorithm for s in race(PLAIN, 2, ("ring", "halving_doubling")).stretches] == ["ring"]
    assert [s.algorithm for s in race(PLAIN, 2, ("halving_doubling", "ring")).stretches] == ["halving_doubling"]


def test_nodes_slow_down_whoever_does_not_know_them():
    facts = race("nvlink4", 64, inter_node="infiniband-ndr")
    across = link("infiniband-ndr")
    assert facts.times_s["ring"][-1] == pytest.approx(all_reduce_s(1e9, 64, across))
    expected = hierarchical_all_reduce_s(1e9, 8, 8, intra_node=link("nvlink4"), inter_node=across)
    assert facts.times_s["hierarchical"][-1] == pytest.approx(expected)
    assert facts.stretches[-1].algorithm == "hierarchical"
    assert "hierarchical" not in race("nvlink4", 8, inter_node="infiniband-ndr").times_s


def seconds(num_ranks):
    return 1.0 if num_ranks == 1 else 1.25


def test_speed_up_of_seconds_is_of_equal_work_a_rank():
    (speeds,) = scaling({"": seconds})
    assert speeds.speed_up.tolist() == [1.0, *(pytest.approx(0.8 * n) for n in NUM_RANKS[1:])]
    assert speeds.efficiency.tolist() == [1.0, *[pytest.approx(0.8)] * 6]


def test_speed_up_of_simulated_steps_is_of_samples():
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "sequence_length": 512, "vocab_size": 4096}

    def step(num_ranks):
        return simulate(gpt_workload(**sizes), cluster("dgx-a100", num_ranks), Plan(data=num_ranks))

    (speeds,) = scaling({"": step})
    expected = [step(n).samples_per_s / step(1).samples_per_s for n in NUM_RANKS]
    assert speeds.speed_up.tolist() == pytest.approx(expected)
    assert speeds.exposed[0] == 0
    assert speeds.exposed[-1] == pytest.approx(step(64).exposed_communication_s / step(64).duration_s)
