"""The picture of ring attention counts every visible pair once, and knows who waits for whom."""

import numpy as np
import pytest
from pen_facts import clashes, words

from simulator.viz import context_figure, describe_context
from simulator.viz.context_parallel.context import ring_work


@pytest.mark.parametrize("order", ["zigzag", "straight"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_pair_is_computed_once_by_the_rank_that_has_its_query(num_ranks, order):
    ring = ring_work(num_ranks, order)
    owner = np.repeat(ring.owner, ring.length // (2 * num_ranks))
    seen = np.eye(num_ranks, dtype=int)[owner].cumsum(axis=0)  # keys of each rank that each query may attend to
    expected = np.zeros((num_ranks, num_ranks), int)
    for rank in range(num_ranks):
        for other in range(num_ranks):
            expected[rank, (rank - other) % num_ranks] = seen[owner == rank, other].sum()
    assert (ring.work == expected).all()
    assert np.bincount(ring.owner).tolist() == [2] * num_ranks


def test_zigzag_is_even_at_every_hop_and_straight_nearly_doubles_the_time():
    for num_ranks in (2, 3, 8):
        work = ring_work(num_ranks).work
        assert (work == work[0]).all()
        assert ring_work(num_ranks).slowdown == 1.0
    assert ring_work(4, "straight").slowdown == pytest.approx(1.75, abs=0.001)  # 2 + 3 x 4 of 32 half blocks, times 4
    assert ring_work(8, "straight").ring_pairs > ring_work(8).ring_pairs


def test_the_zigzag_is_the_runners_placement():
    placement = pytest.importorskip("distlab.context_parallel.placement", reason="needs torch")
    for num_ranks in (2, 4):
        owner = np.repeat(ring_work(num_ranks).owner, 3)
        for rank in range(num_ranks):
            held = placement.zigzag_positions(6 * num_ranks, num_ranks, rank).tolist()
            assert np.flatnonzero(owner == rank).tolist() == held


def test_a_rank_merges_what_has_reached_it():
    ring = ring_work(4)
    assert [ring.merged(1, hop) for hop in range(4)] == [[1], [0, 1], [0, 1, 3], [0, 1, 2, 3]]
    assert ring_work(4, "straight").merged(1, 3) == [0, 1]  # later ranks' keys are masked


@pytest.mark.parametrize(("num_ranks", "order"), [(1, "zigzag"), (4, "straight"), (8, "zigzag"), (5, "straight")])
def test_the_words_of_the_picture_lie_apart(num_ranks, order):
    figure, ring = context_figure(num_ranks, order), ring_work(num_ranks, order)
    assert words(figure).count("waits") == int((ring.work == 0).sum())
    assert clashes(figure) == []


def test_the_text_says_who_holds_what():
    text = describe_context(2)
    assert "Rank 0 holds positions 0-511 and 1536-2047; of all pairs it computes, hop by hop: 25.0 %, 25.0 %" in text
    assert text.startswith("Zig-zag order: every rank computes the same at every hop, and none waits.")
    assert "takes 1.75x as long as even work" in describe_context(4, "straight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 9}, "9 ranks; pass 1 to 8"),
        ({"num_ranks": 2, "order": "random"}, "order is 'random'; choose one of zigzag, straight"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    for draw in (context_figure, describe_context):
        with pytest.raises(ValueError, match=message):
            draw(**options)
