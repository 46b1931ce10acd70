"""Recompute gives the same bits as keeping everything, keeps inputs alone, and notices what is not the same twice.

Also of models that remember, draw, or look at who their inputs are.
"""

import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from distlab.blocks.models import GPT, GPTConfig
from distlab.blocks.modules.blocks import find_blocks
from distlab.data_parallel import DataParallel
from distlab.precision import autocast
from distlab.recompute import RecomputePlainly, recompute, recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard

CONFIG = GPTConfig(vocab_size=65, context=16, num_layers=3, num_heads=2, hidden_size=24, dropout=0.1)


def gpt(dtype=torch.float32, **changes):
    model = GPT(GPTConfig(**{**vars(CONFIG), **changes}), generator(0, 0, "weights")).to(dtype)
    tokens = torch.randint(65, (3, 16), generator=generator(0, 0, "tokens"))
    return model, tokens


def gradients_of(model, tokens, dtype="float32"):
    torch.manual_seed(5)
    model.zero_grad()
    with autocast(dtype):
        loss = GPT.loss(model(tokens), tokens)
    loss.backward()
    return [loss.detach(), torch.rand(1), *(p.grad.clone() for p in model.parameters())]  # the generator too


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.equality("recompute")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_with_dropout_and_autocast_give_the_same_bits(dtype):
    plain, tokens = gpt()
    expected = gradients_of(plain, tokens, dtype)
    for options, count in (({}, 3), ({"every": 2}, 2), ({"part": "attention"}, 3)):
        model, _ = gpt()
        names = recompute_blocks(model, **options)
        assert len(names) == count
        assert same(gradients_of(model, tokens, dtype), expected), options
        assert list(model.state_dict()) == list(plain.state_dict())


def test_a_copy_of_a_model_recomputes_its_own_blocks():
    model, tokens = gpt()
    recompute_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    plain, _ = gpt()
    assert same(gradients_of(model, tokens), gradients_of(plain, tokens))
    assert not same(gradients_of(twin, tokens), gradients_of(plain, tokens))


def test_any_inputs_and_outputs():
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x, nested, *, scale, add):
        hidden = (x @ weight).tanh() * nested["a"][0]
        return {"sum": hidden + (nested["b"] if add else 0), "pair": (hidden.exp() * scale, nested["index"] + 1)}

    def run(call):
        torch.manual_seed(3)
        x, a = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        b, index = torch.randn(2, 4), torch.arange(3)  # want no gradient
        weight.grad = None
        out = call(function, x, {"a": [a], "b": b, "index": index, "none": None}, scale=a[0], add=True)
        (out["sum"].sum() + out["pair"][0].square().sum()).backward()
        return [x.grad, a.grad, weight.grad, out["sum"].detach(), out["pair"][1]]

    assert same(run(recompute), run(lambda function, *inputs, **options: function(*inputs, **options)))


def test_without_gradients_nothing_is_kept_and_plain_recompute_agrees_within_its_limits():
    layer, table = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Embedding(5, 3)
    recompute(table, torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad[1:3].eq(1).all(), "a first layer, whose input wants no gradient, learns"
    x = torch.randn(2, 3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(recompute(layer, x), layer(x))
    results = []
    for call in (lambda: layer(x), lambda: recompute(layer, x), lambda: RecomputePlainly.apply(layer, x)):
        layer.zero_grad()
        x.grad = None
        call().square().sum().backward()
        results.append([x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert not RecomputePlainly.apply(layer, x.detach()).requires_grad, "the limit that its text speaks of"


def test_backward_twice_and_a_recompute_inside_another():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def inner(x):
        return layers[1](x).tanh()

    def outer(x):
        return layers[2](recompute(inner, layers[0](x).tanh())).tanh()

    def run(call):
        x = torch.ones(2, 4, requires_grad=True)
        layers.zero_grad()
        loss = call(outer, x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(p.grad.clone() for p in layers.parameters())]

    assert same(run(recompute), run(lambda function, x: layers[2](inner(layers[0](x).tanh())).tanh()))


def test_what_is_not_the_same_twice_is_an_error():
    widths = iter([3, 4])

    def changing(x):
        return (x[:, : next(widths)] * x[:, :1]).exp()

    loss = recompute(changing, torch.randn(2, 5, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"changing saved .* first difference is number 1: \[2, 3\]"):
        loss.backward()
    x = torch.randn(2, 5, requires_grad=True) * 1
    out = recompute(torch.exp, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def saved_bytes(model, tokens):
    """Bytes of all storages that autograd keeps, parameters apart."""
    held = {p.untyped_storage()._cdata for p in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            found[storage._cdata] = storage  # kept, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        x = model.token_embedding(tokens)
        for block in model.blocks:
            x = block(x)
        del x
    return sum(storage.nbytes() for storage in found.values())


def test_of_each_block_only_the_input_is_kept():
    model, tokens = gpt(dropout=0.0, tied=False)
    keeps_all = saved_bytes(model, tokens)
    recompute_blocks(model)
    inputs = 3 * (3 * 16 * 24 * 4)  # three blocks, [B, S, H] of float32
    assert saved_bytes(model, tokens) == inputs + tokens.nbytes
    assert keeps_all > 10 * inputs


@pytest.mark.equality("recompute")
def test_data_parallel_and_sharding_train_as_without(ranks):
    """Gradients arrive in the ordinary backward, so buckets fill and go as they would have, and units are whole."""

    def train(wrap, recomputing):
        model, _ = gpt(dropout=0.0)
        if recomputing:
            recompute_blocks(model)
        wrapped = wrap(model)
        called = wrapped if isinstance(wrapped, nn.Module) else model
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        for step in range(2):
            tokens = torch.randint(65, (2, 16), generator=generator(1, dist.get_rank(), f"tokens {step}"))
            wrapped.zero_grad()
            GPT.loss(called(tokens), tokens).backward()
            wrapped.synchronize()
            optimizer.step()
        return [p.detach().clone() for p in called.parameters()]

    def both():
        ways = (lambda model: DataParallel(model, bucket_bytes=4000), FullyShard)
        return [(train(way, False), train(way, True)) for way in ways]

    for pairs in ranks(2).run(both):
        assert all(same(plain, recomputed) for plain, recomputed in pairs)


class Own(nn.Module):
    """Keeps running means in two buffers of its own: one is written in place, one is replaced; and a large one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("large", torch.zeros(70_000))
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.replaced = self.replaced * 0.9 + x.detach().mean(0)
        self.large += 1
        return torch.tanh(x * self.weight + self.mean + self.replaced) * self.large[0]


class ByKernel(nn.Module):
    """Updates its statistics in batch norm's kernel, and is no BatchNorm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


class Draws(nn.Module):
    """Draws from all three generators."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x) * random.random() * np.random.rand() + torch.rand(()))


def spectral():
    return nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    )


MAKE = {
    "cumulative batch norm": lambda: nn.BatchNorm1d(4, momentum=None),
    "its kernel": ByKernel,
    "own buffers": Own,
    "spectral norm": spectral,
    "random numbers": Draws,
}


def train(module, call):
    """Three steps: losses, gradients and the state at the end."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer, told = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        module.zero_grad()
        middle = call(module[1], torch.tanh(module[0](x)))
        loss = module[2](middle).square().sum()
        loss.backward()
        optimizer.step()
        told += [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return [*told, *module.state_dict().values(), torch.rand(1), torch.tensor([random.random(), np.random.rand()])]


@pytest.mark.parametrize("name", MAKE)
def test_everything_is_the_same_bits_and_is_updated_once(name):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), MAKE[name](), nn.Linear(4, 1))
    ways = {
        "module": recompute,
        "method": lambda module, x: recompute(module.forward, x),
        "function": lambda module, x: recompute(lambda y: module(y), x),
        "default": lambda module, x: recompute(lambda y, forward=module.forward: forward(y), x),
    }
    expected = train(copy.deepcopy(made), lambda module, x: module(x))
    for call, way in ways.items():
        assert same(train(copy.deepcopy(made), way), expected), call


def test_who_is_who_among_the_inputs_is_kept():
    """Attention asks whether query is key."""
    seen = []

    def looks(x, y, *, also):
        seen.append((x is y, x is also, x is also[0] if isinstance(also, list) else None))
        return x * y

    x, weight = torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    recompute(looks, x, x, also=[x]).sum().backward()
    recompute(looks, weight, x, also=weight).sum().backward()
    assert seen == [(True, False, True)] * 2 + [(False, True, None)] * 2


def test_gradients_can_be_differentiated_again_and_inside_of_a_recompute_they_are_refused():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def penalty(call):
        layer.zero_grad()
        x = torch.ones(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(call(layer, x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    assert same(penalty(recompute), penalty(lambda module, x: module(x)))

    def inside(x):
        return torch.autograd.grad(layer(x).sum(), x, create_graph=True)[0]

    with pytest.raises(RuntimeError, match="inside asks for gradients while its first run goes on"):
        recompute(inside, torch.ones(2, 4, requires_grad=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


class Backbone(nn.Module):
    """Lists in lists, as Swin and ConvNeXt have."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.ModuleList(nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())}) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(4, 1))

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage["blocks"](x)
        return self.head(x)


DEEP = [f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)]
CHOICES = [
    ("stages.1.blocks.[1-9]", DEEP[3:]),
    (lambda name, module: isinstance(module, Block) and name.endswith("0"), DEEP[::2]),
    (["stem", Block, "head.*"], ["stem", *DEEP, "head.0"]),
]


def test_blocks_are_chosen_by_class_pattern_or_function():
    def gradients(one):
        one.zero_grad()
        one(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        return [p.grad for p in one.parameters()]

    for choice, expected in CHOICES:
        torch.manual_seed(0)
        model = Backbone()
        plain, every_other = copy.deepcopy(model), copy.deepcopy(model)
        assert list(find_blocks(model, choice)) == expected
        assert recompute_blocks(model, blocks=choice) == expected
        assert same(gradients(model), gradients(plain))
        assert recompute_blocks(every_other, 2, blocks=choice) == expected[::2]


def test_the_items_of_the_outermost_lists_are_the_first_guess():
    model = Backbone()
    assert list(find_blocks(model)) == ["stages.0.blocks", "stages.1.blocks", "head.0"]
    assert list(find_blocks(model.head)) == ["0"]
    assert recompute_blocks(model, blocks=[Block, nn.Sequential]) == ["stages.0.blocks", "stages.1.blocks", "head"]


def test_refusals():
    model, _ = gpt()
    recompute_blocks(model)
    lists = "no part that 'layers.*' chooses; its lists are stages.0.*, stages.1.*, head.*"
    for words, call in (
        ("at least 1", lambda: recompute_blocks(gpt()[0], 0)),
        ("0 blocks", lambda: recompute_blocks(nn.Linear(2, 2))),
        ("none has a 'mixture'", lambda: recompute_blocks(gpt()[0], part="mixture")),
        ("recompute already", lambda: recompute_blocks(model)),
        (lists, lambda: recompute_blocks(Backbone(), blocks="layers.*")),
        ("no part that LSTM chooses", lambda: recompute_blocks(Backbone(), blocks=nn.LSTM)),
        ("chosen by 3; pass a class, a pattern", lambda: recompute_blocks(Backbone(), blocks=3)),
    ):
        assert words in message(call)
