"""Stages that cache, count, share and read numbers train like one process: the trial of a stage leaves no trace."""

import random
from operator import methodcaller

import pytest
import torch
from equal import Row, Task, assert_stages_equal, train, train_in_stages
from torch import nn

from distlab.plan import SCHEDULES, make_schedule
from distlab.rng import generator

UPDATES, MICROBATCHES, SIZE = 6, {2: 4, 3: 5, 4: 4}, 3
NAMES = [name for name, family in SCHEDULES.items() if family.placement != "copies"]  # those hold a model twice
REAL = torch.float64


def linear():
    return nn.Linear(4, 4, dtype=REAL)


class TwoNames(nn.Module):
    """One submodule under two names, one parameter under a third, and a buffer that is cut out of another."""

    def __init__(self):
        super().__init__()
        self.first = linear()
        self.again = nn.ModuleList([self.first])
        self.weight = self.first.weight
        self.register_buffer("table", torch.arange(8, dtype=REAL))
        self.register_buffer("part", self.table[:4])

    def forward(self, x):
        return torch.tanh(self.again[0](self.first(x)) @ self.weight) + self.part


class Caches(nn.Module):
    """Fills caches at its first forward: an attribute, a buffer, a dict and a list."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask, self.by_length, self.calls = linear(), None, {}, []

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1, 4, dtype=x.dtype, device=x.device)
            self.register_buffer("more", self.mask * 2, persistent=False)
            self.by_length[4] = self.mask + 1
        self.calls.append(len(x))
        return torch.tanh(self.layer(x * self.mask + self.more)) / self.by_length[4]


class Normed(nn.Module):
    """Batch norm of a micro-batch, spectral norm both ways, weight norm by a hook."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=REAL)
        self.old = nn.utils.spectral_norm(linear())
        self.new = nn.utils.parametrizations.spectral_norm(linear())
        self.weight = nn.utils.parametrizations.weight_norm(linear())

    def forward(self, x):
        return self.weight(self.new(torch.tanh(self.old(self.norm(x)))))


class ReadsNumbers(nn.Module):
    """Cannot run on the meta device; counts its calls, draws from two generators and leaves them as they were."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = linear(), 0

    def forward(self, x):
        self.calls += 1
        state = random.getstate()
        noise = random.Random(0).random() + torch.rand(1, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        random.setstate(state)
        if x.abs().sum().item() > 1e9 or self.calls > UPDATES * 5:
            raise ArithmeticError("called too often")
        return self.layer(x) * noise


KINDS = [TwoNames, Caches, Normed, ReadsNumbers]


def make_model(rank):
    torch.manual_seed(rank)
    return nn.Sequential(*(kind() for kind in KINDS))


def batch(step, num_microbatches):
    draw = generator(step, 0, "batch")
    return [torch.randn(SIZE * num_microbatches, 4, dtype=REAL, generator=draw) for _ in range(2)]


@pytest.mark.soak_where(world_size=(3, 4))
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.on_ranks
def test_odd_stages_train_like_one_process(world_size):
    num_microbatches = MICROBATCHES[world_size]
    task = Task(make_model, lambda step: batch(step, num_microbatches))
    row = Row(task, "adamw", cut=methodcaller("split", SIZE))
    expected = train(row, range(UPDATES)).state()
    for name in NAMES if world_size > 2 else ("one_f_one_b", "zb_v"):
        pipeline, own, _ = train_in_stages(row, make_schedule(name, world_size, num_microbatches), range(UPDATES))
        pipeline.close()
        assert_stages_equal(own, expected, name)
        for module in (module for stage in own.values() for module in stage.modules()):
            if isinstance(module, ReadsNumbers | Caches):
                made = module.calls
                count = made if isinstance(made, int) else len(made)
                assert count == UPDATES * num_microbatches, "the trial is not counted"
