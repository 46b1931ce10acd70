"""A whole GPT over tensor ranks: every layer takes the place of the one that it was cut from.

The model keeps its shape, its names and its forward: a block does not know that its attention is split. What changes is
the loss, because the scores of a rank are those of its own tokens:

    model = parallelize(GPT(config), group)
    loss = model.loss(model(tokens), targets)        # on every rank of the group, with the same tokens
    loss.backward()
    clip_tensor_parallel_(model, 1.0, group)
    optimizer.step()                                 # each rank updates its parts

In `ParallelAttention` each rank attends with its own heads, as if there were no others, so attention itself exchanges
nothing. Query, key and value come out of one fused layer, whose features are [queries, keys, values]: cut it as one
piece and rank 0 of two gets all queries and half of the keys. Each of the three is cut on its own.

Symbols: t ranks; L layers; B samples, S positions, H features, A heads, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.clip import Gradient, clip_counted_
from distlab.blocks.models import GPT, Attention, Block, FeedForward
from distlab.blocks.modules.split import splits_of
from distlab.comm.p2p import group_rank
from distlab.tensor_parallel.async_calls import check_sequence
from distlab.tensor_parallel.functions import join_sequence, split_sequence
from distlab.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    agree_on,
    agree_on_inputs,
    digest,
    take_parts,
)
from distlab.tensor_parallel.sequence import SequenceParallelNorm, SequenceParallelPositions, SplitDropout, own_random
from distlab.tensor_parallel.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy


def parallelize(
    model: GPT, group: ProcessGroup | None = None, *, sequence_parallel: bool = False, num_parts: int = 1
) -> ParallelGPT:
    """Split a GPT over the ranks of a group; rank 0's weights count.

    Heads, feed-forward features and vocabulary are split; norms and positions are whole on every rank. Of a mixture of
    experts the features of each expert that is here are split; its router is whole. Make optimizers and wrappers from
    what is returned; the model that was given is used up.

    Args:
        model: the same on all ranks except for its weights.
        group: the ranks.
        sequence_parallel: split the sequence between the regions; forward then needs a length that t divides.
        num_parts: without sequence_parallel, sum in this many parts: see `RowParallelLinear`.

    Shapes: tokens [B, S] -> logits [B, S, ceil(V/t)]
    Cost: a step of a micro-batch sends, in elements per rank: 8 (t-1)/t B S H per layer; 4 (t-1)/t B S H for embedding
        and output layer; 6 (t-1)/t B S for the loss. With sequence_parallel as much, plus for gradients
        2 (t-1)/t (4 L + 2) H of the norms and (t-1)/t S H of positions. The
        first step, and each with a new shape, adds two or three small exchanges that compare the ranks' tokens.
        Here: a broadcast of each parameter.
    Error: as one process' up to the order of additions, as long as dropout is 0; with dropout other masks are drawn.

    Raises:
        ValueError: ranks disagree, or t does not divide the heads; equal on every rank.
    """
    is_model = isinstance(model, GPT) and not isinstance(model, ParallelGPT)
    options = {"sequence_parallel": sequence_parallel, "num_parts": num_parts}
    given = {"type": type(model).__name__, "config": asdict(model.config) if is_model else None, "options": options}
    agree_on("the model or the options of parallelize", group, **given)
    rank = group_rank(group)
    if not is_model:
        raise ValueError(
            f"rank {rank}: parallelize got a {type(model).__name__}; expected a GPT that is not split yet; for any "
            "other model see parallelize_module"
        )
    if num_parts < 1:
        raise ValueError(f"rank {rank}: num_parts is {num_parts}; pass at least 1")
    check_heads(model.config.num_heads, group)
    made = ParallelGPT(model, group, sequence_parallel=sequence_parallel)
    for module in made.modules():
        if isinstance(module, RowParallelLinear):
            module.num_parts = num_parts
    return made.train(model.training)


class ParallelGPT(GPT):
    """A GPT that `parallelize` made: its modules have the names of the full model's.

    Attributes:
        group: the ranks.
        sequence_parallel: ranks hold parts of the sequence between the regions.
    """

    def __init__(self, model: GPT, group: ProcessGroup | None, *, sequence_parallel: bool) -> None:
        nn.Module.__init__(self)  # the parts come from the model, not from a new draw
        self.config, self.group, self.sequence_parallel = model.config, group, sequence_parallel
        self._seen: object = None  # shape of the tokens that ranks agreed on
        put = self.register_module  # parallel layers have the names of the model's own, and are not subclasses of them
        tokens = VocabularyParallelEmbedding(model.token_embedding, group, sequence_parallel=sequence_parallel)
        put("token_embedding", tokens)
        put("position_embedding", _whole(model.position_embedding, group, sequence_parallel))
        put("dropout", SplitDropout(model.config.dropout, group) if sequence_parallel else model.dropout)
        blocks = [_split_block(cast(Block, block), group, sequence_parallel) for block in model.blocks]
        put("blocks", nn.ModuleList(blocks))
        put("norm", _whole(model.norm, group, sequence_parallel))
        scores = ColumnParallelLinear.from_full(model.output, group, padded=True, sequence_parallel=sequence_parallel)
        put("output", scores)
        if model.output.weight is model.token_embedding.weight:
            self.output.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the own tokens at every position.

        Shapes: tokens [B, S] -> logits [B, S, ceil(V/t)]

        Raises:
            ValueError: tokens differ between ranks (looked at when their shape is new); the sequence is longer than the
                context; with sequence_parallel, t does not divide it; dropout with generators that differ.
        """
        if self.sequence_parallel:
            check_sequence(tokens.unsqueeze(-1), self.group, what="a ParallelGPT with sequence_parallel")
        if self._seen != (tokens.shape, self.training):
            agree_on_inputs(tokens, self.group, "tokens")
            if self.training and self.config.dropout:
                what = "the state of torch's generator, which tensor ranks need for common dropout masks (sha256)"
                agree_on(what, self.group, state=digest(torch.get_rng_state()))
            self._seen = (tokens.shape, self.training)
        return super().forward(tokens)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Return the mean cross-entropy over all positions, in nats; the same on every rank.

        Shapes: logits [B, S, ceil(V/t)], targets [B, S] -> []
        """
        return vocabulary_parallel_cross_entropy(logits, targets, self.group, vocab_size=self.config.vocab_size)


def _split_block(block: Block, group: ProcessGroup | None, sequence_parallel: bool) -> Block:
    put = block.register_module
    put("attention_norm", _whole(block.attention_norm, group, sequence_parallel))
    put("attention", ParallelAttention(block.attention, group, sequence_parallel=sequence_parallel))
    put("feed_forward_norm", _whole(block.feed_forward_norm, group, sequence_parallel))
    if isinstance(block.feed_forward, FeedForward):
        _split_feed_forward(block.feed_forward, group, sequence_parallel)
    else:
        _split_mixture(block.feed_forward, group, sequence_parallel)
    if sequence_parallel:
        put("dropout", SplitDropout(block.dropout.p, group))
    return block


def _split_feed_forward(inner: FeedForward, group: ProcessGroup | None, sequence_parallel: bool) -> None:
    put = inner.register_module
    put("widen", ColumnParallelLinear.from_full(inner.widen, group, sequence_parallel=sequence_parallel))
    put("output", RowParallelLinear.from_full(inner.output, group, sequence_parallel=sequence_parallel))


def _split_mixture(mixture: nn.Module, group: ProcessGroup | None, sequence_parallel: bool) -> None:
    """Split every feed-forward layer inside a mixture; what chooses among them stays whole, and works on all positions.

    A choice depends on the whole of a token, and every rank must make the same one: then each has some features of the
    same rows, as in any other feed-forward layer.
    """
    experts = [module for module in mixture.modules() if isinstance(module, FeedForward)]
    inside = {inner for expert in experts for inner in expert.modules()}
    for module in [module for module in mixture.modules() if module not in inside and module._parameters]:
        take_parts(module, module, group=group)
    for expert in experts:
        _split_feed_forward(expert, group, sequence_parallel=False)
    if sequence_parallel:  # hooks, so that names stay
        mixture.register_forward_pre_hook(lambda _, inputs: join_sequence(inputs[0], group))
        mixture.register_forward_hook(lambda _, inputs, output: split_sequence(output, group))


def _whole(
    module: nn.LayerNorm | nn.Embedding, group: ProcessGroup | None, sequence_parallel: bool
) -> nn.LayerNorm | nn.Embedding | SequenceParallelNorm | SequenceParallelPositions:
    """Return a module that every rank holds whole, with rank 0's weights."""
    if not sequence_parallel:
        take_parts(module, module, group=group)
        return module
    if isinstance(module, nn.LayerNorm):
        return SequenceParallelNorm(module, group)
    return SequenceParallelPositions(module, group)


def clip_tensor_parallel_(model: nn.Module, max_norm: float, group: ProcessGroup | None = None) -> Tensor:
    """Scale gradients in place so that the whole model's norm is at most `max_norm`; return the norm that it had.

    It is the norm that one process would find: the squares of parts are summed over ranks. A parameter that every rank
    holds whole has the same gradient on all: one rank counts it for all. A norm of math.inf measures alone.

    Cost: an all-reduce of 8 bytes.
    Error: as one process', up to the order of additions; equal on every rank.

    Raises:
        ValueError: max_norm is not a positive number.
        NotFiniteError: the norm is not finite, on every rank; nothing is changed.
    """
    split, counts_whole = splits_of(model), group_rank(group) == 0
    gradients = [
        Gradient(name, one.grad, name in split or counts_whole)
        for name, one in model.named_parameters()
        if one.grad is not None
    ]
    return clip_counted_(gradients, max_norm, [group])


def full_state_dict(model: nn.Module, group: ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the state of the model that was split, whole, on every rank: what one process would save.

    A cut model takes no whole state: load it before the cut, which keeps rank 0's weights.

    Cost: an all-gather of each parameter that is split.
    """
    state, num_ranks = {}, dist.get_world_size(group)
    for name, value in model.state_dict(keep_vars=True).items():  # a tied weight comes under each of its names
        path, _, own = name.rpartition(".")
        split = getattr(model.get_submodule(path), "splits", {}).get(own)
        state[name] = value.detach().clone(memory_format=torch.contiguous_format)
        if split is not None:
            parts = [torch.empty_like(value) for _ in range(num_ranks)]
            if num_ranks > 1:
                dist.all_gather(parts, state[name], group=group)
            state[name] = split.join(parts if num_ranks > 1 else [state[name]])
    return state


class ParallelAttention(nn.Module):
    """The causal attention of a GPT with A/t heads on each rank.

    Shapes: x [B, S, H] -> [B, S, H]; with sequence_parallel both [B, S/t, H]
    Cost: an all-reduce of [B, S, H] forward and one backward: 4 (t-1)/t B S H elements sent per rank; as much with
        sequence_parallel.
    Error: as the two layers'.

    While training, each rank draws which attention weights of its own heads it drops.

    Args:
        attention: the full module; rank 0's weights count.
        group: the ranks.
        sequence_parallel: ranks hold parts of the sequence before and after.

    Attributes:
        mix: in the place of `scaled_dot_product_attention`, where a rank has some positions only.

    Raises:
        ValueError: t does not divide the heads, or ranks disagree.
    """

    def __init__(
        self, attention: Attention, group: ProcessGroup | None = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        agree_on("the heads of a ParallelAttention", group, heads=attention.num_heads)
        check_heads(attention.num_heads, group)
        self.group, self.dropout = group, attention.dropout
        self.num_heads = attention.num_heads // dist.get_world_size(group)  # of this rank
        self.mix: Callable[..., Tensor] | None = None
        self.query_key_value = ColumnParallelLinear.from_full(
            attention.query_key_value,
            group,
            sections=[attention.output.in_features] * 3,
            sequence_parallel=sequence_parallel,
        )
        self.output = RowParallelLinear.from_full(attention.output, group, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally with the own heads, and add up what all ranks' heads found."""
        made = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, A/t, d]
        query, key, value = made.permute(2, 0, 3, 1, 4)  # each [B, A/t, S, d]
        y: Tensor = self.output(self._mix(query, key, value).transpose(1, 2).flatten(-2))  # [B, S, H] or [B, S/t, H]
        return y

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the mixed values, [B, A/t, S, d]."""
        dropout = self.dropout if self.training else 0.0
        with own_random(query.device, self.group) if dropout else nullcontext():
            if self.mix is not None:
                return self.mix(query, key, value, dropout=dropout)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


def check_heads(num_heads: int, group: ProcessGroup | None) -> None:
    """Refuse heads that cannot be shared out; a ValueError names them."""
    num_ranks = dist.get_world_size(group)
    if num_heads % num_ranks:
        raise ValueError(
            f"rank {group_rank(group)}: {num_heads} heads cannot be split over {num_ranks} ranks; use a number of "
            f"ranks that divides {num_heads}, or a multiple of {num_ranks} heads"
        )
