"""Cutting a model into stages: contiguous runs of its layers, as modules that keep the model's own parameter names.

A stage is a part of the model, not a copy: the state_dicts of all stages together are the model's, so a checkpoint of a
pipeline is a checkpoint of the model. Build the whole model on each rank from the same seed, split it, and keep the
stages that the schedule puts there; what is not kept is freed.

A pipeline runs at the speed of its slowest stage. Without costs each stage gets the same number of layers; with costs
(each layer's time) the slowest stage is made as fast as can be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from distlab.blocks.models import GPT
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


def split_gpt(model: GPT, num_stages: int, costs: Sequence[float] | None = None) -> list[nn.Module]:
    """Cut a GPT into stages.

    Without costs, blocks are what is counted: the embeddings go with the first block, norm and output with the last.
    With costs the embeddings and the output layer are layers of their own, so that a wide vocabulary can have a stage
    almost to itself: one cost for the embeddings, one for each block, one for norm and output.

    Args:
        model: its modules become the stages' own.
        num_stages: stages of the whole pipeline, over all ranks.
        costs: num_layers + 2 costs.

    Returns:
        One module per stage. A weight that first and last stage share stays one parameter here; see
        `distlab.pipeline.model.tied` for stages on different ranks.

    Raises:
        ValueError: more stages than layers, or costs that do not fit the model.
    """
    num_layers = model.config.num_layers
    if costs is None:
        cuts = _cut(num_layers, num_stages, None, what="blocks")
        return [
            GPTStage(model, range(start, stop), first=index == 0, last=index == num_stages - 1)
            for index, (start, stop) in enumerate(cuts)
        ]
    cuts = _cut(num_layers + 2, num_stages, costs, what="layers (embeddings, blocks, output)")
    return [
        GPTStage(
            model, range(max(start - 1, 0), min(stop - 1, num_layers)), first=start == 0, last=stop > num_layers + 1
        )
        for start, stop in cuts
    ]


def split_sequential(
    layers: nn.Sequential | Iterable[nn.Module], num_stages: int, costs: Sequence[float] | None = None
) -> list[nn.Module]:
    """Cut a Sequential, or a list of modules that are called one after the other, into stages.

    Raises:
        ValueError: more stages than layers, or costs that do not fit the layers.
    """
    named = _children(layers)
    cuts = _cut(len(named), num_stages, costs, what="layers")
    return [nn.Sequential(OrderedDict(named[start:stop])) for start, stop in cuts]


def _children(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        return list(layers.named_children())
    if isinstance(layers, nn.Module):
        raise ValueError(
            f"{type(layers).__name__} is neither a Sequential nor a list of modules: nothing says in which order its "
            "parts run; pass the parts in a list"
        )
    return [(str(index), layer) for index, layer in enumerate(layers)]


def _cut(num_layers: int, num_stages: int, costs: Sequence[float] | None, *, what: str) -> tuple[tuple[int, int], ...]:
    """Return the range of layers of each stage; none is empty."""
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"{num_layers} {what} cannot fill {num_stages} stages; use at least 1 and at most {num_layers} stages"
        )
    if costs is None:
        return split_evenly(num_layers, num_stages)
    if len(costs) != num_layers:
        raise ValueError(f"{len(costs)} costs for {num_layers} {what}; pass one for each")
    return balance(costs, num_stages)
