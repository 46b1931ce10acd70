"""Models that were not written for tensor parallelism, cut by a plan: equal to one process, or refused in words."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo_gpt
import zoo_images
import zoo_text
from refused import message
from torch import nn
from torch.nn.utils import clip_grad_norm_
from zoo_kinds import FUSED, KINDS, LLAMA, own_loss_by_name
from zoo_techniques import UPDATES, adamw

from distlab.comm import recorded
from distlab.rng import generator
from distlab.tensor_parallel import PLANS, parallelize_module, splits_of

WIDTH = 8
BOTH = {"up": "column", "down": "row"}
INPUTS = torch.ones(2, 4)


class Mlp(nn.Module):
    """A residual MLP; `between` is what stands between its layers."""

    def __init__(self, between=F.gelu, read=16):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, 16), nn.Linear(read, WIDTH), between

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


class Penalised(Mlp):
    """Reads a layer's weight past the layer."""

    def forward(self, x):
        return super().forward(x) + 0.01 * self.up.weight.square().sum()


class SideBySide(nn.Module):
    """One layer makes queries, keys and values, of each head side by side."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2).unbind(-2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Small(nn.Module):
    """Two layers that could be cut, and one attribute after the other that can be wrong."""

    def __init__(self, inner=4, heads=2):
        super().__init__()
        self.num_heads = heads
        self.up, self.down, self.norm = nn.Linear(4, inner), nn.Linear(inner, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.down(self.up(x).relu()))


class Unread(Small):
    """Has two layers that it uses while it trains alone."""

    def __init__(self):
        super().__init__()
        self.other = Small()

    def forward(self, x):
        return super().forward(x) + (self.other(x) if self.training else 0)


class Notes(Mlp):
    """Counts its calls, in a buffer and in a list, draws numbers and changes its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(torch.rand(1))
        x[..., 0] += 1  # in place
        return F.dropout(super().forward(x), 0.5, self.training)


def by_chunk(y):
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


def shared():
    model = nn.ModuleDict({"a": Small(), "b": nn.Identity()})
    model["b"] = model["a"]
    return model


def hooked():
    model = Small()
    model.up.register_forward_hook(lambda *_: None)
    return model


def samples(step):
    return torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=generator(step, 0, "whole"))


def cut(model, plan=BOTH, example=(INPUTS,)):
    """Cut a model; where that is refused, see that nothing was cut."""
    before = list(model.parameters())
    try:
        return parallelize_module(model, plan, example=example)
    except ValueError:
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True)), "nothing is cut"
        raise


def wrong(make, plan=BOTH):
    torch.manual_seed(0)
    return cut(make().double(), plan, (samples(0),))


def train_fused_vit(plan):
    kind = KINDS["ViT, fused qkv"]
    model = cut(zoo_images.ViT().double(), plan, kind.batch(9)[:1])
    optimizer = adamw(model.parameters())
    for step in range(UPDATES):
        optimizer.zero_grad()
        kind.loss(model, *kind.batch(step)).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


BY_CHUNK = "first in what down (row) reads, which up begin. 'column' keeps neighbouring features together"
FUSED_HEADS = {"qkv": "fused", "out": "row"}
SAME = "the inputs of tensor ranks, which work on the same samples"


def cases():
    rank, of_heads = dist.get_rank(), {"up": "heads", "down": "row"}
    yield "lie side by side for each head", lambda: wrong(SideBySide, FUSED_HEADS)
    yield BY_CHUNK, lambda: wrong(lambda: Mlp(by_chunk, read=8))
    yield "a layer's weight without the layer", lambda: wrong(Penalised)
    yield "'*.up' matches no module", lambda: cut(Small(), {"*.up": "column", "down": "row"})
    yield "style 'columns'; pass one of column, heads", lambda: cut(Small(), {"up": "columns"})
    yield "up has style 'column', and 'u*' gives it 'row'", lambda: cut(Small(), {"up": "column", "u*": "row"})
    yield "norm is a LayerNorm; style 'column' cuts an nn.Linear or", lambda: cut(Small(), BOTH | {"norm": "column"})
    yield "up has hooks", lambda: cut(hooked())
    yield "up (column) has 5 output features, which 2 ranks do not divide", lambda: cut(Small(5))
    yield "down (Linear) fails in the cut model and not in the whole", lambda: cut(Small(), {"up": "column"})
    yield "RowParallelLinear got [2, 4]; expected 2 features in the", lambda: cut(Small(), {"down": "row"})
    yield "up makes 3 heads of 2 features, which", lambda: cut(Small(heads=3, inner=6), of_heads)
    yield "no attribute with their number or size", lambda: cut(Small(heads=None), of_heads)
    yield "up has 16 output features, which are", lambda: cut(Small(inner=16), {"up": "fused", "down": "row"})
    yield "no numbers to compare of other.up", lambda: cut(Unread(), {"other.up": "column", "*.down": "row"})
    yield "0.up (Linear) fails in the cut model and not", lambda: cut(nn.Sequential(Small()), {"0": "narrow"})
    yield "transformer.wte.weight (whole) and", lambda: cut(zoo_gpt.TiedGPT(), {"lm_head": "vocabulary"})
    yield "leave a layer that stands under two names whole", lambda: cut(shared(), {"a.up": "column", "a.down": "row"})
    yield "ranks disagree", lambda: cut(Small(), BOTH if rank else {"up": "column"})
    yield "is cut already", lambda: cut(cut(Small()))
    yield "pass example=(inputs of one forward)", lambda: cut(Small(), BOTH, None)
    yield SAME, lambda: cut(Small(), BOTH, (INPUTS + rank,))
    yield SAME, lambda: cut(Small())(INPUTS + rank)
    yield "the shapes of the inputs of tensor ranks", lambda: cut(Small())(torch.ones(2 + rank, 4))
    yield "first the gradient of blocks.0.attn.temperature", lambda: train_fused_vit(PLANS["ViT"])
    yield "first the gradient of blocks.0.norm1.weight", lambda: train_fused_vit(FUSED | {"blocks.*.norm1": "inside"})
    yield "ValueError: rank {rank}: this rank holds one of 2 parts of up.weight", lambda: cut(Small()).state_dict()
    yield "not with torch's clip_grad_norm_", lambda: train_fused_vit(FUSED)


def test_wrong_plans_are_refused_in_words_on_every_rank_before_anything_is_cut(ranks):
    def refusals():
        return [(words, message(call)) for words, call in cases()], message(lambda: cut(Small())(INPUTS))

    for rank, (found, still_works) in enumerate(ranks(2).run(refusals)):
        wrong = [(words, text) for words, text in found if words.format(rank=rank) not in text]
        assert not wrong, (rank, wrong)
        assert still_works == "no error"


def left_as_it_was():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model, x = Notes().double(), samples(0)
    torch.set_rng_state(state)
    parallelize_module(model, BOTH, example=(x,))
    assert torch.equal(state, torch.get_rng_state())
    assert (float(model.calls), len(model.seen), model.training) == (0, 0, True)
    assert torch.equal(x, samples(0))


def sent_by_llama():
    """Return bytes that a cut Llama sends in steps 1 to 3, the number of whole parameters, and bytes of its parts."""
    left_as_it_was()
    kind, rank, sent = KINDS["Llama"], dist.get_rank(), []
    model = parallelize_module(kind.build(), LLAMA, example=kind.batch(9)[:1])
    for step in range(3):
        with recorded() as seen:
            own_loss_by_name(model, *kind.batch(step)).backward()
        sent.append(seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank))
    return sent, len(dict(model.named_parameters())) - len(splits_of(model))


def test_a_step_sends_what_the_docstring_says_and_the_comparison_leaves_all_as_it_was(ranks):
    t, layers = 2, 3
    tokens, width, padded = 12 * zoo_text.LENGTH, zoo_text.WIDTH, 12
    regions = layers * tokens * width * (2 + 5)  # o and down; q, k, v, gate and up backward
    ends = tokens * (width + width) + tokens * padded / 2  # words forward, the scores' input backward; scores forward
    step = 8 * 2 * (t - 1) / t * (regions + ends)
    for (first, second, third), num_whole in ranks(t).run(sent_by_llama):
        assert third == step
        assert second == step + 16 * num_whole * (t - 1)  # whole parameters are compared
        agreed = 2 * 40 * (t - 1)  # on the shapes and values of the inputs
        assert first == step + agreed
