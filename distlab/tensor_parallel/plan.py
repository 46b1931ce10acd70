"""A plan: which layers of a model are cut, and how. What it names is looked up, and what cannot be is refused.

A pattern is a module's name, in which each part between dots may hold * or ? (as in file names); a * stands for
one part at most. The first styles are those of layers:

| style        | for                 | the layer's input      | its output                                  |
|--------------|---------------------|------------------------|---------------------------------------------|
| `column`     | a linear layer      | whole                  | the own features                            |
| `row`        | a linear layer      | the own features       | whole: a sum over the ranks                 |
| `heads`      | query, key or value | whole                  | the own heads                               |
| `fused`      | all three in one    | whole                  | the own heads of queries, keys and values   |
| `vocabulary` | embedding, scores   | whole                  | whole                                       |

Two are for modules with no cut layer in their place. `narrow`: an attention module whose forward takes the width of
its heads from the shape of its input. `inside`: a module with parameters that works on the own features, heads or
positions, such as the norm of each head; its gradients are summed over the ranks. Of a module that holds cut layers
this means its own parameters alone, such as a temperature of its attention; name the modules in it apart.

A module that views its queries by a number of heads keeps that number as an attribute. After the cut there are fewer,
so the attribute becomes this rank's number. A module whose forward uses a constant cannot be made to; it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from distlab.blocks.modules.blocks import matches
from distlab.tensor_parallel.linear import is_conv1d, linear_sizes

COUNTS_HEADS = ("heads", "fused")
BEGINS = ("column", *COUNTS_HEADS)  # a region that a row layer ends
LAYERS = (*BEGINS, "row", "vocabulary")
STYLES = (*LAYERS, "narrow", "inside")
# The attributes of attention modules: their heads, those of keys and values, the size of a head, and of all together.
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
SHARED = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
SIZES = ("head_dim", "head_size", "attention_head_size")
WIDTHS = ("split_size", "n_embd", "embed_dim", "attn_dim", "all_head_size", "inner_dim")
HINTS = {  # what may be wrong where the cut model computes something else, by the style of the region's first layers
    "column": "'column' keeps neighbouring features together. If the model computes with all of them at once (a gate "
    "by chunk(2), a softmax or a norm of features), leave both layers out.",
    "heads": "'heads' needs a forward that counts heads by an attribute (num_heads), not by a constant, and "
    "that computes with each head alone; else leave this attention's layers out.",
    "fused": "'fused' expects all queries, then all keys, then all values, of as many heads. If query, key and value "
    "lie side by side for each head (GPT-NeoX, BLOOM), or share keys, leave this attention's layers out.",
}

PLANS: dict[str, dict[str, str]] = {
    "Llama": {
        "model.embed_tokens": "vocabulary",
        "model.layers.*.self_attn.[qkv]_proj": "heads",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_proj": "column",
        "model.layers.*.mlp.up_proj": "column",
        "model.layers.*.mlp.down_proj": "row",
        "lm_head": "vocabulary",
    },
    "GPT-2": {
        "transformer.wte": "vocabulary",
        "transformer.h.*.attn.c_attn": "fused",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "lm_head": "vocabulary",
    },
    "ViT": {
        "blocks.*.attn.qkv": "fused",
        "blocks.*.attn.proj": "row",
        "blocks.*.mlp.fc1": "column",
        "blocks.*.mlp.fc2": "row",
    },
}
PLANS["nanoGPT"] = PLANS["GPT-2"] | {"transformer.h.*.attn": "narrow"}
OWN = [PLANS[name] for name in ("Llama", "GPT-2", "nanoGPT")]  # compared with the whole models, whose names they are


def find_styles(model: nn.Module, plan: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """Return the style of each module that the plan names.

    Raises:
        ValueError: an unknown style; a pattern that matches nothing, or a module with a style already; a module that
            its style cannot cut, or whose features the ranks do not divide.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"{pattern!r} has style {style!r}; pass one of {', '.join(STYLES)}")
        matched = [name for name in modules if matches(name, pattern)]
        if not matched:
            last = pattern.rpartition(".")[2]
            near = [name for name in modules if fnmatchcase(name.rpartition(".")[2], last)] or [*modules, "no module"]
            raise ValueError(
                f"pattern {pattern!r} matches no module; a * stands for one part between dots. The model has for "
                f"example {near[0]!r}"
            )
        for name in matched:
            if found.setdefault(name, style) != style:
                raise ValueError(f"{name} has style {found[name]!r}, and {pattern!r} gives it {style!r}; give it one")
            if style in LAYERS:
                _check_layer(name, modules[name], style, num_ranks)
    return found


def _check_layer(name: str, module: nn.Module, style: str, num_ranks: int) -> None:
    is_linear = is_conv1d(module) or type(module).forward is nn.Linear.forward
    if not is_linear and not (style == "vocabulary" and type(module).forward is nn.Embedding.forward):
        raise ValueError(
            f"{name} is a {type(module).__name__}; style {style!r} cuts "
            f"{'an nn.Embedding, ' if style == 'vocabulary' else ''}an nn.Linear or a Conv1D. Leave it out of the "
            "plan (it stays whole), or write it with such layers"
        )
    is_changed = hasattr(module, "parametrizations") or "forward" in vars(module)
    if module._forward_hooks or module._forward_pre_hooks or is_changed:
        raise ValueError(
            f"{name} has hooks, parametrizations (weight_norm, spectral_norm) or a forward of its own, which a cut "
            "layer would lose; remove them, or leave it out of the plan"
        )
    size = linear_sizes(module)[style != "row"]
    if style in ("column", "row") and size % num_ranks:
        raise ValueError(
            f"{name} ({style}) has {size} {'input' if style == 'row' else 'output'} features, which {num_ranks} ranks "
            f"do not divide; use a number of ranks that divides {size}, or leave it and its partners out of the plan"
        )


def columns_of(row: str, styles: Mapping[str, str]) -> list[str]:
    """Return the layers that begin the region which a row layer ends: in its module, or in the one around that."""
    columns = [name for name, style in styles.items() if style in BEGINS]
    places = (parent_of(row), parent_of(parent_of(row)))
    near = ([name for name in columns if not place or name.startswith(place + ".")] for place in places)
    return next(filter(None, near), columns)


def check_ties(model: nn.Module, styles: Mapping[str, str]) -> list[list[str]]:
    """Return the names of each cut tensor that has several; a ValueError names one that is cut under one name only."""
    names: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = []
    for group in names.values():
        cut = [styles.get(parent_of(name), "whole") for name in group]
        if len(group) == 1 or {*cut}.isdisjoint(LAYERS):
            continue
        if set(cut) != {"vocabulary"}:
            what = " and ".join(f"{name} ({style})" for name, style in zip(group, cut, strict=True))
            raise ValueError(
                f"{what} are one tensor and must be cut as one. Give an embedding and the scores tied "
                "to it both the style 'vocabulary'; leave a layer that stands under two names whole"
            )
        tied.append(group)
    return tied


def find_inside(model: nn.Module, styles: Mapping[str, str]) -> list[nn.Parameter]:
    """Return the parameters whose gradients are summed, each once; of a module that holds cut layers its own alone."""
    found: dict[nn.Parameter, None] = {}
    for name in [name for name, style in styles.items() if style == "inside"]:
        holds = any(other.startswith(f"{name}.") for other, style in styles.items() if style in LAYERS)
        found |= dict.fromkeys(model.get_submodule(name).parameters(recurse=not holds))
    return list(found)


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
    """Return the heads of the layers of style "heads" or "fused", before the cut.

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
    attributes = vars(model.get_submodule(parent)).items()
    numbers = {name: value for name, value in attributes if type(value) is int and value > 0}
    heads, size = (next((numbers[one] for one in kind if one in numbers), 0) for kind in (HEADS, SIZES))
    if not heads and not size:
        raise ValueError(
            f"{parent} holds the layers of heads {', '.join(layers)}, but no attribute with their number or size "
            f"({', '.join((*HEADS, *SIZES))}); give it one that its forward uses"
        )
    features = {name: linear_sizes(model.get_submodule(name))[1] for name in layers}
    num_parts = {name: 3 if style == "fused" else 1 for name, style in layers.items()}
    queries = max(features[name] // num_parts[name] for name in layers)
    each = size or max(queries // heads, 1)
    for name, parts in num_parts.items():
        count = heads if heads and parts == 3 else features[name] // (parts * each)
        if not count or parts * count * each != features[name]:
            raise ValueError(
                f"{name} has {features[name]} output features, which are not {[count] * parts} heads of {each}; check "
                "the module's numbers of heads, and the style: 'fused' for query, key and value in one layer, else "
                "'heads'"
            )
        if count % num_ranks:
            raise ValueError(
                f"{name} makes {count} heads of {each} features, which {num_ranks} ranks do not divide; use a number "
                f"of ranks that divides {count}, or leave this attention whole: take all its layers out of the plan"
            )
        found.sections[name] = (count * each,) * parts
    local = {one for one in numbers if one in (*HEADS, *SHARED) or (one in WIDTHS and numbers[one] == queries)}
    found.local[parent] = {one: numbers[one] // num_ranks for one in local}


def parent_of(name: str) -> str:
    """Return the name of the module that holds a module or a parameter."""
    return name.rpartition(".")[0]
