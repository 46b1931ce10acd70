"""Rings and diagrams of messages follow what was recorded: whose parts are in a chunk, and who waits for whom."""

from types import SimpleNamespace

import numpy as np
import pytest
from pen_facts import shapes, words
from viz_traces import ring

from distlab.comm import RankError, Ranks
from simulator.viz import describe_message_diagram, describe_ring_frame, draw_message_diagram, draw_ring_frame, to_png
from simulator.viz.collectives.message_record import cycle_of, read_diagram
from simulator.viz.collectives.ring_frame import provenance
from simulator.viz.collectives.ring_record import chunk_name, messages_of, ring_steps, step_verb


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_every_chunk_ends_summed_on_every_rank(num_ranks):
    steps = ring_steps(ring(num_ranks))
    assert steps.operation == "all_reduce"
    assert steps.chunk.shape == (2 * (num_ranks - 1), num_ranks)
    assert (steps.held[-1] == num_ranks).all()
    assert (steps.held[num_ranks - 1] == num_ranks).sum() == num_ranks  # one full chunk a rank after the first half
    verbs = [step_verb(steps, number) for number in range(len(steps.chunk))]
    assert verbs == ["add"] * (num_ranks - 1) + ["copy"] * (num_ranks - 1)
    assert steps.fault == ""


def test_a_rank_sends_on_what_it_received():
    steps = ring_steps(ring(4))
    assert (steps.chunk[1:] == np.roll(steps.chunk, 1, axis=1)[:-1]).all()
    assert steps.num_bytes[:, 0].tolist() == [4_000_004, 4_000_000, 4_000_000, 4_000_000, 4_000_004, 4_000_000]


def test_chunks_cut_into_pieces_make_the_same_steps():
    whole, pieces = ring_steps(ring(4, sizes=[400] * 4)), ring_steps(ring(4, sizes=[400] * 4, pieces=4))
    assert (whole.chunk == pieces.chunk).all()
    assert (whole.num_bytes == pieces.num_bytes).all()


def test_calls_of_a_recorder_and_its_trace_give_the_same_text():
    trace = ring(3)
    calls = [
        SimpleNamespace(
            rank=span.rank,
            op=span.kind,
            peer=int(span.name.split()[2]),
            num_bytes=span.num_bytes,
            start_ns=span.start_ns,
            end_ns=span.end_ns,
        )
        for span in trace
    ]
    assert messages_of(calls) == messages_of(trace)
    assert describe_ring_frame(calls, 2) == describe_ring_frame(trace, 2)


def test_a_ring_of_whole_tensors_is_named():
    text = describe_ring_frame(ring(4, whole=True))
    assert "Not a ring's chunks: rank 2 receives 4 MB in step 1 and sends 16 MB in step 2" in text


def test_half_a_ring():
    half = ring(4, num_steps=3)
    assert ring_steps(half).operation == "reduce_scatter"


def test_chunk_names_go_on_after_z():
    assert [chunk_name(index) for index in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_a_real_ring_is_followed_from_its_record(ranks):
    def add_up():
        import torch

        from distlab.collectives import ring_all_reduce

        tensor = torch.arange(10_001, dtype=torch.float32)
        ring_all_reduce(tensor, piece_bytes=8_000)  # a chunk of 13 kB goes in two pieces
        return float(tensor[1])

    three = ranks(3)
    assert three.run(add_up) == [3.0, 3.0, 3.0]
    steps = ring_steps(three.records())
    assert steps.fault == ""
    assert steps.chunk.shape == (4, 3)
    assert (steps.held[-1] == 3).all()
    assert sorted(set(steps.num_bytes.ravel().tolist())) == [13_332, 13_336]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_what_is_sent_has_one_part_more_at_each_step_until_it_is_the_sum(num_ranks):
    steps = ring_steps(ring(num_ranks))
    for number, sent in enumerate(steps.chunk):
        assert (steps.held[number][np.arange(num_ranks), sent] == min(number + 1, num_ranks)).all()
    assert provenance(steps)[-1].all()


def test_a_chunk_collects_the_ranks_it_passed():
    parts = provenance(ring_steps(ring(4)))
    assert np.flatnonzero(parts[2][2, 0]).tolist() == [0, 1, 2]  # chunk A, two steps after it left rank 0
    assert np.flatnonzero(parts[2][3, 0]).tolist() == [3]


def test_a_frame_has_an_arrow_a_rank_and_frames_what_arrived():
    start, second, last = (draw_ring_frame(ring(4), step) for step in (0, 2, 6))
    assert [shapes(figure, "arrows") for figure in (start, second, last)] == [0, 4, 4]
    assert [shapes(figure, "outlines") for figure in (start, second, last)] == [0, 4, 4]
    assert words(start).count("sum") == 0
    assert words(last).count("sum") == 16 + 4  # every chunk, and what the arrows bring
    title = "Step 2 of 6: every rank sends 4 MB, and its neighbour adds its own part"
    assert second.texts[0].get_text() == title
    assert "Sent so far: 8 MB of 24 MB per rank" in second.texts[1].get_text()
    assert "finished sums" in last.texts[0].get_text()
    assert to_png(second) != to_png(last)


def test_text_says_whose_parts_travel():
    text = describe_ring_frame(ring(3), 2)
    assert "rank 1 sends A (parts 0+1) to 2" in text
    assert "rank 1 sends B (the whole sum) to 2" in describe_ring_frame(ring(3), 4)
    assert describe_ring_frame(ring(3)).startswith("Before the first step: each of 3 ranks holds its own tensor")
    assert "Not a ring's chunks" in describe_ring_frame(ring(4, whole=True), 1)


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
