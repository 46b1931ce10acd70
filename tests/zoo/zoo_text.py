"""Models of text, small: written as people write them, not for this package."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, WIDTH, HEADS = 11, 6, 8, 4
KEY_HEADS = 2  # of keys and values in a Llama


def attend(queries, keys, values, *, causal, bias=None):
    """[B, H, S, D] each -> [B, H, S, D]"""
    scores = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores.softmax(-1) @ values


def in_heads(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Cache:
    """Keys and values of earlier tokens, layer by layer: no tensor, no tuple, no dict."""

    def __init__(self):
        self.key_cache, self.value_cache = [], []

    def update(self, keys, values):
        self.key_cache.append(keys)
        self.value_cache.append(values)


class ModelOutput(OrderedDict):
    """A dict whose items are attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Rotary(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, positions, dtype):
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaLayer(nn.Module):
    """Rotary positions, fewer key heads than query heads, a gated feed-forward; keyword arguments; a cache."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.groups = WIDTH // HEADS, HEADS // KEY_HEADS
        self.input_norm, self.post_norm = RMSNorm(), RMSNorm()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, hidden_states, *, position_embeddings, past_key_values=None):
        x = self.input_norm(hidden_states)
        cosine, sine = position_embeddings

        def turned(part):
            half = torch.cat([-part[..., part.shape[-1] // 2 :], part[..., : part.shape[-1] // 2]], -1)
            return part * cosine + half * sine

        queries, keys, values = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        keys = turned(keys)
        if past_key_values is not None:
            past_key_values.update(keys, values)
        keys, values = (each.repeat_interleave(self.groups, 1) for each in (keys, values))
        x = attend(turned(queries), keys, values, causal=True).transpose(1, 2).flatten(2)
        hidden_states = hidden_states + self.o(x)
        x = self.post_norm(hidden_states)
        return (hidden_states + self.down(F.silu(self.gate(x)) * self.up(x)),)


class Llama(nn.Module):
    """As a public Llama: a dict-like output with a cache in it, `device` and `dtype` read off the parameters."""

    def __init__(self, depth=3):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.rotary = Rotary(WIDTH // HEADS)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(depth))
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, input_ids, labels=None, use_cache=True):
        cache = Cache() if use_cache else None
        x = self.embed_tokens(input_ids)
        positions = self.rotary(torch.arange(input_ids.shape[1]), self.dtype)
        for layer in self.layers:
            x = layer(x, position_embeddings=positions, past_key_values=cache)[0]
        logits = self.lm_head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss, logits=logits, past_key_values=cache, dtype=logits.dtype, kind="llama")


@dataclass
class Encoded:
    last_hidden_state: torch.Tensor
    pooled: torch.Tensor | None = None
    attentions: tuple | None = None


class Bert(nn.Module):
    """An encoder that returns a dataclass; its pooler gets no gradient in this task."""

    def __init__(self, depth=2):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def encode(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layer:
            x = layer(x)
        return Encoded(x, self.pooler(x[:, 0]).tanh())

    def forward(self, tokens):
        return self.decoder(self.encode(tokens).last_hidden_state)


class T5Block(nn.Module):
    """The first block owns the bias of relative positions and hands it to the others."""

    def __init__(self, has_bias, crosses):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm() for _ in range(3 if crosses else 2))
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)) if crosses else None
        self.relative = nn.Embedding(2 * LENGTH, HEADS) if has_bias else None
        self.wi, self.wo = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x, bias, memory=None):
        if self.relative is not None:
            places = torch.arange(x.shape[1])
            bias = self.relative(places[None] - places[:, None] + LENGTH).permute(2, 0, 1)
        x = x + self.attention(self.own, self.norms[0](x), None, bias, causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.attention(self.cross, self.norms[2](x), memory, None, causal=False)
        return x + self.wo(self.wi(self.norms[1](x)).relu()), bias

    @staticmethod
    def attention(layers, x, memory, bias, *, causal):
        query, key, value, out = layers
        memory = x if memory is None else memory
        parts = in_heads(query(x)), in_heads(key(memory)), in_heads(value(memory))
        return out(attend(*parts, causal=causal, bias=bias).transpose(1, 2).flatten(2))


class T5(nn.Module):
    """Encoder and decoder over one embedding; blocks return tuples."""

    def __init__(self, depth=2):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(T5Block(index == 0, crosses=False) for index in range(depth))
        self.decoder = nn.ModuleList(T5Block(index == 0, crosses=True) for index in range(depth))

    def forward(self, tokens):
        memory, bias = self.shared(tokens), None
        for block in self.encoder:
            memory, bias = block(memory, bias)
        x, bias = self.shared(tokens.flip(1)), None
        for block in self.decoder:
            x, bias = block(x, bias, memory)
        return F.linear(x, self.shared.weight)


class Mixture(nn.Module):
    """As Mixtral: two of four experts for each token; an expert may get no token at all."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, num_experts, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights, chosen = gate(x).softmax(-1).topk(2)
            y = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows, place = torch.where(chosen == number)
                if len(rows):
                    y = y.index_add(0, rows, weights[rows, place, None] * expert(x[rows]).tanh())
            x = x + y
        return self.head(x).unflatten(0, tokens.shape)
