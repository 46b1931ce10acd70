"""A plan: which layers of a model are cut, and how. What it names is looked up, and what cannot be is refused.

A pattern is a module's name, in which each part between dots may hold * or ? (as in file names); a * stands for
one part at most. The first styles are those of layers:

| style        | for                 | the layer's input      | its output                                  |
|--------------|---------------------|------------------------|---------------------------------------------|
| `column`     | a linear layer      | whole                  | the own features                            |
| `row`        | a linear layer      | the own features       | whole: a sum over the ranks                 |
| `heads`      | query, key or value | whole                  | the own heads                               |
| `fused`      | all three in one    | whole                  | the own heads of queries, keys and values   |
| `interleaved` | the same, per head | whole                  | the own heads, query, key and value of each |
| `paired`     | a linear layer      | whole                  | the own features of each half               |
| `vocabulary` | embedding, scores   | whole                  | whole                                       |

Three are for modules with no cut layer in their place. `narrow`: an attention module whose forward takes the width of
its heads from the shape of its input. `inside`: a module with parameters that works on the own features, heads or
positions, such as the norm of each head; its gradients are summed over the ranks. `sequence`: the list of blocks, and
the norms in them; between their cut layers each rank then works on its own positions: see `sequence.py`.

    PLANS["Llama"] | SEQUENCE["Llama"]       # all of it
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from distlab.modules.blocks import matches
from distlab.tensor_parallel.linear import is_conv1d, linear_sizes

COUNTS_HEADS = ("heads", "fused", "interleaved")
BEGINS = ("column", "paired", *COUNTS_HEADS)  # a region that a row layer ends
LAYERS = (*BEGINS, "row", "vocabulary")
STYLES = (*LAYERS, "narrow", "inside", "sequence")
_ALL = "If the model computes with all of them at once (a softmax or a norm of features), leave both layers out."
HINTS = {  # what may be wrong where the cut model computes something else, by the style of the region's first layers
    "column": "'column' keeps neighbouring features together. If the model takes one half for a gate (chunk(2), GLU), "
    f"the style is 'paired'. {_ALL}",
    "paired": f"'paired' cuts each half of the features. If they are one piece, the style is 'column'. {_ALL}",
    "heads": "'heads' needs a forward that counts heads by an attribute (num_heads), not by a constant, and "
    "that computes with each head alone; else leave this attention's layers out.",
    "fused": "'fused' expects all queries, then all keys, then all values. If query, key and value lie side by side "
    "for each head (GPT-NeoX, BLOOM), the style is 'interleaved'; else leave this attention's layers out.",
    "interleaved": "'interleaved' expects query, key and value side by side for each head. If all queries come first, "
    "then keys, then values, the style is 'fused'; else leave this attention's layers out.",
    "sequence": "'sequence' needs blocks that norm before attention and feed-forward: all these norms in the plan, a "
    "row layer at the end of both, and nothing between that looks at other positions or reshapes them.",
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

SEQUENCE: dict[str, dict[str, str]] = {  # what may be added to the plans
    "Llama": {"model.layers": "sequence", "model.layers.*.*_layernorm": "sequence"},
    "GPT-2": {"transformer.h": "sequence", "transformer.h.*.ln_[12]": "sequence"},
    "ViT": {"blocks": "sequence", "blocks.*.norm[12]": "sequence"},
}
SEQUENCE["nanoGPT"] = SEQUENCE["GPT-2"]
OWN = ("Llama", "GPT-2", "nanoGPT")  # a vision model's names are those of many others


def is_own(plan: Mapping[str, str]) -> bool:
    """Return whether a plan is this package's own of GPT or Llama, which were compared with the whole models."""
    return any(plan in (PLANS[name], PLANS[name] | SEQUENCE[name]) for name in OWN)


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
    """Refuse a layer of a kind that its style cannot cut, and features that the ranks do not divide."""
    is_linear = is_conv1d(module) or type(module).forward is nn.Linear.forward
    if not is_linear and not (style == "vocabulary" and type(module).forward is nn.Embedding.forward):
        raise ValueError(
            f"{name} is a {type(module).__name__}; style {style!r} cuts "
            f"{'an nn.Embedding, ' if style == 'vocabulary' else ''}an nn.Linear or a Conv1D. Leave it out of the "
            "plan (it stays whole), or write it with such layers"
        )
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        raise ValueError(
            f"{name} has hooks or parametrizations (weight_norm, spectral_norm), which a cut layer would lose; "
            "remove them, or leave it out of the plan"
        )
    if style in ("column", "row", "paired"):
        size, pieces = linear_sizes(module)[style != "row"], 2 if style == "paired" else 1
        if size % (pieces * num_ranks):
            raise ValueError(
                f"{name} ({style}) has {size} {'input' if style == 'row' else 'output'} features, which {num_ranks} "
                f"ranks do not divide{' in two halves' if pieces == 2 else ''}; use a number of ranks that divides "
                f"{size // pieces}, or leave it and its partners out of the plan"
            )


def columns_of(row: str, styles: Mapping[str, str]) -> list[str]:
    """Return the layers that begin the region which a row layer ends: in its module, or in the one around that."""
    columns = [name for name, style in styles.items() if style in BEGINS]
    places = (parent_of(row), parent_of(parent_of(row)))
    near = ([name for name in columns if not place or name.startswith(place + ".")] for place in places)
    return next(filter(None, near), columns)


def check_ties(model: nn.Module, styles: Mapping[str, str]) -> list[list[str]]:
    """Return the names of each cut tensor that has several; refuse one that would be cut under one name only.

    Raises:
        ValueError: naming both.
    """
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


def parent_of(name: str) -> str:
    """Return the name of the module that holds a module or a parameter."""
    return name.rpartition(".")[0]
