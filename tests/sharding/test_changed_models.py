"""What a model got after it was wrapped, parameters in one memory, copies: refused in words on every rank."""

import copy
import io
import pickle

import pytest
import torch
from refused import message
from torch import nn

from distlab.data_parallel import DataParallel
from distlab.sharding import FullyShard, ShardedOptimizer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def unfrozen(stage):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = ShardedOptimizer(model, sgd, stage=stage)
    texts = []
    for step in range(2):
        model[0].weight.requires_grad_(step == 1)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        texts.append(message(optimizer.synchronize))
    return texts


@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_unfrozen_is_named_on_every_rank(ranks, stage):
    for rank, texts in enumerate(ranks(2).run(unfrozen, stage)):
        assert texts[0] == "no error"
        assert texts[1].startswith(f"RuntimeError: rank {rank}: step 0: 0.weight was frozen when ShardedOptimizer")


def one_memory(first, second):
    second.weight.data = first.weight.data


def a_part_of_it(first, second):
    second.bias.data = first.weight.data[3]


def columns_beside_columns(first, second):
    first.weight.data, second.weight.data = torch.randn(4, 8).chunk(2, 1)


def columns_of_columns(first, second):
    both = torch.randn(4, 7)
    first.weight.data, second.weight.data = both[:, :4], both[:, 3:]


def tied(first, second):
    second.weight = first.weight


def end_to_end(first, second):
    first.weight.data, second.weight.data = torch.randn(2, 4, 4).unbind()


CASES = [one_memory, a_part_of_it, columns_of_columns, columns_beside_columns, tied, end_to_end]


def model_of(case):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    case(*model)
    return model


def built(technique):
    make = FullyShard if technique == "FullyShard" else lambda model: ShardedOptimizer(model, sgd)
    return [message(lambda case=case: make(model_of(case))) for case in CASES]


@pytest.mark.parametrize("technique", ["FullyShard", "ZeRO"])
def test_two_parameters_in_one_memory_are_refused_and_neighbours_are_not(ranks, technique):
    for texts in ranks(2).run(built, technique):
        for text in texts[:4]:
            assert "lie in the same memory, and are two parameters" in text
            assert "Give the layers one parameter" in text
        assert texts[4:] == ["no error"] * 2


def copies():
    """What each way to copy or to save says, of each wrapped thing; what may still be done."""
    ways = {
        "save": lambda one: torch.save(one, io.BytesIO()),
        "pickle": pickle.dumps,
        "deepcopy": copy.deepcopy,
    }
    sharded = FullyShard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)), units=["0"])
    module = nn.Sequential(nn.Linear(4, 4))
    zero, other = ShardedOptimizer(module, sgd), nn.Sequential(nn.Linear(4, 4))
    replicas = DataParallel(other)
    things = {"FullyShard": sharded, "ShardedOptimizer": zero, "DataParallel": replicas}
    texts = {
        thing: [message(lambda way=way, one=one: way(one)) for way in ways.values()] for thing, one in things.items()
    }
    texts["a unit"] = [message(lambda: copy.deepcopy(sharded.module[0]))]
    free = [message(lambda way=way, one=one: way(one)) for way in ways.values() for one in (module, other)]
    return texts, free


def test_what_is_wrapped_is_not_copied_or_saved_and_says_what_to_do(ranks):
    words = {
        "ShardedOptimizer": "Save state_dict() on every rank, or full_state_dict()",
        "DataParallel": "Save or copy the module",
    }
    for rank, (texts, free) in enumerate(ranks(2).run(copies)):
        for thing, said in texts.items():
            for text in said:
                assert text.startswith(f"RuntimeError: rank {rank}: "), (thing, text)
                assert "cannot be pickled or copied" in text
                assert words.get(thing, "full_state_dict(model) returns the whole state") in text
        assert set(free) == {"no error"}


class Lookahead:
    """As people write it: around any optimizer, with slow values of the parameters in its groups."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = [one.detach().clone() for one in self.parameters()]

    def parameters(self):
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for slow, fast in zip(self.slow, self.parameters(), strict=True):
            slow.add_(fast.detach() - slow, alpha=0.5)
            fast.copy_(slow)


def around(split):
    model = nn.Sequential(nn.Linear(4, 1))  # the last rank of three owns nothing where tensors are dealt out
    sharded = ShardedOptimizer(model, sgd, split=split)
    texts = []
    for optimizer in (sharded, Lookahead(sharded), sharded):
        sharded.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model[0].weight.clamp_(-1, 1)  # on all ranks
        texts.append(message(sharded.synchronize))
        if texts[-1] == "no error":
            optimizer.step()
    return texts


@pytest.mark.parametrize("split", ["elements", "tensors"])
def test_an_optimizer_around_zero_that_changes_pieces_is_told_on_every_rank(ranks, split):
    for rank, (*fine, last) in enumerate(ranks(3).run(around, split)):
        assert fine == ["no error"] * 2
        assert last.startswith(f"RuntimeError: rank {rank}: step 2: pieces were changed outside of step()"), last
        assert "build it in make_optimizer" in last
