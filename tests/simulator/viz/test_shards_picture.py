"""The picture of shards puts every number at its owner."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from viz_traces import SPLITS, weights

from simulator.viz import cut_weights, draw_shards
from simulator.viz.drawing.style import RANK_COLOURS
from simulator.viz.tensor_parallel.shard_parts import shards_of


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
