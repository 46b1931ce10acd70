"""Ranks in nodes: who sits where, what a wire takes, what ranks are told, and what is built on their groups."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hybrid_gpt import assert_equal_to_one_process, train, train_alone
from random_programs import hold

from distlab.comm import Nodes, node_groups, run
from distlab.comm.nodes.group import NodeWire
from distlab.comm.nodes.wire import NodePlacement, Pace, Wire
from distlab.plan import Plan


def test_a_wire_is_written_with_units_and_anything_else_is_refused():
    for text, wire in (("1.25 GB/s, 5 us", Wire(1.25e9, 5e-6)), ("500kB/s", Wire(5e5))):
        assert Wire.of(text) == Wire.of(str(wire)) == wire
    for text in ("40MB", "40MB/s,200", "40 MB/s 200us", "0MB/s", ""):
        with pytest.raises(ValueError, match="the wire between nodes is"):
            Wire.of(text)


def test_what_is_sent_goes_one_after_the_other():
    pace = Pace(Wire(1e6, 1e-3))
    assert pace.occupy(0.5, since_s=10.0) == 10.5
    assert pace.occupy(0.5, since_s=10.2) == 11.0, "behind the first"
    assert pace.occupy(0.5, since_s=20.0) == 20.5, "the wire was idle"


def test_ranks_fill_nodes_in_their_order():
    expected = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert Nodes(2).environment(5, 8) == expected
    assert NodePlacement.of(range(8), 5, 4) == NodePlacement(((0, 1, 2, 3), (4, 5, 6, 7)), (4, 5, 6, 7))
    assert NodePlacement.of([1, 3, 4, 6], 2, 4) == NodePlacement(((0, 1), (2, 3)), (2, 3)), "numbers within the group"
    assert NodePlacement.of([1, 5], 0, 4).mates == (0,)
    assert NodePlacement.of([0, 1, 4, 5], 1, 4).part("all_reduce", 100) == 50
    assert NodePlacement.of([0, 1, 4], 1, 4).part("all_reduce", 100) == 100, "unequal nodes share nothing"
    assert NodePlacement.of([0, 1, 4, 5], 1, 4).part("all_gather", 100) == 100


@pytest.mark.parametrize(
    ("op", "sent", "seconds"),
    [
        ("all_reduce", 4000, 2 * 1.0 + 2.0),  # each of two ranks takes half of it, half of that twice
        ("all_gather", 4000, 1.0 + 4.0),
        ("broadcast", 4000, 1.0 + 4.0),
        ("barrier", 0, 1.0),
        ("all_to_all", [7000, 9000, 1000, 2000], 2 * 1.0 + 3.0),  # ranks 2 and 3 sit in the other node
    ],
)
def test_a_collective_takes_the_time_of_a_ring_over_the_nodes(monkeypatch, op, sent, seconds):
    pace, until = Pace(Wire(1000.0, 1.0)), []
    monkeypatch.setattr("distlab.comm.nodes.group.sleep_until", until.append)
    NodeWire(range(4), 1, 2, pace).collective(op, sent, 10.0)
    assert until == [pytest.approx(10.0 + seconds)]


def test_a_message_is_on_the_wire_where_it_leaves_the_node():
    pace = Pace(Wire(1000.0, 1.0))
    wire = NodeWire(range(4), 1, 2, pace)
    assert wire.message(0, 500) == (0.0, 0.0)
    sent_s, arrives_s = wire.message(2, 500)
    assert arrives_s == sent_s + 1.0
    assert wire.message(3, 500)[0] == pytest.approx(sent_s + 0.5), "behind the first"


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        (3, "4 ranks do not fill 3 nodes evenly; use a multiple of 3 ranks"),
        (Nodes(1, "1MB/s"), "there is one node, so nothing lies between nodes"),
        (0, "pass a whole number of nodes"),
        (True, "pass a whole number of nodes"),
    ],
)
def test_nodes_that_do_not_fit_the_ranks_are_refused(nodes, match):
    with pytest.raises(ValueError, match=match):
        Nodes.for_ranks(nodes, 4)


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
    for rank, text in enumerate(run(of_two_nodes, 2, nodes=WIRE, timeout_s=200, record=False)):
        assert text.startswith(f"rank {rank}: "), text
        assert "send float32[2], receive recv float32[4]; give both the same number of elements and the" in text


def test_random_programs_equal_gloo(node_ranks, request):
    hold(node_ranks, 5, request.config.getoption("--hypothesis-seed"), sizes=(2, 4))


def test_a_mesh_over_two_nodes_equals_one_process(node_ranks):
    assert_equal_to_one_process(node_ranks(4).run(train, Plan(data=2, tensor=2)), train_alone())
