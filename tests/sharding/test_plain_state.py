"""States go from FullyShard to plain torch and back: plain AdamW goes on as one process does, and so does FullyShard.

So does the state of FSDP2: `get_optimizer_state_dict(full_state_dict=True)` of torch 2.13 is by names too, and plain
torch.optim.AdamW takes it by its own `load_state_dict`.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.rng import generator
from distlab.sharding import (
    FullyShard,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)

STEPS = 6


class Encoder(nn.Module):
    """Blocks between a root whose parameters come first and last, a tied matrix, a frozen bias, a 0-dim scale."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.pooler = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.table.weight
        self.double()
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator(0, 0, name))
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x).tanh()
        return self.head(x), self.pooler(x[:, 0])  # the pooler's output is not in the loss: its gradient stays None


def adamw(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)


def update(model, optimizer, steps):
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if isinstance(model, FullyShard) else (0, 1)
    for step in steps:
        tokens = torch.randint(11, (6, 4), generator=generator(step, 0, "tokens"))[rank::num_ranks]
        logits, _ = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        if isinstance(model, FullyShard):
            model.synchronize()
        optimizer.step()
        optimizer.zero_grad()


def alone(start=None, steps=range(STEPS)):
    model = Encoder()
    optimizer = adamw(model)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    update(model, optimizer, steps)
    return model.state_dict(), optimizer.state_dict()


def on_ranks(start=None, units=("blocks.0", "blocks.1", "pooler")):
    """Train the first half, or the second from a plain state; return the full states."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none about unused parameters: the pooler has a unit of its own
        model = FullyShard(Encoder(), units=units)
        optimizer = adamw(model)
        if start is not None:
            load_full_state_dict(model, start[0])
            load_full_optimizer_state(model, optimizer, start[1])
        update(model, optimizer, range(3) if start is None else range(3, STEPS))
        return full_state_dict(model), full_optimizer_state(model, optimizer)


def close(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one) <= 1e-10


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_states_load_into_plain_torch_and_back(ranks, world_size):
    model, state = alone()
    half = alone(steps=range(3))
    names = [name for name, parameter in Encoder().named_parameters() if parameter.requires_grad]
    for values, kept in ranks(world_size).run(on_ranks):
        assert [group["params"] for group in kept["param_groups"]] == [names]  # plain torch's own order
        assert [name for name in kept["state"] if kept["state"][name]] == [n for n in names if "pooler" not in n]
        counts = [one["step"] for one in kept["state"].values() if one]
        assert len({count.data_ptr() for count in counts}) == len(counts), "each tensor counts its own steps"
        there = alone((values, kept), range(3, STEPS))
        assert close(there[0], model)
        for number, one in state["state"].items():
            assert all(torch.allclose(there[1]["state"][number][key], one[key], atol=1e-10, rtol=0) for key in one)
    for values, kept in ranks(world_size).run(on_ranks, half):
        assert close(values, model)
        assert {str(one["step"]) for one in kept["state"].values() if one} == {"tensor(6.)"}


def inside_a_unit(half):
    """The pooler shares the root's shard here, and its plain state is empty."""
    model = FullyShard(Encoder(), units=["blocks.0"])
    optimizer = adamw(model)
    load_full_state_dict(model, half[0])
    load_full_optimizer_state(model, optimizer, half[1])
    kept = full_optimizer_state(model, optimizer)["state"]
    groups = {"state": {}, "param_groups": [{**half[1]["param_groups"][0], "params": [0, 1]}]}
    return kept, message(lambda: load_full_optimizer_state(model, optimizer, groups))


def test_a_plain_state_that_shares_a_shard(ranks):
    half = alone(steps=range(3))
    half[1]["state"][0]["step"] += 1  # a tensor that counts other steps than those around it
    names = [name for name, parameter in Encoder().named_parameters() if parameter.requires_grad]
    for kept, text in ranks(2).run(inside_a_unit, half):
        assert kept["pooler.weight"] == {}
        assert [kept[names[at]]["step"] for at in (0, 1)] == [4, 3]
        for number, one in half[1]["state"].items():
            assert all(torch.equal(kept[names[number]][key], one[key]) for key in one)
        assert "groups of [2] parameters, and this one of [8]" in text
