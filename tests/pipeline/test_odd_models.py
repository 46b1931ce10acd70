"""Stages that cache, count, share, draw and read numbers train like one process; their trial leaves no trace."""

import random
from operator import methodcaller

import pytest
import torch
from equal import Row, Task, assert_stages_equal, train, train_in_stages
from torch import nn

from distlab.plan import make_schedule
from distlab.rng import generator

UPDATES, MICROBATCHES, SIZE = 6, 4, 3
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


class Counts(nn.Module):
    """Fills caches at its first forward, counts its calls, draws numbers, and cannot run on the meta device."""

    def __init__(self):
        super().__init__()
        self.layer, self.mask, self.by_length, self.calls = linear(), None, {}, []
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1, 4, dtype=x.dtype, device=x.device)
            self.register_buffer("more", self.mask * 2, persistent=False)
            self.by_length[4] = self.mask + 1
        self.calls.append(x.abs().sum().item())
        self.count += 1
        drawn = random.random() + torch.rand(1)
        return torch.tanh(self.layer(x * self.mask + self.more) + 0 * drawn) / self.by_length[4]


def model(rank):
    torch.manual_seed(rank)
    return nn.Sequential(TwoNames(), Counts(), nn.BatchNorm1d(4, dtype=REAL), TwoNames(), Counts())


def batch(step):
    draw = generator(step, 0, "batch")
    return [torch.randn(SIZE * MICROBATCHES, 4, dtype=REAL, generator=draw) for _ in range(2)]


@pytest.mark.on_ranks(2)
def test_odd_stages_train_like_one_process_and_their_trial_leaves_no_trace():
    row = Row(Task(model, batch), "adamw", cut=methodcaller("split", SIZE))
    expected = train(row, range(UPDATES)).state()
    for name in ("one_f_one_b", "zb_v"):
        torch.manual_seed(1)
        random.seed(1)
        pipeline, own, _ = train_in_stages(row, make_schedule(name, 2, MICROBATCHES), range(UPDATES))
        pipeline.close()
        assert_stages_equal(own, expected, name)
        counting = [module for stage in own.values() for module in stage.modules() if isinstance(module, Counts)]
        assert all(module.count == len(module.calls) == UPDATES * MICROBATCHES for module in counting)
        drawn = random.random(), torch.rand(1)
        random.seed(1)
        torch.manual_seed(0)  # of the model, which each rank builds
        model(0)
        for _ in range(len(counting) * UPDATES * MICROBATCHES):
            random.random(), torch.rand(1)
        assert drawn == (random.random(), torch.rand(1)), "a trial draws nothing"
