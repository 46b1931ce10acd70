"""Ring attention counts every visible pair once; experts drop what the real router drops: lines, waits and words."""

import numpy as np
import pytest
from pen_facts import clashes, shapes, words

from simulator.viz import context_figure, describe_context, describe_routing, routing_figure
from simulator.viz.context_parallel.context import ring_work
from simulator.viz.expert_parallel.routes import routes_of


def choices(num_ranks=3, tokens=7, num_experts=6, top_k=2, seed=3):
    generator = np.random.default_rng(seed)
    liked = np.linspace(1.5, 0, num_experts)
    return [
        np.argsort(-(liked + generator.gumbel(size=(tokens, num_experts))), axis=1)[:, :top_k] for _ in range(num_ranks)
    ]


@pytest.mark.parametrize(("top_k", "factor"), [(1, 1.0), (2, 1.0), (2, 0.5), (3, 1.25)])
def test_capacity_keeps_what_the_runner_keeps(top_k, factor):
    torch = pytest.importorskip("torch")
    from distlab.expert_parallel import Routing, assign, capacity_of

    asked = choices(num_ranks=2, top_k=top_k)
    capacity = capacity_of(7, 6, top_k=top_k, factor=factor)
    routes = routes_of(asked, num_experts=6, capacity=capacity)
    for rank, experts in enumerate(asked):
        routing = Routing(torch.tensor(experts), torch.ones(experts.shape), torch.ones(7, 6) / 6)
        found = assign(routing, factor)
        kept = np.zeros(experts.size, bool)
        kept[found.slots.numpy()] = True
        assert (routes.kept[rank] == kept.reshape(experts.T.shape).T).all()
        assert routes.rows[rank].tolist() == list(found.counts)
        assert len(routes.lost[rank]) == found.dropped_tokens


def test_rows_between_ranks_are_the_kept_choices():
    routes = routes_of(choices(), num_experts=6, capacity=2)
    assert routes.between.sum() + routes.dropped == 3 * 7 * 2
    assert routes.rows.max() <= 2
    assert routes.asked.sum() == 42
    assert routes.between[1, 0] == routes.rows[1, :2].sum()
    everything = routes_of(choices(), num_experts=6)
    assert everything.dropped == 0
    assert (everything.rows.sum(axis=0) == everything.asked).all()


@pytest.mark.parametrize(
    ("capacity", "num_ranks", "tokens", "top_k"),
    [(2, 3, 7, 2), (None, 3, 7, 2), (1, 6, 8, 3), (0, 1, 4, 1), (None, 1, 1, 1)],
)
def test_a_line_leads_from_every_kept_choice_and_words_lie_apart(capacity, num_ranks, tokens, top_k):
    asked = choices(num_ranks, tokens, 6, top_k)
    routes = routes_of(asked, num_experts=6, capacity=capacity)
    figure = routing_figure(asked, num_experts=6, capacity=capacity)
    assert shapes(figure, "lines") == routes.between.sum() + routes.dropped  # and a stroke through each dropped one
    assert clashes(figure) == []
    shown = words(figure)
    assert all(str(total) in shown for total in routes.between.sum(axis=0).tolist())


def test_the_text_tells_load_and_losses():
    asked = [np.array([[0], [0], [0], [1]]), np.array([[0], [0], [1], [1]])]
    text = describe_routing(asked, num_experts=2, capacity=2)
    assert text.startswith("Expert 0 is asked 5 times where 4 is even; 1 of 8 choices are dropped; rank 0 works 1.14x")
    assert "Rank 0: expert 0 asked 5 times, 4 kept; works on 4 rows, 2 of them from other ranks." in text
    assert "Rank 0: no choice of token 2 was kept." in text
    assert "3 rows go to another rank" in text


def test_what_a_run_kept_is_drawn_as_it_was():
    asked = [np.array([[0], [0]])]
    routes = routes_of(asked, num_experts=2, kept=[np.array([[False], [True]])])
    assert routes.taken(0, 0) == [1]


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
