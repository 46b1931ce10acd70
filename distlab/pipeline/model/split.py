"""Cutting a model into stages: contiguous runs of its layers, as modules that keep the model's own parameter names.

A stage is a part of the model, not a copy: the state_dicts of all stages together are the model's, so a checkpoint of a
pipeline is a checkpoint of the model. Build the whole model on each rank from the same seed, split it, and keep the
stages that the schedule puts there; what is not kept is freed.

A pipeline runs at the speed of its slowest stage. Without costs each stage gets the same number of layers; with costs
(a layer's time, from `measure_costs` or from a plan) the slowest stage is made as fast as can be.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from distlab.blocks.models import GPT
from distlab.comm.device import synchronize
from distlab.plan import balance, split_evenly


class GPTStage(nn.Module):
    """Some consecutive layers of a GPT: the embeddings if it has the first, the norm and the output if the last.

    Shapes: tokens [B, S] or x [B, S, H] -> x [B, S, H] or logits [B, S, V]
    """

    def __init__(self, model: GPT, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = first, last
        if first:
            self.token_embedding = model.token_embedding
            self.position_embedding = model.position_embedding
            self.dropout = model.dropout
        self.blocks = nn.ModuleDict({str(index): model.blocks[index] for index in blocks})
        if last:
            self.norm = model.norm
            self.output = model.output

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage's layers.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if self.is_first:
            length = x.shape[-1]
            if length > self.config.context:
                raise ValueError(
                    f"{length} tokens do not fit a context of {self.config.context}; pass shorter sequences"
                )
            positions = torch.arange(length, device=x.device)
            x = self.dropout(self.token_embedding(x) + self.position_embedding(positions))  # [B, S, H]
        for block in self.blocks.values():
            x = block(x)
        return self.output(self.norm(x)) if self.is_last else x  # [B, S, V] or [B, S, H]


def split_gpt(
    model: GPT,
    num_stages: int,
    costs: Sequence[float] | None = None,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> list[nn.Module]:
    """Cut a GPT into stages.

    Without costs, blocks are what is counted: the embeddings go with the first block, norm and output with the last.
    With costs the embeddings and the output layer are layers of their own, so that a wide vocabulary can have a stage
    almost to itself: one cost for the embeddings, one for each block, one for norm and output.

    Args:
        model: its modules become the stages' own.
        num_stages: stages of the whole pipeline, over all ranks.
        costs: num_layers + 2 costs; see `measure_costs`.
        layers_per_stage: blocks of each stage, in place of an even split; not with costs.

    Returns:
        One module per stage. A weight that first and last stage share stays one parameter here; see
        `distlab.pipeline.model.tied` for stages on different ranks.

    Raises:
        ValueError: more stages than layers, or counts or costs that do not fit the model.
    """
    num_layers = model.config.num_layers
    if costs is None:
        cuts = _cut(num_layers, num_stages, None, layers_per_stage, what="blocks")
        return [
            GPTStage(model, range(start, stop), first=index == 0, last=index == num_stages - 1)
            for index, (start, stop) in enumerate(cuts)
        ]
    cuts = _cut(num_layers + 2, num_stages, costs, layers_per_stage, what="layers (embeddings, blocks, output)")
    return [
        GPTStage(
            model, range(max(start - 1, 0), min(stop - 1, num_layers)), first=start == 0, last=stop > num_layers + 1
        )
        for start, stop in cuts
    ]


def split_sequential(
    layers: nn.Sequential | Iterable[nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> list[nn.Module]:
    """Cut a Sequential, or a list of modules that are called one after the other, into stages.

    Raises:
        ValueError: more stages than layers, or counts or costs that do not fit the layers.
    """
    named = _children(layers)
    cuts = _cut(len(named), num_stages, costs, layers_per_stage, what="layers")
    return [nn.Sequential(OrderedDict(named[start:stop])) for start, stop in cuts]


def stage_state_names(stages: Sequence[nn.Module]) -> list[list[str]]:
    """List the names in each stage's state_dict: together they are the model's, a tied weight under each of its names.

    Raises:
        ValueError: a name comes in two stages, so that a checkpoint would lose one of the two.
    """
    names = [list(stage.state_dict()) for stage in stages]
    seen: dict[str, int] = {}
    for index, name in ((index, name) for index, part in enumerate(names) for name in part):
        if name in seen:
            raise ValueError(f"{name} is in stage {seen[name]} and in stage {index}; cut one model into all stages")
        seen[name] = index
    return names


REPEATS = 5


def measure_costs(model: GPT | nn.Sequential | Iterable[nn.Module], batch: Tensor) -> list[float]:
    """Time each layer's forward and backward pass on a micro-batch, for `split_gpt` or `split_sequential`.

    The median of REPEATS is taken.

    Gradients of the parameters are as before afterwards, and random numbers too. All ranks must split alike: measure
    on one and broadcast, or on each and take one rank's.

    Args:
        model: GPT, Sequential or list of modules.
        batch: one micro-batch of inputs.

    Returns:
        Seconds for each layer: of a GPT the embeddings, each block, norm and output.
    """
    layers: list[Callable[[Any], Any]]
    if isinstance(model, GPT):
        blocks = model.config.num_layers
        layers = [GPTStage(model, range(0), first=True, last=False), *model.blocks]
        layers.append(GPTStage(model, range(blocks, blocks), first=False, last=True))
        parameters = list(model.parameters())
    else:
        layers = [layer for _, layer in _children(model)]
        parameters = list(chain.from_iterable(layer.parameters() for _, layer in _children(model)))
    gradients = [parameter.grad for parameter in parameters]
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            rounds = [_time_layers(layers, batch) for _ in range(REPEATS + 1)]  # the first warms up
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return [median(times) for times in zip(*rounds[1:], strict=True)]


def _time_layers(layers: Sequence[Callable[[Any], Any]], batch: Tensor) -> list[float]:
    x, times = batch, []
    for layer in layers:
        x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
        synchronize(x.device)
        begin = time.perf_counter()
        y = layer(x)
        if y.requires_grad:
            y.backward(torch.ones_like(y))
        synchronize(y.device)
        times.append(time.perf_counter() - begin)
        x = y
    return times


def _children(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        return list(layers.named_children())
    if isinstance(layers, nn.Module):
        raise ValueError(
            f"{type(layers).__name__} is neither a Sequential nor a list of modules: nothing says in which order its "
            "parts run; pass the parts in a list"
        )
    return [(str(index), layer) for index, layer in enumerate(layers)]


def _cut(
    num_layers: int,
    num_stages: int,
    costs: Sequence[float] | None,
    layers_per_stage: Sequence[int] | None,
    *,
    what: str,
) -> tuple[tuple[int, int], ...]:
    """Return the range of layers of each stage; none is empty."""
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_layers} {what} cannot fill {num_stages} stages; use at least 1 and at most {num_layers} stages"
        )
    if layers_per_stage is not None:
        counts = list(layers_per_stage)
        if costs is not None:
            raise ValueError("costs and layers_per_stage both say where to cut; pass one of them")
        if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
            raise ValueError(
                f"layers_per_stage is {counts}; pass {num_stages} numbers of at least 1 that add up to {num_layers}"
            )
        return tuple((sum(counts[:index]), sum(counts[: index + 1])) for index in range(num_stages))
    if costs is None:
        return split_evenly(num_layers, num_stages)
    if len(costs) != num_layers:
        raise ValueError(f"{len(costs)} costs for {num_layers} {what}; pass one for each")
    return balance(costs, num_stages)
