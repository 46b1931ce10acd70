"""Make a GPT work on a sequence that is spread over ranks.

Only two places of a GPT know that positions have neighbours: attention, and the position embedding, which must look up
where a token stands in the whole sequence. All else works on each token alone and is left as it is. Each rank then has
the same parameters and other tokens, as in data parallelism; so gradients are averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.gradients.flat_gradients import sum_and_divide
from distlab.blocks.models import GPT, Attention
from distlab.blocks.replicate import broadcast_each, every_parameter
from distlab.comm import agree
from distlab.comm.p2p import group_rank
from distlab.context_parallel.all_to_all import all_to_all_attention, require_heads
from distlab.context_parallel.placement import position_ids, require_divisible
from distlab.context_parallel.ring import ring_attention

KINDS: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "all_to_all": all_to_all_attention}


def context_parallel(model: GPT, group: ProcessGroup | None = None, kind: str = "ring", *, check: bool = True) -> GPT:
    """Change a GPT in place so that each rank of the group runs it on its positions of a sequence, and return it.

    Feed it `scatter_sequence(tokens, group)`, compare with `scatter_sequence(targets, group)`, run backward, and call
    `average_gradients_(model, group)`: it then trains as one process does on the whole sequence. Parameters keep their
    names, so states load from and into an ordinary GPT; their values are made those of the group's first rank. With
    dropout, seed the ranks differently (`distlab.rng.seed_rank`): they drop activations of different positions.

    Args:
        model: the same on every rank, except for its values.
        group: the ranks.
        kind: "ring" (any number of heads) or "all_to_all" (a multiple of the ranks).
        check: compare the tokens' shape between ranks in each forward pass.

    Shapes: afterwards tokens [B, S/n] -> logits [B, S/n, V]
    Cost: here one broadcast of the parameters; a forward pass and its backward pass as many bytes per block as
        `ring_attention` or `all_to_all_attention` say; with `check` 40 bytes more, gathered from each rank.
    Error: exact up to the order of additions, dropout apart.

    Raises:
        ValueError: no GPT, one that was changed before, an unknown kind, heads that the ranks do not divide
            ("all_to_all"), or models that differ between ranks; on every rank, and nothing is changed then. Later, from
            the model itself: a sequence that is too long, an odd number of tokens, shapes that differ between ranks.
    """
    rank, num_ranks = group_rank(group), dist.get_world_size(group)
    problem = _problem(model, kind, num_ranks)
    agree(problem, group, what="whether context_parallel can change the model")
    if problem is not None:
        raise ValueError(f"rank {rank}: context_parallel: {problem}")
    names = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in every_parameter(model)]
    agree({"config": str(model.config), "kind": kind, "check": check, "parameters": names}, group, what="model")
    broadcast_each((parameter for _, parameter in every_parameter(model)), group)
    for block in model.blocks:
        block.attention = ContextParallelAttention(cast(Attention, block.attention), partial(KINDS[kind], group=group))
    model.position_embedding = PlacedPositions(model.position_embedding, group)
    model.register_forward_pre_hook(partial(_check_tokens, group=group, check=check), with_kwargs=True)
    return model


def average_gradients_(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Replace each parameter's gradient by its mean over the ranks; every rank must have had as many targets.

    A parameter that has a gradient on no rank keeps none; one that some ranks used counts as zero on the others.

    Cost: one all-reduce for each dtype: 2 (n-1)/n of the bytes of the parameters that require grad, and a flag each.

    Raises:
        ValueError: a gradient is sparse; before anything is sent.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return
    trained = {name: parameter for name, parameter in every_parameter(model) if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(f"rank {group_rank(group)}: {name} has a sparse gradient; use sparse=False")
    sum_and_divide([*trained.values()], [group], num_ranks)


class ContextParallelAttention(Attention):
    """A GPT's attention with the same parameters, over positions that other ranks have too."""

    def __init__(self, whole: Attention, mix: Callable[..., Tensor]) -> None:
        nn.Module.__init__(self)  # the layers are those of `whole`; drawing new ones would use up random numbers
        self.num_heads, self.dropout, self._mix = whole.num_heads, whole.dropout, mix
        self.query_key_value, self.output = whole.query_key_value, whole.output
        self.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally to the positions of all ranks.

        Shapes: x [B, S/n, H] -> [B, S/n, H]
        """
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S/n, 3, A, H/A]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, A, S/n, H/A]
        mixed = self._mix(query, key, value, dropout=self.dropout if self.training else 0.0)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))  # [B, S/n, H]
        return y


class PlacedPositions(nn.Embedding):
    """A GPT's position embedding with the same weight, told where this rank's tokens stand in the whole sequence."""

    def __init__(self, whole: nn.Embedding, group: ProcessGroup | None) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, _weight=whole.weight.detach())
        self.weight = whole.weight
        self._group = group
        self.train(whole.training)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up the positions of the whole sequence that this rank's 0, 1, 2, ... stand for.

        Shapes: positions [S/n] -> [S/n, H]
        """
        placed = position_ids(len(positions) * dist.get_world_size(self._group), self._group)
        return super().forward(placed.to(positions.device))


def _problem(model: object, kind: str, num_ranks: int) -> str | None:
    """Say why a model cannot be changed, or None."""
    if kind not in KINDS:
        return f"kind is {kind!r}; choose one of {', '.join(KINDS)}"
    if not isinstance(model, GPT):
        return (
            f"expected a distlab.models.GPT, got {type(model).__name__}. In a model of your own call "
            "ring_attention(query, key, value, group=group) where it attends, take positions from position_ids(length, "
            "group), and call average_gradients_(model, group) after backward"
        )
    odd = [type(block.attention).__name__ for block in model.blocks if type(block.attention) is not Attention]
    if odd:
        return f"the model's attention is {odd[0]} already; pass a GPT as it was made"
    if kind == "all_to_all":
        try:
            require_heads(model.config.num_heads, num_ranks, "the model")
        except ValueError as error:
            return str(error)
    return None


def _check_tokens(
    model: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], *, group: ProcessGroup | None, check: bool
) -> None:
    """Refuse tokens that do not make one sequence, before a layer sends anything."""
    assert isinstance(model, GPT), "registered on a GPT alone"
    tokens = named["tokens"] if "tokens" in named else inputs[0]
    if check:
        agree({"tokens": list(tokens.shape), "with gradients": torch.is_grad_enabled()}, group, what="batch")
    rank, num_ranks = group_rank(group), dist.get_world_size(group)
    length, context = num_ranks * tokens.shape[-1], model.config.context
    require_divisible(length, num_ranks, f"rank {rank}")
    if length > context:
        raise ValueError(
            f"rank {rank}: {num_ranks} ranks with {tokens.shape[-1]} tokens each have a sequence of {length}, "
            f"which does not fit a context of {context}; pass scatter_sequence(tokens) of shorter sequences"
        )
