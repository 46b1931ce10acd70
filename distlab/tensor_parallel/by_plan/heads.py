"""The heads of a model's attention: how wide one is, how many each layer makes, and how many are left on a rank.

A module that views its queries by a number of heads keeps that number as an attribute. After the cut there are fewer,
so the attribute becomes this rank's number. A module whose forward uses a constant cannot be made to; it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from distlab.tensor_parallel.by_plan.plan import COUNTS_HEADS, parent_of
from distlab.tensor_parallel.linear import linear_sizes

HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
SHARED = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
SIZES = ("head_dim", "head_size", "attention_head_size")
WIDTHS = ("split_size", "n_embd", "embed_dim", "attn_dim", "all_head_size", "inner_dim")


class Heads(NamedTuple):
    """The heads of a model.

    Attributes:
        sections: of each layer that makes heads, the lengths along its output that are cut apart.
        local: of each module that holds such layers, its attributes that count heads or their features, with the
            numbers of one rank.
    """

    sections: dict[str, tuple[int, ...]]
    local: dict[str, dict[str, int]]


def find_heads(model: nn.Module, styles: Mapping[str, str], num_ranks: int) -> Heads:
    """Return the heads of the layers of style "heads", "fused" or "interleaved", before the cut.

    Args:
        model: whole.
        styles: of its modules, by name.
        num_ranks: that share the heads.

    Raises:
        ValueError: the size of a head cannot be found, or the ranks do not divide the heads.
    """
    found = Heads({}, {})
    names = [name for name, style in styles.items() if style in COUNTS_HEADS]
    for parent in dict.fromkeys(map(parent_of, names)):
        layers = {name: styles[name] for name in names if parent_of(name) == parent}
        _add_module(found, model, parent, layers, num_ranks)
    return found


def _add_module(found: Heads, model: nn.Module, parent: str, layers: Mapping[str, str], num_ranks: int) -> None:
    """Add the heads of one attention module, whose layers are given with their styles."""
    attributes = vars(model.get_submodule(parent)).items()
    numbers = {name: value for name, value in attributes if type(value) is int and value > 0}
    heads, shared, size = (next((numbers[one] for one in kind if one in numbers), 0) for kind in (HEADS, SHARED, SIZES))
    if not heads and not size:
        raise ValueError(
            f"{parent} holds the layers of heads {', '.join(layers)}, but no attribute with their number or size "
            f"({', '.join((*HEADS, *SIZES))}); give it one that its forward uses"
        )
    is_fused = not {*layers.values()}.isdisjoint(("fused", "interleaved"))
    outputs = {name: linear_sizes(model.get_submodule(name))[1] for name in layers}
    each = size or max(max(outputs.values()) // (heads + 2 * (shared or heads) if is_fused else heads), 1)
    width = 0
    for name, features in outputs.items():
        counts = [features // each]
        if is_fused:
            both = shared or ((counts[0] - heads) // 2 if heads and size else counts[0] // 3)
            counts = [heads or counts[0] - 2 * both, both, both]
        _check(name, features, counts, each, num_ranks)
        width = max(width, counts[0] * each)
        if layers[name] == "interleaved":  # queries with the key and value that they share lie side by side: one piece
            counts = [sum(counts)]
        found.sections[name] = tuple(count * each for count in counts)
    local = {one for one in numbers if one in (*HEADS, *SHARED) or (one in WIDTHS and numbers[one] == width)}
    found.local[parent] = {one: numbers[one] // num_ranks for one in local}


def _check(name: str, features: int, counts: Sequence[int], each: int, num_ranks: int) -> None:
    """Refuse features that are not those of the heads, and heads that the ranks do not divide."""
    if min(counts) < 1 or sum(counts) * each != features:
        raise ValueError(
            f"{name} has {features} output features, which are not {list(counts)} heads of {each}; check the module's "
            "numbers of heads, and the style: 'fused' or 'interleaved' for query, key and value in one layer, else "
            "'heads'"
        )
    uneven = [count for count in counts if count % num_ranks]
    if uneven:
        raise ValueError(
            f"{name} makes {uneven[0]} heads of {each} features, which {num_ranks} ranks do not divide; use a number "
            f"of ranks that divides {uneven[0]}, or leave this attention whole: take all its layers out of the plan"
        )
