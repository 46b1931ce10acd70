"""Whose is what: chunks of a sequence, choices of experts and slices of weights are those of the real runner."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from viz_traces import SPLITS, weights

from simulator.viz import cut_weights, draw_shards
from simulator.viz.context_parallel import ring_work
from simulator.viz.drawing.theme import RANK_COLOURS
from simulator.viz.expert_parallel import routes_of
from simulator.viz.tensor_parallel import shards_of


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


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parts_go_back_to_where_they_came_from(num_ranks):
    whole, parts = weights(), cut_weights(weights(), SPLITS, num_ranks)
    found = shards_of(parts, SPLITS)
    for name, one in found.items():
        assert one.shape == whole[name].shape
        if one.dim is None:
            assert (one.values == whole[name]).all()
            continue
        inside = np.take(one.values, np.flatnonzero(one.owner >= 0), axis=one.dim)
        assert (inside == whole[name]).all()
        for rank in range(num_ranks):
            own = np.concatenate([np.arange(low, high) for low, high in one.slices(rank)])
            held = np.take(whole[name], own, axis=one.dim)
            owned = np.take(one.values, np.flatnonzero(one.owner == rank), axis=one.dim)
            assert (owned == held).all()
    held = sum(one.held for one in found.values())
    assert all(held == sum(np.size(value) for value in part.values()) for part in parts)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_are_those_of_the_runner(num_ranks):
    torch = pytest.importorskip("torch")
    from distlab.tensor_parallel import Split

    sections = (3 * num_ranks, num_ranks, num_ranks)
    for dim, sizes in ((0, sections), (1, sections), (0, (7,))):
        full = torch.randn(*((sum(sizes), 2) if dim == 0 else (2, sum(sizes))), dtype=torch.float64, requires_grad=True)
        real = Split(dim, sizes, padded=True)
        parts = cut_weights({"w": full}, {"w": real}, num_ranks)
        for rank in range(num_ranks):
            assert (parts[rank]["w"] == real.cut(full.detach(), num_ranks, rank).numpy()).all()


def test_every_place_of_the_image_has_its_owners_colour():
    parts = cut_weights(weights(), SPLITS, 2)
    figure = draw_shards(parts, SPLITS, num_heads=2).figure
    images = {image.get_gid(): np.asarray(image.get_array()) for image in figure.axes[0].images}
    assert "blocks.1.feed_forward.output.weight" not in images  # of equal blocks the first
    widen = images["blocks.0.feed_forward.widen.weight"]
    assert widen.shape == (4, 4 * 4, 3)  # inputs down, outputs across
    embedding = images["token_embedding.weight"]
    assert embedding.shape == (12, 4, 3)  # eleven tokens, and one of padding
    for picture, axis in ((widen, 1), (embedding[:11], 0)):
        for rank, part in enumerate(np.array_split(picture, 2, axis=axis)):
            colour = np.array(to_rgb(RANK_COLOURS[rank]))
            share = (1 - part) / (1 - colour)
            assert np.ptp(share, axis=-1).max() < 1e-9  # one colour, in shades of white
