"""Ranks in nodes: what they are told, how long a wire takes, and what is built on their groups."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import assert_equal_to_one_process, train, train_alone
from random_programs import hold

from distlab.comm import Nodes, node_groups, run
from distlab.plan import Plan

RATE, LATENCY_S = 2e6, 5e-3
WIRE = Nodes(2, between="2MB/s,5ms")


def told():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    groups = {axis: dist.get_process_group_ranks(group) for axis, group in node_groups().items()}
    return [int(os.environ[name]) for name in names], groups, dist.get_backend()


def test_ranks_are_told_their_node_as_torchrun_would(node_ranks):
    for rank, (variables, groups, backend) in enumerate(node_ranks(4).run(told)):
        node = rank // 2
        assert variables == [rank, rank % 2, node, 4, 2, 2]
        assert groups == {"local": [2 * node, 2 * node + 1], "node": [rank % 2, rank % 2 + 2]}
        assert backend == "nodes"


def times_of(call):
    """Return the seconds of a call, to which other programs can only add, and those that it occupies the wire."""
    pace, paid = dist.distributed_c10d._get_default_group().wire.pace, []
    occupy, pace.occupy = pace.occupy, lambda seconds, since_s: paid.append(seconds) or occupy(seconds, since_s)
    dist.barrier()
    paid.clear()
    begin = time.monotonic()
    call()
    took = time.monotonic() - begin
    pace.occupy = occupy
    return took, sum(paid)


def times_on_a_wire():
    groups, whole = node_groups(), torch.zeros(20_000)  # 80 kB
    other, found = (dist.get_rank() + 2) % 4, {}
    works = []
    found["inside"] = times_of(lambda: dist.all_reduce(whole, group=groups["local"]))
    found["across"] = times_of(lambda: dist.all_reduce(whole, group=groups["node"]))
    found["all"] = times_of(lambda: dist.all_reduce(whole))
    landing = torch.empty(20_000)

    def swap():
        works.extend([dist.isend(whole, other), dist.irecv(landing, other)])
        for work in works:
            work.wait()

    found["message"] = times_of(swap)
    store, key = dist.distributed_c10d._get_default_store(), f"has returned {dist.get_rank() % 2}"
    if dist.get_rank() >= 2:
        store.wait([key])  # the other one's call has returned before this one's begins
    begin = time.monotonic()
    work = dist.all_reduce(whole, group=groups["node"], async_op=True)
    store.set(key, "yes")
    work.wait()
    found["asynchronous"] = time.monotonic() - begin
    return found


def test_only_what_leaves_a_node_takes_a_wires_time():
    byte_s = 80_000 / RATE
    of_ranks = run(times_on_a_wire, 4, nodes=WIRE)
    assert max(found["message"][0] for found in of_ranks) >= LATENCY_S + byte_s, "who began first waits for all of it"
    for found in of_ranks:
        assert found["inside"][1] == 0
        for name, bytes_s in (("across", byte_s), ("all", byte_s / 2)):  # each rank of a node carries half across
            took, paid = found[name]
            assert took >= paid == pytest.approx(2 * LATENCY_S + bytes_s), name
        assert found["message"][0] >= byte_s, "of its own message, which the other one began to send a moment ago"
        assert found["asynchronous"] >= 2 * LATENCY_S + byte_s


def of_two_nodes():
    """A message between two nodes has a future; return what each rank is told of one that does not fit."""
    me, landing = dist.get_rank(), torch.zeros(3)
    if me == 0:
        dist.send(torch.ones(3), 1)
    else:
        work = dist.irecv(landing, 0)
        assert work.get_future().then(lambda future: float(landing.sum())).wait() == 3.0
    try:
        dist.send(torch.ones(2), 1) if me == 0 else dist.recv(torch.ones(4), 0)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def test_messages_between_nodes():
    for rank, text in enumerate(run(of_two_nodes, 2, nodes=WIRE, timeout_s=30, record=False)):
        assert text.startswith(f"rank {rank}: "), text
        assert "send float32[2], receive recv float32[4]; give both the same number of elements and the" in text


def test_random_programs_equal_gloo(node_ranks, request):
    hold(node_ranks, 5, request.config.getoption("--hypothesis-seed"), sizes=(2, 4))


def test_a_mesh_over_two_nodes_equals_one_process(node_ranks):
    assert_equal_to_one_process(node_ranks(4).run(train, Plan(data=2, tensor=2)), train_alone())
