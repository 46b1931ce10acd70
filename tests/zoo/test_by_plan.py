"""Models that were not written for tensor parallelism, cut by a plan: equal to one process, or refused in words."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo_gpt
import zoo_images
import zoo_text
from refused import message
from torch import nn
from zoo_kinds import FUSED, KINDS, LLAMA, own_loss_by_name
from zoo_techniques import UPDATES, adamw

from distlab.comm import recorded
from distlab.rng import generator
from distlab.tensor_parallel import (
    PLANS,
    clip_tensor_parallel_,
    full_state_dict,
    load_full_state_dict,
    parallelize_module,
    splits_of,
)

MODELS = {  # of one layer: the zoo trains three
    "nanoGPT": partial(zoo_gpt.TiedGPT, depth=1),
    "GPT-2": partial(zoo_gpt.conv1d_gpt, depth=1),
    "Llama": partial(zoo_text.Llama, depth=1),
    "ViT, fused qkv": partial(zoo_images.ViT, depth=1),
}
MAX_NORM = 0.1


def build(kind, rank=0):
    """Return the model with weights of a size at which rounding does not grow from update to update."""
    model = kind.build(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)
    return model


def train(kind, model, clip):
    """Return the norms of all updates."""
    optimizer, norms = adamw(model.parameters()), []
    for step in range(UPDATES):
        optimizer.zero_grad()
        kind.loss(model, *kind.batch(step)).backward()
        norms.append(float(clip(model)))
        optimizer.step()
    return norms


def clip_alone(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def cut_and_train():
    found = {}
    for name, make in MODELS.items():
        kind = KINDS[name]._replace(make=make)
        model = parallelize_module(build(kind, dist.get_rank()), kind.plan, example=kind.batch(9)[:1])
        norms = train(kind, model, partial(clip_tensor_parallel_, max_norm=MAX_NORM))
        found[name] = norms, {key: value.clone() for key, value in full_state_dict(model).items()}
        again = kind.build(7)
        again.load_state_dict(found[name][1])  # the plain model takes it
        load_full_state_dict(model, again.state_dict())
    return found


def test_norms_and_states_equal_one_process(ranks):
    said = ranks(2).run(cut_and_train)
    for name, make in MODELS.items():
        kind = KINDS[name]._replace(make=make)
        model = build(kind)
        norms = train(kind, model, clip_alone)
        assert max(norms) > MAX_NORM  # something was clipped
        for each in said:
            assert each[name][0] == pytest.approx(norms, abs=1e-9)
            assert list(each[name][1]) == list(model.state_dict())
            for key, value in model.state_dict().items():
                torch.testing.assert_close(each[name][1][key], value, rtol=0, atol=1e-9)


WIDTH, NUM_HEADS = 8, 4
MLP, ATTENTION = {"up": "column", "down": "row"}, {"qkv": "fused", "out": "row"}


class Mlp(nn.Module):
    """A residual MLP; `between` is what stands between its layers."""

    def __init__(self, between=F.gelu, inner=16, read=16, scale=1.0):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, inner), nn.Linear(read, WIDTH), between
        with torch.no_grad():
            self.down.weight.mul_(scale)

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


class Attention(nn.Module):
    """One layer makes queries, keys and values: of all heads one after the other, or side by side for each head."""

    def __init__(self, interleaved=True, shared=NUM_HEADS, heads=None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = NUM_HEADS, shared, WIDTH // NUM_HEADS
        self.interleaved, self.constant = interleaved, heads
        self.qkv = nn.Linear(WIDTH, (NUM_HEADS + 2 * shared) * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, heads, shared = self.qkv(x), self.constant or self.num_heads, self.num_kv_heads
        if self.interleaved:
            groups = y.unflatten(-1, (shared, heads // shared + 2, self.head_dim))  # [B, S, groups, q.. k v, D]
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self._three(y, heads, shared))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def _three(self, y, heads, shared):
        return y.split([heads * self.head_dim, shared * self.head_dim, shared * self.head_dim], -1)


class Penalised(Mlp):
    def forward(self, x):
        return super().forward(x) + 0.01 * self.up.weight.square().sum()


def glu(y):
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


def softmax(y):
    return y.softmax(-1)


def drawn(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def samples(step):
    return torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=generator(step, 0, "whole"))


def train_layers(model):
    optimizer = adamw(model.parameters())
    for step in range(UPDATES):
        optimizer.zero_grad()
        model(samples(step)).square().mean().backward()
        optimizer.step()


RIGHT = {
    "interleaved": (Attention, {"qkv": "interleaved", "out": "row"}),
    "interleaved, shared keys": (lambda: Attention(shared=2), {"qkv": "interleaved", "out": "row"}),
    "fused": (lambda: Attention(interleaved=False), ATTENTION),
    "paired": (lambda: Mlp(glu, read=8), {"up": "paired", "down": "row"}),
    "column": (Mlp, MLP),
}
MAY_BE_PAIRED = "first in what down (row) reads, which up begin. 'column' keeps neighbouring features together"
WRONG = {
    "side by side": (Attention, ATTENTION, "the style is 'interleaved'"),
    "one after the other": (
        lambda: Attention(interleaved=False),
        {"qkv": "interleaved", "out": "row"},
        "the style is 'fused'",
    ),
    "a gate by chunk": (lambda: Mlp(glu, read=8, inner=16), {"up": "column", "down": "row"}, MAY_BE_PAIRED),
    "no gate": (Mlp, {"up": "paired", "down": "row"}, "the style is 'column'"),
    "softmax": (lambda: Mlp(softmax), MLP, MAY_BE_PAIRED),
    "softmax before zeros": (lambda: Mlp(softmax, scale=0.0), MLP, MAY_BE_PAIRED),
    "penalty": (Penalised, MLP, "a layer's weight without the layer"),
    "constant": (lambda: Attention(heads=NUM_HEADS, interleaved=False), ATTENTION, "constant or a config"),
}


def trained():
    found = {}
    for name, (make, plan) in RIGHT.items():
        model = parallelize_module(drawn(make, dist.get_rank()), plan, example=(samples(0),))
        train_layers(model)
        found[name] = {key: value.clone() for key, value in full_state_dict(model).items()}
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_layout_has_a_style_that_equals_one_process(num_ranks, ranks, monkeypatch):
    if num_ranks == 4:
        monkeypatch.delitem(RIGHT, "interleaved, shared keys")  # two groups of heads
    for each in ranks(num_ranks).run(trained):
        for name, got in each.items():
            alone = drawn(RIGHT[name][0])
            train_layers(alone)
            for key, value in alone.state_dict().items():
                torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


class Small(nn.Module):
    """Two layers that could be cut, and one attribute after the other that can be wrong."""

    def __init__(self, inner=4, heads=2, drop=0.0):
        super().__init__()
        self.num_heads, self.drop = heads, drop
        self.up, self.down, self.norm = nn.Linear(4, inner), nn.Linear(inner, 4), nn.LayerNorm(4)

    def forward(self, x):
        return F.dropout(self.norm(self.down(self.up(x).relu())), self.drop, self.training)


class Constant(nn.Module):
    """Counts heads by a constant: cut, it would mix features of different heads without an error."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.q(x).unflatten(-1, (4, -1))
        return self.o((y.softmax(-1) * y).flatten(-2))


class ReadsWeight(nn.Module):
    """Uses the embedding's weight for the scores, past the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, tokens):
        return self.words(tokens) @ self.words.weight.t()


def shared():
    model = nn.ModuleDict({"a": Small(), "b": nn.Identity()})
    model["b"] = model["a"]
    return model


BOTH, HEADS = MLP, {"q": "heads", "o": "row"}


INPUTS = torch.ones(2, 4)


def cut(model, plan, example=(INPUTS,)):
    """Cut a model; where that is refused, see that nothing was cut."""
    before = list(model.parameters())
    try:
        return parallelize_module(model, plan, example=example)
    except ValueError:
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True)), "nothing is cut"
        raise


def one_key():
    with patch.object(zoo_text, "KEY_HEADS", 1):
        return zoo_text.Llama()


def train_fused_vit(plan, clip):
    kind = KINDS["ViT, fused qkv"]
    train(kind, cut(zoo_images.ViT().double(), plan, kind.batch(9)[:1]), clip)


def refusals():
    rank = dist.get_rank()
    hooked, inner = Small(), Small()
    hooked.up.register_forward_hook(lambda *_: None)
    cases = [
        *((words, partial(cut, drawn(make), plan, (samples(0),))) for make, plan, words in WRONG.values()),
        ("in two halves", lambda: cut(Mlp(glu, inner=18, read=9), {"up": "paired"})),
        ("'*.up' matches no module", lambda: cut(Small(), {"*.up": "column", "down": "row"})),
        ("style 'columns'; pass one of column, paired", lambda: cut(Small(), {"up": "columns"})),
        ("up has style 'column', and 'u*' gives it 'row'", lambda: cut(Small(), {"up": "column", "u*": "row"})),
        ("norm is a LayerNorm; style 'column' cuts an nn.Linear or", lambda: cut(Small(), BOTH | {"norm": "column"})),
        ("norm is a LayerNorm; style 'vocabulary' cuts an", lambda: cut(Small(), BOTH | {"norm": "vocabulary"})),
        ("up has hooks", lambda: cut(hooked, BOTH)),
        ("up (column) has 5 output features, which 2 ranks do not divide", lambda: cut(Small(5), BOTH)),
        ("down (Linear) fails in the cut model and not in the whole", lambda: cut(Small(), {"up": "column"})),
        ("RowParallelLinear got [2, 4]; expected 2 features in the", lambda: cut(Small(), {"down": "row"})),
        ("up makes 3 heads of 2 features, which", lambda: cut(Small(heads=3, inner=6), {"up": "heads", "down": "row"})),
        ("no attribute with their number or size", lambda: cut(Small(heads=None), {"up": "heads", "down": "row"})),
        ("up has 16 output features, which are", lambda: cut(Small(heads=2, inner=16), {"up": "fused", "down": "row"})),
        ("layers.0.k makes 1 heads of 2 features, which 2 ranks do not divide", lambda: cut(one_key(), LLAMA)),
        (
            "no numbers to compare of other.up, other.down",
            lambda: cut(Unread(), {"other.up": "column", "*.down": "row"}),
        ),
        ("0.up (Linear) fails in the cut model and not", lambda: cut(nn.Sequential(Small()), {"0": "narrow"})),
        ("transformer.wte.weight (whole) and", lambda: cut(zoo_gpt.TiedGPT(), {"lm_head": "vocabulary"})),
        ("leave a layer that stands under two names whole", lambda: cut(shared(), {"a.up": "column", "a.down": "row"})),
        ("ranks disagree", lambda: cut(Small(4 + 4 * rank), BOTH)),
        ("ranks disagree", lambda: cut(Small(), BOTH if rank else {"up": "column"})),
        ("is cut already", lambda: cut(cut(Small(), BOTH), BOTH)),
        ("returns other numbers than the", lambda: cut(Constant(), HEADS, (torch.randn(2, 8).cumsum(0) * 0 + 1,))),
        ("returns other numbers than the", lambda: cut(ReadsWeight(), {"words": "vocabulary"}, (torch.arange(4),))),
        ("pass example=(inputs of one forward)", lambda: cut(Small(), BOTH, None)),
        ("the inputs of tensor ranks, which work on the same samples", lambda: cut(Small(), BOTH, (INPUTS + rank,))),
        ("the inputs of tensor ranks, which work on the same samples", lambda: cut(Small(), BOTH)(INPUTS + rank)),
        ("the shapes of the inputs of tensor ranks", lambda: cut(Small(), BOTH)(torch.ones(2 + rank, 4))),
        (
            "needs the style 'inside'",
            lambda: train_fused_vit(PLANS["ViT"], partial(clip_tensor_parallel_, max_norm=1.0)),
        ),
        ("not with torch's clip_grad_norm_", lambda: train_fused_vit(FUSED, clip_alone)),
    ]
    found = [(words, message(call)) for words, call in cases]
    return found, message(lambda: cut(inner, BOTH)(INPUTS))


class Unread(Small):
    """Has two layers that it uses while it trains alone."""

    def __init__(self):
        super().__init__()
        self.other = Small()

    def forward(self, x):
        return super().forward(x) + (self.other(x) if self.training else 0)


def test_wrong_plans_are_refused_in_words_on_every_rank_before_anything_is_cut(ranks):
    for rank, (found, still_works) in enumerate(ranks(2).run(refusals)):
        wrong = [one for one in found if not one[1].startswith("ValueError") or one[0] not in one[1]]
        assert not wrong, (rank, wrong)
        assert still_works == "no error"


class Notes(Mlp):
    """Counts its calls, in a buffer and in a list, draws numbers and drops some."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.drop = [], 0.5

    def forward(self, x):
        self.calls += 1
        self.seen.append(torch.rand(1))
        x[..., 0] += 1  # in place
        return F.dropout(super().forward(x), self.drop, self.training)


def left_as_it_was():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model, x = drawn(Notes), samples(0)
    torch.set_rng_state(state)
    parallelize_module(model, MLP, example=(x,))
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
