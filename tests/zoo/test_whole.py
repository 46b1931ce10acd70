"""A model that is cut by a plan is compared with the whole one for an example: what no plan shows is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refused import message
from torch import nn

from distlab.comm import run
from distlab.rng import generator
from distlab.tensor_parallel import full_state_dict, parallelize_module

WIDTH, HEADS, UPDATES = 8, 4, 6
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

    def __init__(self, interleaved=True, shared=HEADS, heads=None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, shared, WIDTH // HEADS
        self.interleaved, self.constant = interleaved, heads
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * shared) * self.head_dim)
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


def norm(y):
    return F.layer_norm(y, y.shape[-1:])


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def batch(step):
    return torch.randn(3, 4, WIDTH, dtype=torch.float64, generator=generator(step, 0, "whole"))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(UPDATES):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
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
    "norm": (lambda: Mlp(norm), MLP, "leave both layers out"),
    "softmax before zeros": (lambda: Mlp(softmax, scale=0.0), MLP, MAY_BE_PAIRED),
    "penalty": (Penalised, MLP, "a layer's weight without the layer"),
    "constant": (lambda: Attention(heads=HEADS, interleaved=False), ATTENTION, "constant or a config"),
}


def trained():
    found = {}
    for name, (make, plan) in RIGHT.items():
        model = parallelize_module(build(make, dist.get_rank()), plan, example=(batch(0),))
        train(model)
        found[name] = {key: value.clone() for key, value in full_state_dict(model).items()}
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_layout_has_a_style_that_equals_one_process(num_ranks, monkeypatch):
    if num_ranks == 4:
        monkeypatch.delitem(RIGHT, "interleaved, shared keys")  # two groups of heads
    for each in run(trained, num_ranks, timeout_s=60):
        for name, got in each.items():
            alone = build(RIGHT[name][0])
            train(alone)
            for key, value in alone.state_dict().items():
                torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


def refused(make, plan):
    model = build(make)
    before = list(model.parameters())
    text = message(lambda: parallelize_module(model, plan, example=(batch(0),)))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True)), "nothing is cut"
    return text


def all_refused():
    return {name: refused(make, plan) for name, (make, plan, _) in WRONG.items()}


def test_a_wrong_style_is_refused_before_anything_is_cut_on_every_rank_with_the_right_one():
    for rank, each in enumerate(run(all_refused, 2, timeout_s=60)):
        for name, text in each.items():
            assert text.startswith(f"ValueError: rank {rank}: parallelize_module: "), (name, text)
            assert WRONG[name][2] in text, (name, text)


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
    model, x = build(Notes), batch(0)
    torch.set_rng_state(state)
    parallelize_module(model, MLP, example=(x,))
    assert torch.equal(state, torch.get_rng_state())
    assert (float(model.calls), len(model.seen), model.training) == (0, 0, True)
    assert torch.equal(x, batch(0))


def test_the_comparison_leaves_model_inputs_and_random_numbers_as_they_were():
    run(left_as_it_was, 2, timeout_s=30)


def refused_sizes():
    return message(lambda: parallelize_module(build(lambda: Mlp(glu, inner=18, read=9)), {"up": "paired"}))


def test_halves_that_the_ranks_do_not_divide_are_refused():
    for text in run(refused_sizes, 2, timeout_s=30):
        assert "up (paired) has 18 output features, which 2 ranks do not divide in two halves" in text
