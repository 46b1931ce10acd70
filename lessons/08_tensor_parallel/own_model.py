"""A small GPT whose layers are cut and run with a learner's functions: what lab 8 trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from distlab.models import GPT, Block

Functions = Callable[[str], Callable[..., Any]]  # by the exercise's name


class OwnBlock:
    """A block of the GPT.

    Attributes:
        split: parameters of which this rank has a part.
        whole: parameters that every rank has.
    """

    def __init__(self, block: Block, functions: Functions, rank: int, num_ranks: int) -> None:
        cut, heads_of, heads = functions("08.cut"), functions("08.heads"), block.attention.num_heads
        self.mlp, (self.begin, self.end) = functions("08.mlp"), functions("08.f_and_g")()
        self.head_size = block.attention.output.in_features // heads
        fused, inner = block.attention.query_key_value, block.feed_forward
        weight = heads_of(fused.weight.detach(), heads, heads, num_ranks, rank)
        bias = heads_of(fused.bias.detach().unsqueeze(1), heads, heads, num_ranks, rank)[:, 0]
        parts = [
            cut(layer.weight.detach(), layer.bias.detach(), kind, num_ranks, rank)
            for layer, kind in ((block.attention.output, "row"), (inner.widen, "column"), (inner.output, "row"))
        ]
        self.split = [weight.clone(), bias.clone(), parts[0][0], *parts[1], parts[2][0]]
        norms = (block.attention_norm, block.feed_forward_norm)
        self.whole = [tensor.detach().clone() for norm in norms for tensor in (norm.weight, norm.bias)]
        self.whole += [layer.bias.detach().clone() for layer in (block.attention.output, inner.output)]

    def __call__(self, x: Tensor) -> Tensor:
        """Run the block.

        Shapes: x [B, S, H] -> [B, S, H]
        """
        weight, bias, attended, widen, widen_bias, narrow = self.split
        first, first_bias, second, second_bias, attended_bias, narrow_bias = self.whole
        fused = F.linear(self.begin(F.layer_norm(x, x.shape[-1:], first, first_bias)), weight, bias)
        query, key, value = fused.unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)  # each [B, A/t, S, d]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.end(F.linear(mixed, attended)) + attended_bias
        normed = F.layer_norm(x, x.shape[-1:], second, second_bias)
        worked: Tensor = self.mlp(normed, widen, widen_bias, narrow, narrow_bias)
        return x + worked


class OwnModel:
    """A whole GPT, its embedding not tied to the output layer.

    Attributes:
        split: parameters of which this rank has a part.
        whole: parameters that every rank has.
    """

    def __init__(self, model: GPT, functions: Functions, rank: int, num_ranks: int) -> None:
        self.vocab_size = model.config.vocab_size
        self.embed, self.entropy = functions("08.repair"), functions("08.cross_entropy")
        self.begin, _ = functions("08.f_and_g")()
        self.blocks = [OwnBlock(block, functions, rank, num_ranks) for block in model.blocks]  # type: ignore[arg-type]
        width = -(-self.vocab_size // num_ranks)
        padding = (0, 0, 0, width * num_ranks - self.vocab_size)
        self.rows, self.scores = (
            F.pad(full.weight.detach(), padding).split(width)[rank].clone()
            for full in (model.token_embedding, model.output)
        )
        self.places = model.position_embedding.weight.detach().clone()
        self.norm = [tensor.detach().clone() for tensor in (model.norm.weight, model.norm.bias)]
        self.split = [self.rows, self.scores, *(p for block in self.blocks for p in block.split)]
        self.whole = [self.places, *self.norm, *(p for block in self.blocks for p in block.whole)]
        self.parameters = [tensor.requires_grad_() for tensor in (*self.split, *self.whole)]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, the same on every rank.

        Shapes: inputs, targets [B, S] -> []
        """
        x = self.embed(inputs, self.rows, self.vocab_size) + self.places  # [B, S, H]
        for block in self.blocks:
            x = block(x)
        weight, bias = self.norm
        logits = F.linear(self.begin(F.layer_norm(x, x.shape[-1:], weight, bias)), self.scores)  # [B, S, V/t]
        loss: Tensor = self.entropy(logits.flatten(0, -2), targets.flatten(), self.vocab_size)
        return loss
