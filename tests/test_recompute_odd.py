"""Recompute with models that remember, draw, or look at who their inputs are; torch's checkpoint beside it."""

import copy
import random

import numpy as np
import pytest
import torch
from refused import message
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distlab.blocks.modules.blocks import find_blocks
from distlab.recompute import recompute, recompute_blocks


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


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


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
    "attention": Attends,
}
# torch's checkpoint runs forward twice and leaves what that wrote; numbers of other generators are drawn anew.
TORCH_DIFFERS = {*MAKE} - {"attention"}


def train(module, call):
    """Three steps: losses, gradients and the state at the end."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer, told = torch.optim.SGD(module.parameters(), lr=0.1) if [*module.parameters()] else None, []
    for _ in range(3):
        x = torch.randn(3, 2, 4) if isinstance(module[1], Attends) else torch.randn(3, 4)
        x.requires_grad_()
        module.zero_grad()
        middle = call(module[1], torch.tanh(module[0](x)))
        loss = module[2](middle).square().sum()
        loss.backward()
        optimizer.step()
        told += [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return [*told, *module.state_dict().values(), torch.rand(1), torch.tensor([random.random(), np.random.rand()])]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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
    with_torch = train(copy.deepcopy(made), lambda module, x: checkpoint(module, x, use_reentrant=False))
    assert same(with_torch, expected) == (name not in TORCH_DIFFERS)


@pytest.mark.parametrize("inputs", [(0, 0, 0), (0, 1, 1), (0, 1, 0), (0, 1, 2)])
def test_who_is_who_among_the_inputs_is_kept(inputs):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def run(call):
        attention.zero_grad()
        tensors = [torch.full((2, 3, 4), 0.1 + n).cumsum(1).requires_grad_() for n in range(3)]
        call(attention, *(tensors[n] for n in inputs))[0].square().sum().backward()
        return [t.grad for t in tensors if t.grad is not None] + [p.grad.clone() for p in attention.parameters()]

    expected = run(lambda module, *given: module(*given))
    assert same(run(recompute), expected)
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


def test_the_items_of_the_outermost_lists_are_the_first_guess_and_a_choice_of_nothing_is_refused():
    model = Backbone()
    assert list(find_blocks(model)) == ["stages.0.blocks", "stages.1.blocks", "head.0"]
    assert list(find_blocks(model.head)) == ["0"]
    assert recompute_blocks(model, blocks=[Block, nn.Sequential]) == ["stages.0.blocks", "stages.1.blocks", "head"]
    lists = "no part that 'layers.*' chooses; its lists are stages.0.*, stages.1.*, head.*"
    for words, choice in (
        (lists, "layers.*"),
        ("no part that LSTM chooses", nn.LSTM),
        ("chosen by 3; pass a class, a pattern", 3),
    ):
        assert words in message(lambda choice=choice: recompute_blocks(Backbone(), blocks=choice))
