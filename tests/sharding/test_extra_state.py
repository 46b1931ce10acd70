"""What modules save beside tensors (`get_extra_state`) is in every state of FullyShard, as in module.state_dict()."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding import (
    FullyShard,
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    sharded_state_dict,
)


class Counts(nn.Module):
    """Keeps a scale and a history that are no buffers, as quantised layers do."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.history = nn.Linear(3, 3), 1.0, []

    def forward(self, x):
        self.scale *= 0.5
        self.history.append(torch.tensor(float(len(self.history))))
        return self.linear(x) * self.scale

    def get_extra_state(self):
        return {"scale": self.scale, "history": self.history}

    def set_extra_state(self, state):
        self.scale, self.history = state["scale"], state["history"]


def model():
    return nn.Sequential(Counts(), nn.Sequential(Counts(), nn.BatchNorm1d(3)))


def saved_and_loaded():
    first = FullyShard(model())
    first(torch.ones(4, 3))
    full, shards = full_state_dict(first), sharded_state_dict(first)
    kept = copy.deepcopy(full["0._extra_state"])
    first(torch.ones(4, 3))
    assert str(full["0._extra_state"]) == str(kept), "what was saved is no view"
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, shards)
    found = []
    for load in (
        lambda one: load_full_state_dict(one, full),
        lambda one: load_full_state_dict(one, full if dist.get_rank() == 1 else None, from_rank=1),
        lambda one: load_sharded_state_dict(one, states),
    ):
        other = FullyShard(model())
        load(other)
        found.append((other.module[1][0].scale, len(other.module[0].history)))
    without = {name: value for name, value in full.items() if name != "0._extra_state"}
    with pytest.raises(ValueError, match="0._extra_state is nothing in the state and a tensor in the model"):
        load_full_state_dict(first, without)
    return full, found


def test_extra_states_are_saved_and_loaded_in_every_form(ranks):
    for full, found in ranks(2).run(saved_and_loaded):
        plain = model()
        assert full.keys() == plain.state_dict().keys()
        plain.load_state_dict(full)
        assert (plain[0].scale, plain[1][0].scale, len(plain[0].history)) == (0.5, 0.5, 1)
        assert found == [(0.5, 1)] * 3
