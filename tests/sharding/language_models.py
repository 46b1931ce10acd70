"""Small language models, written here in the manner of Llama, T5 and Mixtral, and torch's own Transformer.

Every model has `batch(step)`, rows of data that ranks share out, and `loss(model, rows)`, in which `model` is the
module or what wraps it.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from distlab.rng import generator

ROWS, LENGTH, WIDTH, VOCABULARY = 12, 5, 8, 11


def tokens(step):
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator(step, 0, "tokens"))


def series(step):
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator(step, 0, "series"))


class Output(OrderedDict):
    """A dict that is a dataclass too, without what is None: torch's pytree does not know it."""

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclass
class DecoderOutput(Output):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: object = None
    hidden_states: tuple | None = None
    dtype: torch.dtype | None = None
    kind: str = "decoder"


class Cache:
    """Keys and values of each layer, which grow where they are; no container that torch knows."""

    def __init__(self):
        self.layers = {}

    def update(self, index, keys, values):
        if index in self.layers:
            old = self.layers[index]
            keys, values = torch.cat([old[0], keys], 1), torch.cat([old[1], values], 1)
        self.layers[index] = [keys, values]
        return keys, values

    def length(self):
        return self.layers[0][0].shape[1] if self.layers else 0


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


class DecoderLayer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.norm2 = RMSNorm(), RMSNorm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, hidden, *, cache=None, positions=None):
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        q, k = q * positions, k * positions
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return hidden + self.down(F.silu(self.gate(self.norm2(hidden))) * self.up(hidden)), cache


class Decoder(nn.Module):
    """In the manner of Llama: rotary table, gated layers, a cache that comes back, a device read from parameters."""

    batch = staticmethod(tokens)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(index) for index in range(3))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(WIDTH) / WIDTH), persistent=False)

    @property
    def device(self):
        return next(self.parameters()).device

    @property
    def dtype(self):
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, ids, labels=None, cache=None, use_cache=True):
        if use_cache and cache is None:
            cache = Cache()
        start = cache.length() if use_cache else 0
        place = torch.arange(start, start + ids.shape[1], device=self.device)
        positions = torch.cos(place[:, None] * self.frequencies.to(self.dtype))
        hidden, states = self.embed(ids), ()
        for layer in self.layers:
            states += (hidden,)
            hidden, cache = layer(hidden, cache=cache if use_cache else None, positions=positions)
        logits = self.head(self.norm(hidden))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return DecoderOutput(loss, logits, cache if use_cache else None, states, self.dtype)

    @torch.no_grad()
    def generate(self, ids, num_new=3):
        """Draw the likeliest token again and again, with and then without the cache: both must say the same."""
        out, cache, again = ids.to(self.device), None, ids
        for _ in range(num_new):
            step = self(out if cache is None else out[:, -1:], cache=cache)
            cache = step["cache"]
            out = torch.cat([out, step.logits[:, -1:].argmax(-1)], 1)
            again = torch.cat([again, self(again, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(out, again)
        return out

    @staticmethod
    def loss(model, rows):
        output = model(rows, labels=rows)
        assert output.kind == "decoder"
        assert output["dtype"] is torch.float64
        return output.loss + 0.01 * output.cache.layers[1][0].square().mean() + output.hidden_states[1].square().mean()


Encoded = namedtuple("Encoded", "states position_bias extra")


@dataclass(frozen=True, slots=True)
class Seq2SeqOutput:
    logits: torch.Tensor
    encoded: Encoded
    note: str = "as T5"


class BiasedLayer(nn.Module):
    """Attention whose bias the first layer computes for all; the list that it is given takes the states."""

    def __init__(self, has_bias, crosses=False):
        super().__init__()
        self.bias = nn.Embedding(2 * LENGTH, 1) if has_bias else None
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.crosses = crosses

    def forward(self, x, memory=None, bias=None, states=None):
        if self.bias is not None:
            place = torch.arange(LENGTH)
            bias = self.bias(place[:, None] - place[None] + LENGTH - 1).squeeze(-1)
        source = memory if self.crosses else x
        k, v = self.kv(source).chunk(2, -1)
        x = self.norm(x + self.out(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=bias)))
        if states is not None:
            states.append(x.mean(1))
        return x, bias


class Stack(nn.Module):
    def __init__(self, embed, crosses):
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(BiasedLayer(index == 0, crosses) for index in range(2))

    def forward(self, ids, memory=None):
        x, bias, states = self.embed(ids), None, []
        for layer in self.layers:
            x, bias = layer(x, memory, bias, states=states)
        return Encoded(x, bias, {"states": states})


class EncoderDecoder(nn.Module):
    """In the manner of T5: two stacks that share their embedding with the head, and a method that encodes."""

    batch = staticmethod(tokens)

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(self.shared, False), Stack(self.shared, True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.shared.weight

    def encode(self, ids):
        return self.encoder(ids)

    def forward(self, ids):
        encoded = self.encode(ids)
        decoded = self.decoder(ids.flip(1), encoded.states)
        return Seq2SeqOutput(self.head(decoded.states * WIDTH**-0.5), encoded)

    @staticmethod
    def loss(model, rows):
        output = model(rows)
        extra = sum(state.square().mean() for state in output.encoded.extra["states"])
        return F.cross_entropy(output.logits.flatten(0, 1), rows.flatten()) + 0.1 * extra


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ExpertsLayer(nn.Module):
    """Every expert sees its tokens, weighted; the scores stay in an attribute, for a loss outside."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.scores = None

    def forward(self, x):
        self.scores = self.router(x)
        weights, chosen = self.scores.softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        return x + out


class Experts(nn.Module):
    """In the manner of Mixtral: a loss that balances the router reads what layers left in themselves."""

    batch = staticmethod(series)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ExpertsLayer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        balance = sum(layer.scores.softmax(-1).square().mean() for layer in self.layers)
        return {"output": x, "balance": balance, "type": x.dtype, "name": "experts"}

    @staticmethod
    def loss(model, rows):
        output = model(rows)
        return F.mse_loss(output["output"], rows.flip(-1)) + 0.1 * output["balance"]


class Translator(nn.Module):
    """torch's own nn.Transformer, with masks."""

    batch = staticmethod(tokens)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        source, target = self.embed(ids), self.embed(ids.flip(1))
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))

    @staticmethod
    def loss(model, rows):
        return F.cross_entropy(model(rows).flatten(0, 1), rows.flatten())
