"""What a wire takes, how it is written, and who sits where."""

import threading
import time
from types import SimpleNamespace

import pytest

from distlab.nodes import Nodes
from distlab.nodes.messages import CrossingMessages
from distlab.nodes.place import NodePlacement
from distlab.nodes.wire import Pace, Wire
from distlab.shared_memory.work import SharedWork


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("40MB/s,200us", Wire(40e6, 200e-6)),
        ("1.25 GB/s, 5 us", Wire(1.25e9, 5e-6)),
        ("500kB/s", Wire(5e5)),
        ("9B/s,1ms", Wire(9.0, 1e-3)),
    ],
)
def test_a_wire_is_written_with_units(text, wire):
    assert Wire.of(text) == wire
    assert Wire.of(str(wire)) == wire


@pytest.mark.parametrize("text", ["40", "40MB", "fast", "40MB/s,200", "40 MB/s 200us", "0MB/s", "", "1.2.3MB/s"])
def test_what_is_no_wire_is_refused(text):
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
    assert NodePlacement.of(range(8), 5, 4) == NodePlacement(((0, 1, 2, 3), (4, 5, 6, 7)), (4, 5, 6, 7), (1, 5))
    assert NodePlacement.of([1, 3, 4, 6], 2, 4) == NodePlacement(((0, 1), (2, 3)), (2, 3), (0, 2)), (
        "numbers within the group"
    )
    across = NodePlacement.of([1, 5], 0, 4)
    assert (across.row, across.column, across.mates) == ((0,), (0, 1), (0,))


def test_uneven_nodes_make_one_ring():
    place = NodePlacement.of([0, 1, 4], 1, 4)
    assert (place.row, place.column, place.mates) == ((1,), (0, 1, 2), (0, 1))


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        (3, "4 ranks do not fill 3 nodes evenly; use a multiple of 3 ranks"),
        (Nodes(1, "1MB/s"), "there is one node, so nothing lies between nodes"),
    ],
)
def test_nodes_that_do_not_fit_the_ranks_are_refused(nodes, match):
    with pytest.raises(ValueError, match=match):
        Nodes.for_ranks(nodes, 4)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_nodes_is_a_number(count):
    with pytest.raises(ValueError, match="pass a whole number of nodes"):
        Nodes(count)


class SlowToSay(SharedWork):
    """A message whose state takes its time to be read: two threads can see it before either takes it."""

    @property
    def under_way(self):
        found = self._under_way
        time.sleep(0.05)
        return found

    @under_way.setter
    def under_way(self, value):
        self._under_way = value


def test_of_two_that_wait_for_a_message_one_drives_it():
    driven = []
    messages, work = object.__new__(CrossingMessages), SlowToSay([])
    messages._lock, messages._drivers = threading.Lock(), 0
    messages._sending, messages._taking, messages._receives = set(), set(), []  # nothing else is open
    notice = SimpleNamespace(work=SharedWork([], is_over=True))
    work.under_way = SimpleNamespace(wait=driven.append, notice=notice)
    other = threading.Thread(target=messages.drive, args=(work, 0.0))
    other.start()
    assert messages.drive(work, 0.0)
    other.join()
    assert driven == [0.0]
