"""A ring's picture follows every chunk through what was recorded, and refuses what is no ring."""

from types import SimpleNamespace

import numpy as np
import pytest
from viz_traces import data_parallel, ring

from distlab.trace import Span, Trace
from simulator.viz import describe_ring_frame
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


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (data_parallel(2), "no send"),
        (Trace.from_spans([Span(0, "communication", "send #1", "send", 0, 5, 8)]), "does not name the other rank"),
        (
            Trace.from_spans([Span(0, "communication", f"send to {to} #1", "send", to, 5, 8) for to in (1, 2)]),
            "one neighbour",
        ),
        (ring(3).select(ring(3).rank != 2), "not one ring"),
        (ring(4, num_steps=5), "one call only"),
        (ring(3).select(np.arange(len(ring(3))) > 1), "different numbers"),
    ],
)
def test_what_is_no_ring_is_refused_in_words(trace, message):
    with pytest.raises(ValueError, match=message):
        ring_steps(trace)


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
