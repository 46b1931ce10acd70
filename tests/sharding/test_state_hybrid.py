"""Hybrid sharding: either set of shards is the whole state, and loads on any number of ranks."""

import torch
import torch.distributed as dist

from distlab.models import GPT, GPTConfig
from distlab.rng import generator
from distlab.sharding import (
    FullyShard,
    full_optimizer_state,
    full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)

CONFIG = GPTConfig(vocab_size=31, context=8, num_layers=2, num_heads=2, hidden_size=12)


def trained(steps, seed=0, *, hybrid):
    """On 4 ranks two sets of two shards, or one set; the same data either way."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])] if hybrid else []
    rank = dist.get_rank()
    own, across = (groups[rank // 2], groups[2 + rank % 2]) if hybrid else (None, None)
    model = FullyShard(GPT(CONFIG, generator(seed, 0, "weights")), own, replicas=across)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    """The global batch of 4 samples is cut over the ranks, so that its mean does not depend on their number."""
    for step in steps:
        tokens = torch.randint(31, (4, 8), generator=generator(step, 0, "data"))
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        GPT.loss(model(mine), mine).backward()
        model.synchronize()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    return full_state_dict(model), full_optimizer_state(model, optimizer)["state"]


def save(directory):
    model, optimizer = trained(range(2), hybrid=True)
    torch.save(sharded_state_dict(model, optimizer), directory / str(dist.get_rank()))
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


def load(directory, files, hybrid):
    model, optimizer = trained([], seed=9, hybrid=hybrid)
    states = [torch.load(directory / str(file), weights_only=True) for file in files]
    load_sharded_state_dict(model, states, optimizer)
    before = whole(model, optimizer)
    train(model, optimizer, range(2, 4))
    return before, whole(model, optimizer)


def largest_difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(largest_difference(one[key], other[key]) for key in one)
    return float((one.double() - other.double()).abs().max())


def test_either_set_of_shards_loads_anywhere_and_training_goes_on(ranks, tmp_path):
    results = ranks(4).run(save, tmp_path)
    saved, later = results[0]
    for files, world_size, hybrid in (([0, 1], 4, True), ([2, 3], 4, True), ([2, 3], 2, False)):
        for before, after in ranks(world_size).run(load, tmp_path, files, hybrid):
            assert largest_difference(before[0], saved[0]) == largest_difference(before[1], saved[1]) == 0.0
            assert largest_difference(after[0], later[0]) <= (0.0 if hybrid else 1e-5)
