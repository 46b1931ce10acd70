"""The picture of shards puts every number at its owner."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from pen_facts import clashes, words

from simulator.viz import cut_weights, describe_shards, shards_figure
from simulator.viz.drawing.style import RANK_COLOURS
from simulator.viz.tensor_parallel.shard_parts import shards_of

H = 4


def split(dim, *sections):
    return SimpleNamespace(dim=dim, sections=sections)


SPLITS = {
    "token_embedding.weight": split(0, 11),
    "blocks.0.attention.query_key_value.weight": split(0, H, H, H),
    "blocks.0.attention.query_key_value.bias": split(0, H, H, H),
    "blocks.0.attention.output.weight": split(1, H),
    "blocks.0.feed_forward.widen.weight": split(0, 4 * H),
    "blocks.0.feed_forward.output.weight": split(1, 4 * H),
    "blocks.1.feed_forward.output.weight": split(1, 4 * H),
}


def weights():
    generator = np.random.default_rng(1)
    shapes_of = {
        "token_embedding.weight": (11, H),
        "blocks.0.norm.weight": (H,),
        "blocks.0.attention.query_key_value.weight": (3 * H, H),
        "blocks.0.attention.query_key_value.bias": (3 * H,),
        "blocks.0.attention.output.weight": (H, H),
        "blocks.0.attention.output.bias": (H,),
        "blocks.0.feed_forward.widen.weight": (4 * H, H),
        "blocks.0.feed_forward.output.weight": (H, 4 * H),
        "blocks.1.feed_forward.output.weight": (H, 4 * H),
    }
    return {name: generator.normal(size=shape) for name, shape in shapes_of.items()}


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
    figure = shards_figure(parts, SPLITS, num_heads=2)
    images = {image.get_gid(): np.asarray(image.get_array()) for image in figure.axes[0].images}
    assert "blocks.1.feed_forward.output.weight" not in images  # of equal blocks the first
    widen = images["blocks.0.feed_forward.widen.weight"]
    assert widen.shape == (H, 4 * H, 3)  # inputs down, outputs across
    embedding = images["token_embedding.weight"]
    assert embedding.shape == (12, H, 3)  # eleven tokens, and one of padding
    for picture, axis in ((widen, 1), (embedding[:11], 0)):
        for rank, part in enumerate(np.array_split(picture, 2, axis=axis)):
            colour = np.array(to_rgb(RANK_COLOURS[rank]))
            share = (1 - part) / (1 - colour)
            assert np.ptp(share, axis=-1).max() < 1e-9  # one colour, in shades of white


@pytest.mark.parametrize(("num_ranks", "heads"), [(2, 2), (4, 4), (4, None), (1, 1)])
def test_marks_stand_at_both_ends_of_a_region_and_words_lie_apart(num_ranks, heads):
    figure = shards_figure(cut_weights(weights(), SPLITS, num_ranks), SPLITS, num_heads=heads)
    shown = words(figure)
    assert (shown.count("f"), shown.count("g")) == (2, 3)  # the embedding has no f
    assert [shown.count(letter) for letter in "QKV"] == [1, 1, 1]
    if heads == 4:
        assert shown.count("h3") == 4  # in Q, K, V and the rows behind them
    assert clashes(figure) == []


def test_the_text_names_rows_and_columns():
    text = describe_shards(cut_weights(weights(), SPLITS, 2), SPLITS)
    assert "query_key_value.weight [12, 4], cut by outputs: rank 0 0-1 and 4-5 and 8-9; rank 1 2-3 and 6-7" in text
    assert "blocks.0.feed_forward.output.weight [4, 16], cut by inputs: rank 0 0-7; rank 1 8-15." in text
    assert "token_embedding.weight [11, 4], cut by tokens: rank 0 0-5; rank 1 6-10." in text
    assert "8 numbers of 2 weights are whole on every rank" in text
