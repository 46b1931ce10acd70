"""The vocabulary split over ranks: each embeds its own tokens, scores its own tokens, and the loss never sees them all.

The scores of a batch are [B, S, V], by far the largest activation of a small model with a large vocabulary. But
cross-entropy needs three numbers of a position's scores: the largest, the sum of the exponentials, and the target's.
Those three are exchanged, not V of them.

A vocabulary that the ranks do not divide is filled up: rank r owns tokens r P to (r+1) P with P = ceil(V/t). The rows
beyond V are zero, no token reaches them, and the loss gives them no probability.

Symbols: t ranks; N positions in all; V tokens, P = ceil(V/t).

Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from distlab.blocks.modules.split import Split
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.functions import reduce_from_ranks, reduce_scatter_sequence
from distlab.tensor_parallel.linear import take_parts


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of some tokens; the others' are zero here, and the sum is right.

    Shapes: tokens [..., S] -> [..., S, H], or [..., S/t, H] with sequence_parallel
    Cost: forward an all-reduce of the output: 2 (t-1)/t of its bytes sent per rank; nothing backward. With
        sequence_parallel a reduce-scatter forward and an all-gather backward, each (t-1)/t of the whole output.
    Error: exact: all but one of the numbers that are added are zero.

    Args:
        embedding: rank 0's counts.
        group: the ranks.
        sequence_parallel: give each rank a part of the sequence.

    Raises:
        ValueError: an embedding with an option that a part of it cannot keep; ranks disagree; forward: a token outside
            of the vocabulary (looked for on the CPU only; a GPU would have to be waited for).
    """

    weight: nn.Parameter
    local_kind: type[nn.Module] | None = nn.Embedding
    padding_idx = max_norm = None  # options of an nn.Embedding that a part cannot keep
    sparse = scale_grad_by_freq = False

    def __init__(
        self, embedding: nn.Embedding, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        kept = (embedding.max_norm, embedding.padding_idx)
        if embedding.sparse or embedding.scale_grad_by_freq or any(option is not None for option in kept):
            raise ValueError(
                f"rank {group_rank(group)}: an embedding with max_norm, sparse, scale_grad_by_freq or padding_idx "
                "cannot be split by tokens; build it without"
            )
        self.group, self.sequence_parallel = group, sequence_parallel
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.splits = {"weight": Split(0, (self.num_embeddings,), padded=True)}
        take_parts(self, embedding, group=group, splits=self.splits)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the own tokens up and add up."""
        check_tokens(tokens, self.num_embeddings, self.group)
        if dist.get_world_size(self.group) == 1:
            return self.local_compute(tokens)
        index, here = own_tokens(tokens, len(self.weight), self.group)
        x = self.local_compute(index) * here.unsqueeze(-1)  # [..., S, H], zero for others' tokens
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_ranks)(x, self.group)

    def local_compute(self, tokens: Tensor) -> Tensor:
        """Look rows of this rank up; see `LocalCompute`."""
        return F.embedding(tokens, self.weight)


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, *, vocab_size: int, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of targets, in nats, from each rank's own scores; all ranks get the same number.

    Shapes: logits [..., P], this rank's tokens; targets [...], the same on all ranks -> []
    Cost: forward an all-reduce of N numbers and one of 2 N: 6 (t-1)/t N numbers sent per rank; nothing backward.
    Error: as F.cross_entropy, with a sum in a different order; 16-bit scores are summed in float32.

    Args:
        logits: columns beyond the vocabulary (on the last ranks) do not count, whatever they hold.
        targets: tokens, or ignore_index.
        group: the ranks.
        vocab_size: V.
        ignore_index: positions with this target do not count.

    Raises:
        ValueError: shapes do not fit, or a target is outside of the vocabulary (looked for on the CPU only).
    """
    num_ranks, rank = dist.get_world_size(group), group_rank(group)
    width = -(-vocab_size // num_ranks)
    if logits.shape != (*targets.shape, width):
        raise ValueError(
            f"rank {rank}: logits {list(logits.shape)} and targets {list(targets.shape)}; {vocab_size} tokens over "
            f"{num_ranks} ranks need logits {[*targets.shape, width]}"
        )
    check_tokens(targets, vocab_size, group, ignore_index=ignore_index)
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), group, vocab_size, ignore_index)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup | None, vocab_size: int, ignore_index: int
    ) -> Tensor:
        many = dist.get_world_size(group) > 1
        width = logits.shape[-1]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # [N, P]
        first = group_rank(group) * width
        scores[:, max(vocab_size - first, 0) :] = -torch.inf  # what fills the vocabulary up
        largest = scores.amax(-1)  # [N]
        if many:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scores -= largest.unsqueeze(-1)
        index, here = own_tokens(targets, width, group)
        wanted = scores.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)  # 0 on all ranks but one
        total_and_wanted = torch.stack([scores.exp_().sum(-1), wanted])  # [2, N]
        if many:
            dist.all_reduce(total_and_wanted, group=group)
        total, wanted = total_and_wanted
        counts = targets != ignore_index
        ctx.save_for_backward(scores.div_(total.unsqueeze(-1)), index, here, counts)
        ctx.dtype = logits.dtype
        each: Tensor = (total.log() - wanted).masked_fill(~counts, 0.0)
        return each.sum().div(counts.sum()).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, here, counts = ctx.saved_tensors
        scale = gradient.to(probabilities.dtype) * counts / counts.sum()  # [N]
        made = probabilities * scale.unsqueeze(-1)  # each rank's own columns: complete
        made.scatter_add_(1, index.unsqueeze(1), (-scale * here).unsqueeze(1))
        return made.to(ctx.dtype), None, None, None, None


def own_tokens(tokens: Tensor, width: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether it is here at all (else the row means nothing).

    Shapes: tokens [...] -> [...], [...]
    """
    index = tokens - group_rank(group) * width
    here = (index >= 0) & (index < width)
    return index.where(here, 0), here


def check_tokens(tokens: Tensor, vocab_size: int, group: ProcessGroup | None, *, ignore_index: int = 0) -> None:
    """Refuse tokens outside of the vocabulary, for which ranks would add up zeros; a ValueError names the first.

    Shapes: tokens: any
    """
    if not tokens.is_cpu:
        return
    outside = ((tokens < 0) | (tokens >= vocab_size)) & (tokens != ignore_index)
    if outside.any():
        raise ValueError(
            f"rank {group_rank(group)}: token {int(tokens[outside][0])} is outside of a vocabulary of {vocab_size}; "
            "check the tokenizer"
        )
