"""What a wire takes, how it is written, and who sits where."""

import pytest

from distlab.comm.nodes import Nodes
from distlab.comm.nodes.group import NodeWire
from distlab.comm.nodes.wire import NodePlacement, Pace, Wire


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
    assert Nodes(2).environment(5, 8) == {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
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
