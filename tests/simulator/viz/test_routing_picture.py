"""Ring attention counts every visible pair once; experts drop what the real router drops: lines, waits and words."""

import numpy as np
import pytest

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
