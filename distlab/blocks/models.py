"""A small GPT over bytes: large enough to have everything that makes distributed training hard, small enough to read.

Embeddings, blocks of causal attention and a feed-forward layer with residual connections, a last norm, and an output
layer that may share its weight with the embedding (tied: one parameter used twice).

Shapes: B samples, S positions, H hidden size, A heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        vocab_size: different tokens; 256 for bytes.
        context: longest sequence, in tokens.
        num_layers: blocks.
        num_heads: attention heads; must divide hidden_size.
        hidden_size: width of the residual stream.
        tied: share the output layer's weight with the token embedding.
        dropout: probability of dropping an activation while training.
    """

    vocab_size: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "num_heads", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"GPTConfig: {name} is {value!r}; pass a whole number of at least 1")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"GPTConfig: {self.num_heads} heads do not divide hidden_size {self.hidden_size}; "
                f"use a hidden_size that is a multiple of {self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: dropout is {self.dropout!r}; pass a probability in [0, 1)")


class Attention(nn.Module):
    """Mix positions: each looks at itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally.

        Shapes: x [B, S, H] -> [B, S, H]
        """
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, A, H/A]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, A, S, H/A]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        found: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))  # [B, S, H]
        return found


class FeedForward(nn.Module):
    """Work on each position alone: widen four times, bend, narrow."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.output = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position.

        Shapes: x [B, S, H] -> [B, S, H]
        """
        found: Tensor = self.output(F.gelu(self.widen(x)))
        return found


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normalised copy and adds its result to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and feed-forward find.

        Shapes: x [B, S, H] -> [B, S, H]
        """
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        found: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return found


class GPT(nn.Module):
    """Predict the next token at every position.

    Weights are drawn from `generator` (torch's own when None): normal with deviation 0.02, the layers that write to
    the residual stream 1/sqrt(2 num_layers) of that so that its variance does not grow with depth; biases are zero.

    Source: Radford et al. 2019 (GPT-2), section 2.3; GELU is exact here, attention is PyTorch's fused kernel.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.context, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():  # a tied weight comes once
            self.draw_weight(name, parameter, generator)

    @torch.no_grad()
    def draw_weight(self, name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        """Draw the values of one parameter, given its name, into any tensor of its shape.

        A norm's weights are one and draw nothing.
        """
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1)
        else:
            writes_to_residual = name.startswith("blocks") and ".output." in name
            scale = 1 / math.sqrt(2 * self.config.num_layers) if writes_to_residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every next token.

        Shapes: tokens [B, S] -> logits [B, S, V]

        Raises:
            ValueError: the sequence is longer than the context.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}; pass shorter sequences")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))  # [B, S, H]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))  # [B, S, V]
        return logits

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over all positions, in nats.

        Shapes: logits [B, S, V], targets [B, S] -> []
        """
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
