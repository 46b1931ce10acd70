"""Meshes, buckets, cuts and records: what they say of ranks and sizes; fields that are refused by name."""

from dataclasses import FrozenInstanceError, replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from distlab.plan import (
    AXES,
    Cluster,
    Contention,
    Device,
    Experts,
    Layer,
    Link,
    Mesh,
    Plan,
    Protocol,
    Sharding,
    Work,
    Workload,
    assign_buckets,
    balance,
    mesh_of,
    split_evenly,
)
from distlab.plan.partition import Cuts, even_blocks
from distlab.plan.require import changed

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(lambda sizes: Mesh(zip(AXES, sizes, strict=False)))
WORK = Work(100.0, 40.0, 6)
LINK, CPU = Link("wire", (Protocol(1e-6, 1e9),)), Device("cpu", 1e9, 1e9, 1e9)
LAYER = Layer("linear", (12, 4), Work(1, 2, 3), Work(1), Work(1))


@given(MESHES, st.integers(1, 9))
def test_coordinates_and_ranks_are_inverses_and_groups_partition_the_ranks(mesh, per_node):
    for rank in range(mesh.size):
        assert (mesh.rank(**mesh.coordinates(rank)), tuple(mesh.coordinates(rank))) == (rank, mesh.names)
    for axis in mesh.names:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(mesh.axis_size(axis)))
            others = [{k: v for k, v in mesh.coordinates(rank).items() if k != axis} for rank in group]
            assert all(other == others[0] for other in others)
            assert all(mesh.group_of(rank, axis) == group for rank in group)
        apart = [len({rank // per_node for rank in group}) > 1 for group in groups]
        assert mesh.crosses_nodes(axis, per_node) == any(apart)


def test_the_last_axis_varies_fastest_and_the_order_decides_who_are_neighbours():
    mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
    assert mesh.groups("data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.coordinates(5) == {"pipeline": 1, "data": 0, "tensor": 1}
    assert mesh == Mesh([("pipeline", 2), ("data", 2), ("tensor", 2)]) != Mesh({"data": 2, "pipeline": 2, "tensor": 2})
    plan = Plan(data=2, pipeline=3, tensor=2)
    assert str(mesh_of(plan)) == "pipeline (3) x data (2) x expert (1) x context (1) x tensor (2) = 12"
    assert mesh_of(plan).group_of(5, "tensor") == (4, 5)
    turned = mesh_of(Plan(data=2, tensor=2), order=("pipeline", "tensor", "expert", "context", "data"))
    assert (turned.group_of(0, "data"), turned.group_of(0, "tensor")) == ((0, 1), (0, 2))


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(100, 300), st.integers(1, 300))
def test_buckets_are_those_of_torch(sizes, capacity, first):
    buckets = assign_buckets(sizes, capacity, first)
    assert [p for bucket in buckets for p in bucket.parameters] == list(reversed(range(len(sizes))))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.num_bytes for bucket in buckets] == [sum(sizes[p] for p in one.parameters) for one in buckets]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    if tensors:
        indices, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [first, capacity])
        theirs = [tuple(len(sizes) - 1 - index for index in bucket) for bucket in indices]
        assert [bucket.parameters for bucket in buckets] == theirs


@given(st.integers(0, 100), st.integers(1, 20))
def test_an_even_split_covers_everything_once(total, parts):
    ranges = split_evenly(total, parts)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    sizes = [stop - start for start, stop in ranges]
    assert (len(sizes), sizes) == (parts, sorted(sizes, reverse=True))
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_cut(costs, data):
    cuts, every = balance(costs, data.draw(st.integers(1, len(costs)))), Cuts(costs)
    assert (cuts[0][0], cuts[-1][1]) == (0, len(costs))
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    assert all(start < stop for start, stop in cuts)
    bounds = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), len(cuts) - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(bound)) for bound in bounds)
    assert max(sum(costs[start:stop]) for start, stop in cuts) == best
    assert every.into(len(costs)) == balance(costs, len(costs))  # one program cuts into any number of stages
    assert every.into(len(cuts)) == cuts


def test_a_heavy_head_and_blocks_that_divide_with_the_ends():
    """An embedding in front, a head behind: 22 blocks on 8 stages as in zero bubble's Table 3."""
    assert balance([1, 1, 1, 1, 1, 1, 3], 3) == ((0, 3), (3, 6), (6, 7))
    assert even_blocks(1, 13, 14, 3) == ((0, 5), (5, 9), (9, 14))
    assert [stop - start for start, stop in even_blocks(1, 23, 24, 8)] == [3] * 8
    assert even_blocks(0, 4, 4, 2) == ((0, 2), (2, 4))
    assert even_blocks(1, 5, 6, 1) == ((0, 6),)


def test_a_part_and_the_rest_make_the_whole_and_sizes_add_up():
    part = Work(30.0, 40.0, 2)
    assert WORK.without(part) + part == WORK
    assert WORK.times(0.5) == Work(50.0, 20.0, 6)
    workload = Workload("two layers", (LAYER, LAYER), bytes_per_parameter=2)
    assert (LAYER.num_parameters, workload.num_parameters, workload.gradient_bytes) == (16, 32, 64)
    plan = Plan(data=2, expert=3, context=5, tensor=7, pipeline=11)
    assert (plan.world_size, plan.copies, plan.num_replicas) == (2310, 30, 6)
    assert Plan(pipeline=3, schedule="interleaved", stages_per_rank=4).world_size == 3
    divided = Layer("l", (6, 4), WORK, WORK, WORK, parameter_axes=("tensor", "expert"), tensor_parameters=6)
    assert (divided.expert_parameters, LAYER.expert_parameters) == (4, 0)
    experts = Experts(5, 1, 10, WORK, WORK, WORK, kernels_each=1)  # the first ranks hold one more
    assert [experts.most_on_a_rank(ranks) for ranks in (1, 2, 3, 5, 8)] == [5, 3, 2, 1, 1]


def test_a_changed_record_equals_a_replaced_one_and_leaves_the_first():
    other = changed(LAYER, name="other", forward=Work(5))
    assert other == replace(LAYER, name="other", forward=Work(5))
    assert (LAYER.name, LAYER.forward) == ("linear", Work(1, 2, 3))
    with pytest.raises(FrozenInstanceError):
        other.name = "third"


def layer(**options):
    return Layer("l", (6, 4), Work(), Work(), Work(), **options)


EACH = "name each of pipeline, data, expert, context, tensor once"
FEW = "2 layers cannot fill 3 stages; use at least 1 and at most 2"
FULL = r"pipeline \(1\) x data \(2\) x expert \(3\) x context \(1\) x tensor \(2\) = 12 does not fill 8 ranks"
REFUSED = [
    (lambda: Mesh({}), "needs at least one axis"),
    (lambda: Mesh([("a", 2), ("a", 3)]), r"a \(2\) x a \(3\) has two axes named 'a'"),
    (lambda: Mesh({"data": 2, "tensor": 0}), r"data \(2\) x tensor \(0\) has tensor = 0; pass a whole number"),
    (lambda: mesh_of(Plan(data=2, expert=3, tensor=2), world_size=8), FULL),
    (lambda: Mesh({"data": 2}).coordinates(2), r"rank 2 is outside the mesh data \(2\) = 2; pass a rank in 0..1"),
    (lambda: Mesh({"data": 2}).rank(data=2), r"data=2 is outside the mesh data \(2\) = 2; pass a number in 0..1"),
    (lambda: Mesh({"data": 2, "tensor": 2}).rank(data=1), "got coordinates on data; .* each of data, tensor"),
    (lambda: Mesh({"data": 2}).groups("tensor"), r"data \(2\) = 2 has no axis 'tensor'; its axes are data"),
    *((lambda order=order: mesh_of(Plan(), order=order), EACH) for order in (("data",), (*AXES, "data"), "pipeline")),
    (lambda: Plan(context_kind="tree"), "context_kind is 'tree'; choose one of ring, all_to_all"),
    (lambda: Plan(data=2, context=3, sharding=Sharding(stage=1, replicas=4)), "4 replicas do not divide 6 ranks"),
    (lambda: Plan(data=3, expert=2, fold_experts=True), "= 3 ranks of a stage, which expert=2 does not divide: use a"),
    (lambda: Plan(tensor=2, expert=2, fold_experts=True), "tensor ranks have the same tokens: use sequence_parallel"),
    (lambda: Plan(data=0), "Plan: data is 0; pass a whole number of at least 1"),
    (lambda: Plan(schedule="zigzag"), "schedule is 'zigzag'; choose one of naive, gpipe, one_f_one_b"),
    (lambda: Plan(schedule="zb_v"), "zb_v needs 2 stages per rank, got stages_per_rank=1; pass stages_per_rank=2"),
    (lambda: Plan(stages_per_rank=2), "one_f_one_b needs 1 stage per rank, got stages_per_rank=2; .* interleaved"),
    (lambda: Plan(gradient_sync="never"), "gradient_sync is 'never'; choose one of per_parameter"),
    (lambda: Plan(cut="size"), "cut is 'size'; choose one of time, blocks"),
    (lambda: WORK.without(Work(200.0)), "is not a part of"),
    (lambda: Work(matmul_flops=-1), r"Work\(matmul_flops=-1, .* pass numbers of at least 0"),
    (lambda: Workload("empty", ()), "'empty' has no layers"),
    (lambda: Workload("w", (LAYER,), samples=0), "samples is 0; pass a whole number"),
    (lambda: layer(score_bytes=1), "Layer 'l': score_bytes are 1 of 0; pass a part"),
    (lambda: Device("d", 0, 1, 1), "Device 'd': matmul_flops_per_s is 0"),
    (lambda: Device("d", 1, 1, 1, kernel_s=-1), "kernel_s is -1"),
    (lambda: Device("d", 1, 1, 1, multiprocessors=0), "multiprocessors is 0"),
    (lambda: Protocol(-1, 1), "latency_s is -1"),
    (lambda: Protocol(0.0, 0.0), "Protocol: bytes_per_s is 0.0; pass a number greater than zero"),
    (lambda: Protocol(0.0, 1e9, 0.0), "most_bytes is 0.0"),
    (lambda: Link("l", ()), "Link 'l' has no protocol"),
    (lambda: Link("l", (Protocol(0.0, 1e9, 1e6),)), "its last protocol ends at 1000000.0 bytes"),
    (lambda: Link("l", (Protocol(0.0, 1e9),), start_s=-1.0), "start_s is -1.0"),
    (lambda: Contention(0.5), r"compute_slowdown is 0.5; pass a number of at least 1.0"),
    (lambda: Cluster("c", CPU, 6, 4, LINK, LINK), "6 devices do not fill nodes of 4; use a multiple of 4"),
    (lambda: Cluster("c", CPU, 4, 4, LINK, LINK, num_cores=0), "num_cores"),
    (lambda: assign_buckets([1], 0), "bucket_bytes is 0; a bucket holds at least one byte"),
    (lambda: assign_buckets([1], 10, 0), "first_bucket_bytes is 0; .* at least one byte"),
    (lambda: assign_buckets([1, -3], 10), "parameter 1 has a size of -3"),
    *((lambda sizes=sizes: split_evenly(*sizes), "cannot split") for sizes in ((-1, 2), (4, 0))),
    (lambda: balance([1, 2], 3), FEW),
    (lambda: balance([1, -2], 1), "layer 1 costs -2"),
    (lambda: balance([float("nan")], 1), "layer 0 costs nan"),
    (lambda: even_blocks(1, 24, 25, 8), "23 blocks do not divide into 8 equal stages.*cut='time'"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_refused_with_what_to_do(make, words):
    with pytest.raises(ValueError, match=words):
        make()
