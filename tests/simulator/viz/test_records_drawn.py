"""Rings and diagrams of messages follow what was recorded: whose parts are in a chunk, and who waits for whom."""

from types import SimpleNamespace

import numpy as np
import pytest
from viz_traces import call, ping, ring

from distlab.comm import RankError, Ranks
from simulator.viz import draw_message_diagram, draw_ring_frame
from simulator.viz.collectives.messages import cycle_of, read_diagram
from simulator.viz.collectives.ring import chunk_name, messages_of, provenance, ring_steps, step_verb


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
    assert draw_ring_frame(calls, 2).words == draw_ring_frame(trace, 2).words


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


def test_steps_of_cause_and_effect_do_not_depend_on_speed():
    slow, fast = read_diagram(ping(1000)), read_diagram(ping(1))
    assert slow.events == fast.events
    assert slow.pairs == fast.pairs == ((0, 1), (3, 2))
    for send, receive in fast.pairs:
        assert fast.events[receive].end_x > fast.events[send].start_x


def test_tags_cross():
    calls = [
        call(0, "send", 1, (0, 20, 30), channel=1, num_bytes=8),
        call(0, "send", 1, (1, 31, 32), channel=2, num_bytes=16),
        call(1, "recv", 0, (2, 2, 10), channel=2, num_bytes=16),
        call(1, "recv", 0, (11, 11, 21), channel=1, num_bytes=8),
    ]
    diagram = read_diagram(calls)
    assert diagram.pairs == ((0, 3), (1, 2))


def test_a_ring_of_receives_is_a_deadlock():
    calls = [
        call(rank, "recv", (rank - 1) % 3, (rank + 1, rank + 1, 0), group=(0, 1, 2), channel=rank) for rank in range(3)
    ]
    diagram = read_diagram(calls)
    assert diagram.waits_for == {0: (2,), 1: (0,), 2: (1,)}
    assert cycle_of(diagram.waits_for) == (0, 2, 1)


def test_a_collective_that_one_rank_does_not_join():
    calls = [call(rank, "all_reduce", -1, (rank + 1, rank + 1, 0), group=(0, 1, 2), channel=5) for rank in (0, 2)]
    diagram = read_diagram(calls)
    assert diagram.ranks == (0, 1, 2)
    assert diagram.waits_for == {0: (1,), 2: (1,)}


def test_a_receive_from_anyone_takes_the_first_message_or_waits_for_all_others():
    three = {"group": (0, 1, 2)}
    taken = [call(0, "send", 2, (1, 1, 3), channel=5, **three), call(2, "recv", -1, (2, 2, 4), channel=6, **three)]
    assert read_diagram(taken).pairs == ((0, 1),)
    stuck = [*taken, call(2, "recv", -1, (5, 5, 0), channel=6, **three)]
    assert read_diagram(stuck).waits_for == {2: (0, 1)}


def test_of_too_many_calls_the_first_are_kept_and_the_last_of_a_hang():
    calls = [call(0, "send", 1, (n, n, n + 1), channel=n) for n in range(0, 500, 2)]
    first = read_diagram(calls)
    assert (first.num_left_out, len(first.events)) == (10, 240)
    assert [event.start_x for event in first.events[:2]] == [0, 2]
    stuck = [*calls, call(1, "recv", 0, (999, 999, 0), channel=1)]
    assert read_diagram(stuck).waits_for == {1: (0,)}
    assert "11 calls are left out" in draw_message_diagram(stuck).words


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
    text = draw_message_diagram(three.records()).words.splitlines()
    assert text[0] == "3 messages of 12 kB together and 1 collective between 3 ranks."
    assert sorted(text[1:4]) == [f"rank {rank} -> rank {(rank + 1) % 3}: 4 kB" for rank in range(3)]
    assert text[4] == "all_reduce of ranks 0, 1 and 2: 4 kB"


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
    assert draw_message_diagram(records).words.splitlines() == [
        "Deadlock: rank 0 waits for 1, 1 waits for 0.",
        "rank 0 -> rank 1: 12 B",
        "rank 0 waits for rank 1",
        "rank 1 waits for rank 0",
    ]
