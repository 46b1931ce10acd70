"""Tensors that are used for the first time after a state was loaded: they begin to count there, as in one process.

Training is stopped after step 2. `late` has no state then, and `sometimes` another count of steps than its unit. It
goes on in plain torch, on other ranks or from a plain state, and must end as one process that never stopped.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding import (
    FullyShard,
    ShardedOptimizer,
    ShardedState,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)

STOP, STEPS = 3, 7
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """All of it is one unit; `never` has the last elements, so the last rank may hold nothing that was updated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 5)
        self.sometimes = nn.Linear(5, 5)
        self.late = nn.Linear(5, 5)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.never = nn.Linear(5, 40)
        self.double()

    def forward(self, tokens, step):
        x = self.embedding(tokens)
        x = x + self.sometimes(x).tanh() if step in (1, 4) else x
        return x + self.late(x).tanh() if step >= STOP else x


def losses(model, steps):
    """Yield each step's loss on this rank's part of the batch."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        tokens = torch.randint(11, (12, 4), generator=torch.Generator().manual_seed(step))
        yield model(tokens.chunk(num_ranks)[rank], step).square().mean()


def alone(name, steps=range(STEPS), start=None):
    """Train in one process; return the model's state and the optimizer's."""
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    for loss in losses(model, steps):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


class Fully:
    """FullyShard, with what a test needs to do with it."""

    def __init__(self, name):
        self.model = FullyShard(Net())
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.parts = [ShardedState(self.model, self.optimizer)]

    def train(self, steps):
        for loss in losses(self.model, steps):
            loss.backward()
            self.model.synchronize()
            self.optimizer.step()
            self.model.zero_grad()

    def full(self):
        return full_state_dict(self.model), full_optimizer_state(self.model, self.optimizer)

    def load(self, start):
        load_full_state_dict(self.model, start[0])
        load_full_optimizer_state(self.model, self.optimizer, start[1])


class Zero:
    """ShardedOptimizer, with the same."""

    def __init__(self, name):
        self.model = Net()
        self.optimizer = ShardedOptimizer(self.model, OPTIMIZERS[name], stage=2, unused="zeros", bucket_bytes=400)
        self.parts = [self.optimizer]

    def train(self, steps):
        for loss in losses(self.model, steps):
            loss.backward()
            self.optimizer.synchronize()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def full(self):
        return {name: one.clone() for name, one in self.model.state_dict().items()}, self.optimizer.full_state_dict()

    def load(self, start):
        self.model.load_state_dict(start[0])
        self.optimizer.load_full_state_dict(start[1])


def trained(way, name, steps, start=None, shards=None):
    """Train on ranks, from a full state or from shards; return the full states and this rank's shards."""
    one = way(name)
    if start is not None:
        one.load(start)
    if shards is not None:
        for number, part in enumerate(one.parts):
            part.load_shards([each[number] for each in shards])
    one.train(steps)
    return one.full(), [copy.deepcopy(part.shard_state()) for part in one.parts]


def check(expected, got):
    for key, value in expected[0].items():
        torch.testing.assert_close(got[0][key], value, rtol=0, atol=1e-10, msg=key)
    names = [name for name, _ in Net().named_parameters()]
    kept = {names[key] if isinstance(key, int) else key: one for key, one in got[1]["state"].items()}
    for key, one in expected[1]["state"].items():
        for what, value in one.items():  # NAdam's product is in float32 until it is loaded
            close = {"rtol": 0, "atol": 1e-10} if value.dim() else {"rtol": 1e-6, "atol": 0, "check_dtype": False}
            torch.testing.assert_close(kept[names[key]][what], value, **close)
    assert not kept.get("never.weight")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", [Fully, Zero])
def test_what_ranks_saved_goes_on_in_plain_torch_and_back(ranks, way, name):
    whole, half = alone(name), alone(name, range(STOP))
    results = ranks(3).run(trained, way, name, range(STOP))
    for full, _ in results:
        check(half, full)
        check(whole, alone(name, range(STOP, STEPS), full))
    for full, _ in ranks(2).run(trained, way, name, range(STOP, STEPS), half):
        check(whole, full)


@pytest.mark.parametrize("way", [Fully, Zero])
def test_shards_go_on_on_other_ranks(ranks, way):
    whole = alone("AdamW")
    results = ranks(3).run(trained, way, "AdamW", range(STOP))
    shards, start = [own for _, own in results], results[0][0] if way is Zero else None
    for num_ranks in (2, 3):
        if way is Zero:  # its shards are of the optimizer alone
            for full, _ in ranks(num_ranks).run(of_zero, start, shards):
                check(whole, full)
        else:
            for full, _ in ranks(num_ranks).run(trained, way, "AdamW", range(STOP, STEPS), None, shards):
                check(whole, full)


def of_zero(start, shards):
    one = Zero("AdamW")
    one.model.load_state_dict(start[0])
    one.optimizer.load_shards([each[0] for each in shards])
    one.train(range(STOP, STEPS))
    return one.full(), None


def own_shard(way):
    """A rank that goes on where it stopped needs its own shard alone."""
    one = way("AdamW")
    one.train(range(STOP))
    own, state = copy.deepcopy(one.parts[0].shard_state()), one.full()
    other = way("AdamW")
    other.model.load_state_dict(state[0]) if way is Zero else None
    other.parts[0].load_shards([own])
    other.train(range(STOP, STEPS))
    return other.full()


@pytest.mark.parametrize("way", [Fully, Zero])
def test_a_rank_goes_on_from_its_own_shard(ranks, way):
    whole = alone("AdamW")
    for full in ranks(3).run(own_shard, way):
        check(whole, full)
