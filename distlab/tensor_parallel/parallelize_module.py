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

from distlab.blocks.gradient_hook import LinearHook
from distlab.blocks.modules.moved import mark_moved
from distlab.blocks.replicate import broadcast_each, every_parameter, parameter_facts
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.compare import compare, watch
from distlab.tensor_parallel.functions import sum_of_ranks
from distlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, agree_on
from distlab.tensor_parallel.plan import LAYERS, OWN, Heads, check_ties, find_heads, find_inside, find_styles, parent_of
from distlab.tensor_parallel.vocabulary import VocabularyParallelEmbedding


def parallelize_module(
    model: nn.Module,
    plan: Mapping[str, str],
    group: ProcessGroup | None = None,
    *,
    example: Sequence[Any] | None = None,
) -> nn.Module:
    """Cut the layers that a plan names, in place; rank 0's weights and buffers count. Return the model.

    Make optimizers and wrappers afterwards. `full_state_dict` returns the uncut model's state with its names; load one
    before the cut. Layers that the plan does not name stay whole, and every rank computes them.

    Dropout: seed torch's generator the same on all ranks of the group. Ranks then drop the same of what they hold
    whole. Of their own heads and features they drop the same places, too: the mask repeats along the heads.

    Args:
        model: the same on all ranks except for its weights. Attributes with the number of its heads (`num_heads`,
            `n_head`, ...: see `plan.py`) become this rank's number.
        plan: {pattern: style}; see `plan.py` for both. `PLANS` has those of Hugging Face's Llama and GPT-2, of nanoGPT
            and of timm's ViT.
        group: the ranks.
        example: inputs for one forward, the same on all ranks. The cut model must compute what the whole one does, and
            what stays whole must have the whole one's gradients: see `compare.py`. Only the plans "Llama" (also Qwen2),
            "GPT-2" and "nanoGPT" need none.

    Shapes: as the model's: outputs are whole on every rank
    Cost: a step sends, in elements per rank: forward 2 (t-1)/t of the output of each row layer and each embedding of
        the vocabulary, and (t-1)/t of the padded scores; backward 2 (t-1)/t of the input of each column, heads, fused
        and scores layer (query, key and value apart: one each) and of each gradient of style "inside". A forward with
        a new shape of inputs compares them: two exchanges of 40 bytes; forward 2, 4, 8, ... in training compares the
        whole parameters, 16 bytes each. Here: two broadcasts of each parameter that is cut, and one of all others and
        of buffers; with example what `compare` and a second cut send.
    Error: as one process' up to the order of additions, as long as dropout is 0; with dropout other masks are drawn.

    Raises:
        ValueError: equal on every rank: ranks disagree; a pattern matches nothing; a module cannot be cut, or the ranks
            do not divide it; a tied tensor that is cut once only; no example; other numbers
            or gradients than the whole model's. Forward: inputs that differ, parameters that drift apart.
    """
    before = dict(every_parameter(model))
    facts = {"plan": dict(plan), "example": example is not None}
    tensors = parameter_facts({**before, **dict(model.named_buffers())}.items())
    agree_on("the model or plan of parallelize_module", group, **facts, tensors=tensors)
    styles, heads, ties = _check(model, plan, group, has_example=example is not None)
    with torch.no_grad():
        broadcast_each([one.data for one in (*before.values(), *model.buffers())], group)
    cut = functools.partial(_cut, styles=styles, heads=heads, ties=ties, group=group)
    if example is not None:
        compare(model, cut, styles, example, group)
    cut(model)
    kept = {id(parameter) for _, parameter in every_parameter(model)}
    for name, parameter in before.items():
        if id(parameter) not in kept:
            mark_moved(parameter, name, "parallelize_module gave each rank its part")
    watch(model, group)
    return model


def _check(
    model: nn.Module, plan: Mapping[str, str], group: ProcessGroup | None, *, has_example: bool
) -> tuple[dict[str, str], Heads, list[list[str]]]:
    try:
        if any(hasattr(module, "splits") for module in model.modules()):
            raise ValueError("the model is cut already; pass one that is not")
        styles = find_styles(model, plan, dist.get_world_size(group))
        heads, ties = find_heads(model, styles, dist.get_world_size(group)), check_ties(model, styles)
        if not has_example and plan not in OWN:
            raise ValueError(
                "pass example=(inputs of one forward): no plan shows how a forward uses what a layer makes, so the cut "
                "model is compared with the whole one. Only PLANS of Llama, GPT-2 and nanoGPT need none"
            )
    except ValueError as error:
        raise ValueError(f"rank {group_rank(group)}: parallelize_module: {error}") from None
    return styles, heads, ties


def _cut(
    model: nn.Module, styles: Mapping[str, str], heads: Heads, ties: Iterable[Sequence[str]], group: ProcessGroup | None
) -> None:
    """Put the parts of layers in their places, then hooks; tie what was tied; let modules count a rank's heads."""
    for name, style in styles.items():
        if style in LAYERS:
            module, holder = model.get_submodule(name), model.get_submodule(parent_of(name))
            part = _part_of(module, style, heads.sections.get(name), group).train(module.training)
            holder.register_module(name.rpartition(".")[2], part)
            if isinstance(holder, nn.TransformerEncoderLayer):
                holder.activation_relu_or_gelu = 0  # else torch reads the weights itself in eval mode, past the layers
    for parameter in find_inside(model, styles):
        if parameter.requires_grad:
            parameter.register_hook(LinearHook(functools.partial(sum_of_ranks, group=group)))
    for name in [name for name, style in styles.items() if style == "narrow"]:
        _narrow(model.get_submodule(name), group)
    for first, *others in ties:
        for name in others:
            holder, own = model.get_submodule(parent_of(name)), name.rpartition(".")[2]
            holder.register_parameter(own, model.get_parameter(first))
    for name, numbers in heads.local.items():
        for attribute, number in numbers.items():
            setattr(model.get_submodule(name), attribute, number)


def _part_of(module: Any, style: str, sections: Sequence[int] | None, group: ProcessGroup | None) -> nn.Module:
    if style == "row":
        return RowParallelLinear.from_full(module, group)
    if isinstance(module, nn.Embedding):
        return VocabularyParallelEmbedding(module, group)
    if style == "vocabulary":
        return ColumnParallelLinear.from_full(module, group, padded=True, join_output=True)
    return ColumnParallelLinear.from_full(module, group, sections=sections)


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
