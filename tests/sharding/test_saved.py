"""Shards cut in one way are put together in any other: every element once, and a clear word where some are missing."""

import io
import math

import pytest
import torch
from hypothesis import given, settings, strategies as some
from refused import message

from distlab.blocks.modules.named_parts import PARAMETER, SavedPart, SavedShard, check_saves, check_tensors, whole_shard
from distlab.plan import FlatLayout
from distlab.sharding.state.parts import join

SHAPES = some.lists(some.lists(some.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def numbered(shapes):
    """Tensors whose elements all differ, by name."""
    tensors, at = {}, 1
    for index, shape in enumerate(shapes):
        size = math.prod(shape)
        tensors[f"layer {index}"] = torch.arange(at, at + size, dtype=torch.float64).reshape(shape)
        at += size
    return tensors


def cut(tensors, cuts, num_shards, *, step=3.0, multiple_of=1):
    """Save tensors as `num_shards` ranks would that wrap them in units beginning at `cuts`."""
    parts = [{} for _ in range(num_shards)]
    for layout in layouts(tensors, cuts, num_shards, multiple_of):
        for shard in range(num_shards):
            held = {piece.tensor: piece for piece in layout.pieces(shard)}
            for index, name in enumerate(layout.names):
                start, stop = held[index][1:3] if index in held else (0, 0)
                row = tensors[name].flatten()[start:stop]
                values = {PARAMETER: row.clone(), "momentum": -row}
                parts[shard][name] = SavedPart(layout.shapes[index], start, stop, values, {"step": step})
    return [SavedShard(shard, num_shards, parts[shard]) for shard in range(num_shards)]


def layouts(tensors, cuts, num_shards, multiple_of=1):
    names = list(tensors)
    edges = sorted({0, len(names), *(cut % len(names) for cut in cuts)})
    return [
        FlatLayout(tuple(names[a:b]), tuple(tuple(tensors[n].shape) for n in names[a:b]), num_shards, multiple_of)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]


def parts_of(saved, name):
    return [one.parts[name] for one in saved]


def pieces_of(saved, layout, shard):
    """Return what a rank puts together of its tensors."""
    names = [(layout.names[tensor], start, stop) for tensor, start, stop, _ in layout.pieces(shard)]
    return [(name, join(name, parts_of(saved, name), start, stop)) for name, start, stop in names]


def put_together(saved, tensors, cuts, num_shards, multiple_of=1):
    """Assemble every shard of the new layouts, and the tensors from those."""
    rows = {key: {name: [torch.zeros(0)] for name in tensors} for key in (PARAMETER, "momentum")}
    for layout in layouts(tensors, cuts, num_shards, multiple_of):
        for name, part in (one for shard in range(num_shards) for one in pieces_of(saved, layout, shard)):
            assert part.numbers == {"step": 3.0}
            for key, values in part.values.items():
                rows[key][name].append(values)
    return {key: {n: torch.cat(row).view(tensors[n].shape) for n, row in its.items()} for key, its in rows.items()}


@settings(max_examples=150, deadline=None)
@given(
    SHAPES,
    some.tuples(some.integers(1, 9), some.integers(1, 9)),
    some.tuples(some.lists(some.integers(0, 5), max_size=3), some.lists(some.integers(0, 5), max_size=3)),
    some.integers(1, 8),
    some.randoms(),
)
def test_any_shards_become_any_other_shards(shapes, sizes, cuts, multiple_of, chance):
    tensors = numbered(shapes)
    saved = cut(tensors, cuts[0], sizes[0])
    chance.shuffle(saved)  # files come in any order
    check_saves(saved)
    expected = {name: (tuple(tensor.shape), torch.float64) for name, tensor in tensors.items()}
    check_tensors({name: parts_of(saved, name) for name in tensors}, expected)
    found = put_together(saved, tensors, cuts[1], sizes[1], multiple_of)
    for name, tensor in tensors.items():
        assert torch.equal(found[PARAMETER][name], tensor)
        assert torch.equal(found["momentum"][name], -tensor)


@settings(max_examples=100, deadline=None)
@given(
    some.lists(some.tuples(some.integers(0, 20), some.integers(0, 20)), max_size=6, min_size=1), some.integers(0, 20)
)
def test_parts_that_lie_in_any_way_are_joined_or_what_is_missing_is_counted(held, stop):
    row = torch.arange(20)
    parts = [SavedPart((20,), low, max(low, high), {PARAMETER: row[low : max(low, high)]}, {}) for low, high in held]
    missing = {*range(stop)} - {element for low, high in held for element in range(low, high)}
    if not missing:
        assert torch.equal(join("weight", parts, 0, stop).values[PARAMETER], row[:stop])
    else:
        with pytest.raises(ValueError, match=f"^{len(missing)} elements of weight were not given"):
            join("weight", parts, 0, stop)


TENSORS = numbered([(5, 3), (7,), (2, 2)])
EXPECTED = {name: (tuple(t.shape), torch.float64) for name, t in TENSORS.items()}


def test_a_saved_shard_loads_without_running_code():
    for one in cut(TENSORS, [1], 3):
        file = io.BytesIO()
        torch.save(one.to_dict(), file)
        file.seek(0)
        assert str(SavedShard.from_dict(torch.load(file, weights_only=True)).to_dict()) == str(one.to_dict())


def test_what_one_part_holds_is_a_view_only_where_it_may_be():
    (saved,) = cut(TENSORS, [], 1)
    part = saved.parts["layer 1"]
    joined = join("layer 1", [part], 2, 5, share={PARAMETER})
    part.values[PARAMETER].zero_()
    part.values["momentum"].zero_()
    assert not joined.values[PARAMETER].any()
    assert torch.equal(joined.values["momentum"], -TENSORS["layer 1"][2:5])


def without_start():
    state = cut(TENSORS, [], 1)[0].to_dict()
    del state["parts"]["layer 0"]["start"]
    return state


def fits(**expected):
    check_tensors({name: parts_of(cut(TENSORS, [], 2), name) for name in TENSORS}, EXPECTED | expected)


FOUR = cut(TENSORS, [], 4)
REFUSED = [
    ("shard 0 of 2 and shard 1 of 3 are from", lambda: check_saves([cut(TENSORS, [], 2)[0], cut(TENSORS, [], 3)[1]])),
    ("no saved shard was given", lambda: check_saves([])),
    ("more is in the model and not in the saved state", lambda: fits(more=((1,), torch.float64))),
    ("is in the saved state and not in the model", lambda: check_tensors({"layer 0": []}, {})),
    ("layer 1 is [8] in the model and [7] in the saved", lambda: fits(**{"layer 1": ((8,), torch.float64)})),
    ("layer 2 is bfloat16 in the model and float64", lambda: fits(**{"layer 2": ((2, 2), torch.bfloat16)})),
    ("not a saved shard", lambda: SavedShard.from_dict({"weight": torch.zeros(2)})),
    (
        "not a saved shard (format 'distlab shards', version 1)",
        lambda: SavedShard.from_dict({**FOUR[0].to_dict(), "version": 2}),
    ),
    ("lacks a field", lambda: SavedShard.from_dict(without_start())),
]


def test_shards_that_do_not_fit_are_refused_in_words():
    for words, call in REFUSED:
        text = message(call)
        assert text.startswith("ValueError: "), text
        assert words in text, (words, text)


def test_moments_are_told_from_counts_also_of_a_tensor_without_dimensions():
    shapes = {"scale": (), "weight": (2, 3), "late": (2,)}
    scalar, matrix = torch.ones(()), torch.ones(2, 3)
    counts = {"step": scalar, "mu_product": scalar}
    state = {"scale": {"exp_avg": scalar, **counts}, "weight": {"exp_avg": matrix, **counts}}
    parts = whole_shard(state, None, shapes).parts
    assert [[*part.values] for part in parts.values()] == [["exp_avg"], ["exp_avg"], []]
    assert [[*part.numbers] for part in parts.values()] == [["step", "mu_product"]] * 2 + [[]]
    state["late"] = {"exp_avg": matrix}
    with pytest.raises(ValueError, match=r"exp_avg of late is \[2, 3\] in the saved state and \[2\] here"):
        whole_shard(state, None, shapes)
