"""A small net of uneven parts, and steps of a sharded optimizer on it, which tests share."""

import torch
import torch.distributed as dist
from torch import nn

from distlab.rng import generator


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


class Net(nn.Module):
    """Layers of uneven sizes; one that a batch may leave out, one frozen, one of a different type."""

    def __init__(self, seed=0):
        super().__init__()
        self.first = nn.Linear(13, 17)
        self.second = nn.Linear(17, 11, bias=False)
        self.spare = nn.Linear(17, 11)
        self.wide = nn.Linear(11, 5).double()
        self.wide.bias.requires_grad_(False)
        self.register_buffer("shift", torch.full((5,), float(seed), dtype=torch.float64))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.normal_(std=0.3, generator=generator(seed, 0, name))

    @property
    def num_wanting(self):
        return sum(parameter.requires_grad for parameter in self.parameters())

    def forward(self, x, spare=True):
        hidden = self.first(x).relu()
        hidden = self.second(hidden) + (self.spare(hidden) if spare else 0)
        return self.wide(hidden.double()) + self.shift


def batch_of(step):
    return torch.randn(4, 13, generator=generator(step, dist.get_rank(), "batch"))


def run_steps(model, optimizer, steps, **options):
    for step in steps:
        model(batch_of(step), **options).square().mean().backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)
