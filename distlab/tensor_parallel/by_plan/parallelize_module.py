"""A model that was not written for tensor parallelism, cut by a plan of module names and styles.

Each layer that the plan names is replaced by its part; everything else of the model stays: its classes, its forward,
its buffers, the names in its state. So its own loss and its own output work as before, on every rank:

    model = parallelize_module(LlamaForCausalLM(config), PLANS["Llama"], group)
    model(input_ids=tokens, labels=tokens).loss.backward()     # the same tokens on all ranks of the group
    clip_tensor_parallel_(model, 1.0, group)
    optimizer.step()                                           # each rank updates its parts

Symbols: t ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.p2p import group_rank
from distlab.modules.every_parameter import every_parameter
from distlab.modules.moved import mark_moved
from distlab.replicate import broadcast_each
from distlab.tensor_parallel.by_plan.guards import agree_on_inputs, watch
from distlab.tensor_parallel.by_plan.heads import AttentionHeads
from distlab.tensor_parallel.by_plan.plan import (
    COUNTS_HEADS,
    check_kinds,
    check_partners,
    check_sizes,
    check_ties,
    find_styles,
    is_own,
    shapes_of,
)
from distlab.tensor_parallel.by_plan.sequence import check_sequences, cut_sequences, sum_over_ranks
from distlab.tensor_parallel.by_plan.whole import compare
from distlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, agree_on, linear_sizes
from distlab.tensor_parallel.vocabulary import VocabularyParallelEmbedding


def parallelize_module(
    model: nn.Module,
    plan: Mapping[str, str],
    group: ProcessGroup | None = None,
    *,
    head_counts: Sequence[str] = (),
    example: Sequence[Any] | None = None,
) -> nn.Module:
    """Cut the layers that a plan names, in place; rank 0's weights and buffers count. Return the model.

    Make optimizers and wrappers afterwards. `full_state_dict` returns the uncut model's state with its names, and
    `load_full_state_dict` takes it. Layers that the plan does not name stay whole, and every rank computes them.

    Dropout: seed torch's generator the same on all ranks of the group. Ranks then drop the same of what they hold
    whole. Of their own heads and features they drop the same places, too: the mask repeats along the heads.

    Args:
        model: the same on all ranks except for its weights. Attributes with the number of its heads (`num_heads`,
            `n_head`, ...) become this rank's number.
        plan: {pattern: style}; see `plan.py` for both. `PLANS` has those of Hugging Face's Llama and GPT-2, of nanoGPT
            and of timm's ViT.
        group: the ranks.
        head_counts: names of more attributes that hold a number of heads.
        example: inputs for one forward, the same on all ranks. The cut model must compute what the whole one does: see
            `whole.py`. Only the plans "Llama" (also Qwen2), "GPT-2" and "nanoGPT", alone or with `SEQUENCE`, need none.

    Shapes: as the model's: outputs are whole on every rank
    Cost: a step sends, in elements per rank: forward 2 (t-1)/t of the output of each row layer and each embedding of
        the vocabulary, and (t-1)/t of the padded scores; backward 2 (t-1)/t of the input of each column, heads, fused
        and scores layer (query, key and value apart: one each) and of each gradient of style "inside". A forward with
        a new shape of inputs compares them: two exchanges of 40 bytes; forward 2, 4, 8, ... in training compares the
        whole parameters, 16 bytes each. Here: two broadcasts of each parameter that is cut, and one of all others and
        of buffers; with example two exchanges of 40 bytes, and what `compare` and a second cut send.
    Error: as one process' up to the order of additions, as long as dropout is 0; with dropout other masks are drawn.

    Raises:
        ValueError: equal on every rank: ranks disagree; a pattern matches nothing; a module cannot be cut, or the ranks
            do not divide it; a column without its row; a tied tensor that is cut once only; no example; other numbers
            than the whole model's. Forward: inputs that differ, parameters that drift apart.
    """
    facts = {"plan": dict(plan), "head_counts": list(head_counts), "tensors": shapes_of(model)}
    agree_on("the model, plan or head_counts of parallelize_module", group, **facts, example=example is not None)
    styles, ties = _check(model, plan, group, head_counts)
    if example is None and not is_own(plan):
        raise ValueError(
            f"rank {group_rank(group)}: parallelize_module: pass example=(inputs of one forward): no plan shows how a "
            "forward uses what a layer makes, so the cut model is compared with the whole one. Only PLANS of Llama, "
            "GPT-2 and nanoGPT, alone or with SEQUENCE, need none"
        )
    with torch.no_grad():
        broadcast_each([one.data for one in (*dict(every_parameter(model)).values(), *model.buffers())], group)
    cut = functools.partial(_cut_all, styles=styles, ties=ties, head_counts=head_counts, group=group)
    if example is not None:
        agree_on_inputs(example, group)
        compare(model, cut, styles, example, group)
    before = dict(every_parameter(model))
    cut(model)
    _mark_those_cut(model, before)
    watch(model, group)
    return model


def _cut_all(
    model: nn.Module,
    styles: Mapping[str, str],
    ties: Sequence[Sequence[str]],
    head_counts: Sequence[str],
    group: ProcessGroup | None,
) -> None:
    heads = _find_heads(model, styles, dist.get_world_size(group), head_counts)
    for name, style in styles.items():
        _cut(model, name, style, group, heads)
    cut_sequences(model, styles, group)
    _tie(model, ties)
    for attention in heads.values():
        attention.make_local()


def _mark_those_cut(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Let the parameters that the model has no more refuse to be used."""
    kept = {id(parameter) for _, parameter in every_parameter(model)}
    for name, parameter in before.items():
        if id(parameter) not in kept:
            mark_moved(parameter, name, "parallelize_module gave each rank its part")


def _check(
    model: nn.Module, plan: Mapping[str, str], group: ProcessGroup | None, head_counts: Sequence[str]
) -> tuple[dict[str, str], list[list[str]]]:
    """Return the modules' styles and the names of tied tensors; refuse a plan that cannot be done.

    Raises:
        ValueError: see `parallelize_module`.
    """
    num_ranks = dist.get_world_size(group)
    try:
        if any(hasattr(module, "splits") for module in model.modules()):
            raise ValueError("the model is cut already; pass one that is not")
        styles = find_styles(model, plan)
        check_kinds(model, styles)
        check_sizes(model, styles, num_ranks)
        check_partners(styles)
        check_sequences(model, styles)
        _find_heads(model, styles, num_ranks, head_counts)
        return styles, check_ties(model, styles)
    except ValueError as error:
        raise ValueError(f"rank {group_rank(group)}: parallelize_module: {error}") from None


def _find_heads(
    model: nn.Module, styles: Mapping[str, str], num_ranks: int, head_counts: Sequence[str]
) -> dict[str, AttentionHeads]:
    """Return the heads of each module that holds layers of style "heads" or "fused", by its name."""
    layers: dict[str, dict[str, nn.Module]] = {}
    fused: dict[str, str] = {}
    for name, style in styles.items():
        if style in COUNTS_HEADS:
            parent, _, own = name.rpartition(".")
            layers.setdefault(parent, {})[own] = model.get_submodule(name)
        if style in ("fused", "interleaved"):
            fused[parent] = name
    for parent, name in fused.items():
        if others := ", ".join(own for own in layers[parent] if own != name.rpartition(".")[2]):
            raise ValueError(
                f"{name} has style {styles[name]!r}: it holds queries, keys and values. {parent} has other layers of "
                f"heads, too ({others}); leave them out of the plan"
            )
    for name, style in styles.items():
        if style == "narrow" and name not in layers:
            raise ValueError(
                f"{name} has style 'narrow', but no layer in it has style 'heads', 'fused' or "
                "'interleaved'; leave it out"
            )
    return {
        name: AttentionHeads(
            name, model.get_submodule(name), own, num_ranks, head_counts, fused=styles.get(fused.get(name, ""), "")
        )
        for name, own in layers.items()
    }


def _cut(
    model: nn.Module, name: str, style: str, group: ProcessGroup | None, heads: Mapping[str, AttentionHeads]
) -> None:
    """Put the part of one layer in its place, or a hook on a module."""
    parent, _, own = name.rpartition(".")
    module: Any = model.get_submodule(name)
    made: nn.Module
    if style == "inside":
        sum_over_ranks(module, group)
        return
    if style == "narrow":
        _narrow(module, group)
    if style in ("narrow", "sequence"):
        return
    if style == "row":
        made = RowParallelLinear.from_full(module, group)
    elif isinstance(module, nn.Embedding):
        made = VocabularyParallelEmbedding(module, group)
    elif style == "vocabulary":
        made = ColumnParallelLinear.from_full(module, group, padded=True, join_output=True)
    else:
        sections = heads[parent].sections[own] if style in COUNTS_HEADS else None
        if style == "paired":
            sections = (linear_sizes(module)[1] // 2,) * 2
        made = ColumnParallelLinear.from_full(module, group, sections=sections)
    holder = model.get_submodule(parent)
    holder.register_module(own, made.train(module.training))
    if isinstance(holder, nn.TransformerEncoderLayer):
        holder.activation_relu_or_gelu = 0  # else torch reads the weights itself in eval mode, past the layers


def _tie(model: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Let all names of a tie mean the parameter of the first one again."""
    for first, *others in ties:
        for name in others:
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_parameter(own, model.get_parameter(first))


def _narrow(module: nn.Module, group: ProcessGroup | None) -> None:
    """Show an attention module an input of the width of this rank's heads; the layers of its heads get the whole one.

    What the module sees has the shape, and not a number in it: whatever computes with it gives NaN.
    """
    num_ranks = dist.get_world_size(group)
    shown: list[Tensor] = []  # the stand-in and the input itself, during a forward

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor):
            raise ValueError(f"rank {group_rank(group)}: style 'narrow' needs a tensor as the first argument")
        x = args[0]
        stand_in = x.detach().new_full((), torch.nan).expand(*x.shape[:-1], x.shape[-1] // num_ranks)
        shown[:] = [stand_in, x]
        return stand_in, *args[1:]

    def whole_again(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (shown[1], *args[1:]) if shown and args[0] is shown[0] else args

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda *_: shown.clear(), always_call=True)
    for inner in module.children():
        if isinstance(inner, ColumnParallelLinear):
            inner.register_forward_pre_hook(whole_again)
