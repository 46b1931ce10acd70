"""A diagram of messages pairs sends with receives tag by tag, whatever the speed, and names who waits for whom."""

from types import SimpleNamespace

import pytest

from distlab.comm import RankError, Ranks
from simulator.viz import describe_message_diagram, draw_message_diagram, to_png
from simulator.viz.collectives.message_record import cycle_of, read_diagram


def call(rank, op, peer, times, **other):
    start, wait, end = times
    usual = {"number": 1, "group": (0, 1), "num_bytes": 8, "state": "done" if end else "waiting", "channel": 7}
    fields = {"rank": rank, "op": op, "peer": peer, "start_ns": start, "wait_ns": wait, "end_ns": end}
    return SimpleNamespace(**(usual | fields | other))


def ping(delay=1):
    """Rank 0 sends and waits for the answer; rank 1 receives and answers."""
    at = [0, 10 * delay, 11 * delay, 12 * delay, 30 * delay, 31 * delay, 45 * delay]
    return [
        call(0, "send", 1, (at[0], at[0], at[2]), channel=1),
        call(1, "recv", 0, (at[1], at[1], at[3]), channel=1),
        call(1, "send", 0, (at[4], at[4], at[6]), channel=2),
        call(0, "recv", 1, (at[3], at[3], at[5]), channel=2),
    ]


def arrows(figure):
    return [p for p in figure.axes[0].patches if type(p).__name__ == "FancyArrowPatch"]


def test_steps_of_cause_and_effect_do_not_depend_on_speed():
    slow, fast = read_diagram(ping(1000)), read_diagram(ping(1))
    assert slow.events == fast.events
    assert slow.pairs == fast.pairs == ((0, 1), (3, 2))
    for send, receive in fast.pairs:
        assert fast.events[receive].end_x > fast.events[send].start_x
    text = describe_message_diagram(ping(3))
    assert text == "2 messages of 16 B together between 2 ranks.\nrank 0 -> rank 1: 8 B\nrank 1 -> rank 0: 8 B"


def test_tags_cross():
    calls = [
        call(0, "send", 1, (0, 20, 30), channel=1, num_bytes=8),
        call(0, "send", 1, (1, 31, 32), channel=2, num_bytes=16),
        call(1, "recv", 0, (2, 2, 10), channel=2, num_bytes=16),
        call(1, "recv", 0, (11, 11, 21), channel=1, num_bytes=8),
    ]
    diagram = read_diagram(calls)
    assert diagram.pairs == ((0, 3), (1, 2))
    assert len(arrows(draw_message_diagram(calls))) == 2


def test_a_ring_of_receives_is_a_deadlock():
    calls = [
        call(rank, "recv", (rank - 1) % 3, (rank + 1, rank + 1, 0), group=(0, 1, 2), channel=rank) for rank in range(3)
    ]
    diagram = read_diagram(calls)
    assert diagram.waits_for == {0: (2,), 1: (0,), 2: (1,)}
    assert cycle_of(diagram.waits_for) == (0, 2, 1)
    figure = draw_message_diagram(calls)
    assert figure.texts[0].get_text() == "Deadlock: rank 0 waits for 2, 2 waits for 1, 1 waits for 0"
    words = [text.get_text().strip() for text in figure.axes[0].texts]
    assert words == ["recv: waits for rank 2", "recv: waits for rank 0", "recv: waits for rank 1"]
    assert not arrows(figure)


def test_a_collective_that_one_rank_does_not_join():
    calls = [call(rank, "all_reduce", -1, (rank + 1, rank + 1, 0), group=(0, 1, 2), channel=5) for rank in (0, 2)]
    diagram = read_diagram(calls)
    assert diagram.ranks == (0, 1, 2)
    assert diagram.waits_for == {0: (1,), 2: (1,)}
    assert describe_message_diagram(calls).splitlines()[0] == "Rank 0 waits for rank 1, forever (and 1 more wait)."


def test_a_receive_from_anyone_takes_the_first_message_or_waits_for_all_others():
    three = {"group": (0, 1, 2)}
    taken = [call(0, "send", 2, (1, 1, 3), channel=5, **three), call(2, "recv", -1, (2, 2, 4), channel=6, **three)]
    assert read_diagram(taken).pairs == ((0, 1),)
    stuck = [*taken, call(2, "recv", -1, (5, 5, 0), channel=6, **three)]
    assert read_diagram(stuck).waits_for == {2: (0, 1)}
    assert describe_message_diagram(stuck).startswith("Rank 2 waits for ranks 0 and 1, forever.")
    assert len(arrows(draw_message_diagram(stuck))) == 1


def test_a_message_that_nobody_takes_is_marked():
    calls = [call(0, "send", 1, (0, 1, 2)), call(1, "send", 0, (1, 1, 0), channel=9)]
    text = describe_message_diagram(calls)
    assert "rank 0 -> rank 1: 8 B (not received)" in text
    assert "rank 1 waits for rank 0" in text
    crosses = [a for a in draw_message_diagram(calls).axes[0].collections if len(a.get_offsets()) == 1]
    assert len(crosses) == 4  # a dot and a cross for each send


def test_of_too_many_calls_the_first_are_kept_and_the_last_of_a_hang():
    calls = [call(0, "send", 1, (n, n, n + 1), channel=n) for n in range(0, 500, 2)]
    first = read_diagram(calls)
    assert (first.num_left_out, len(first.events)) == (10, 240)
    assert [event.start_x for event in first.events[:2]] == [0, 2]
    stuck = [*calls, call(1, "recv", 0, (999, 999, 0), channel=1)]
    assert read_diagram(stuck).waits_for == {1: (0,)}
    assert "11 calls are left out" in describe_message_diagram(stuck)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no call"):
        draw_message_diagram([])


def test_a_real_run_is_drawn_from_its_records(ranks):
    def shift():
        import torch
        import torch.distributed as dist

        rank, size = dist.get_rank(), dist.get_world_size()
        out, into = torch.zeros(1000), torch.zeros(1000)
        work = dist.isend(out, (rank + 1) % size)
        dist.recv(into, (rank - 1) % size)
        work.wait()
        dist.all_reduce(into)

    three = ranks(3)
    three.run(shift)
    text = describe_message_diagram(three.records()).splitlines()
    assert text[0] == "3 messages of 12 kB together and 1 collective between 3 ranks."
    assert sorted(text[1:4]) == [f"rank {rank} -> rank {(rank + 1) % 3}: 4 kB" for rank in range(3)]
    assert text[4] == "all_reduce of ranks 0, 1 and 2: 4 kB"
    figure = draw_message_diagram(three.records())
    assert len(arrows(figure)) == 3
    assert to_png(figure).startswith(b"\x89PNG")


def test_a_real_hang_is_drawn_from_its_records():
    def hang():
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.zeros(3), 1)
        else:
            dist.recv(torch.zeros(3), 0)
        dist.recv(torch.zeros(3), 1 - rank)

    with Ranks(2, timeout_s=30) as two:
        with pytest.raises(RankError, match="deadlock"):
            two.run(hang)
        records = two.records()
    assert describe_message_diagram(records).splitlines() == [
        "Deadlock: rank 0 waits for 1, 1 waits for 0.",
        "rank 0 -> rank 1: 12 B",
        "rank 0 waits for rank 1",
        "rank 1 waits for rank 0",
    ]
    assert to_png(draw_message_diagram(records)).startswith(b"\x89PNG")
