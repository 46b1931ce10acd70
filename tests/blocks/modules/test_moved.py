"""Who kept a parameter whose values moved, into a shard or as parts to ranks, is told so: it would never train."""

import functools
import pickle

import torch
import torch.nn.functional as F
from refused import message
from torch import nn

from distlab.sharding import FullyShard
from distlab.tensor_parallel import parallelize_module


def model_of_two():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))


def cut(model):
    return parallelize_module(model, {"0.0": "column", "0.2": "row"}, example=(torch.ones(2, 4),))


def uses_of_what_was(move):
    """Return what each use of a parameter from before says."""
    model, x = model_of_two(), torch.ones(2, 4)
    kept, bias = model[0][0].weight, model[0][0].bias
    early = torch.optim.AdamW(model.parameters())
    layer = functools.partial(F.linear, weight=kept, bias=bias)
    moved = move(model)
    moved(x).sum().backward()
    uses = [
        *(early.step, early.zero_grad, lambda: layer(x), lambda: x @ kept.t(), lambda: kept + 1),
        *(lambda: torch.cat([kept, kept]), lambda: nn.utils.clip_grad_norm_([kept], 1.0)),
        *(lambda: kept.data, lambda: kept.grad, lambda: pickle.dumps(kept)),
    ]
    assert (kept.shape, kept.dtype, isinstance(kept, nn.Parameter), {kept: 1}[kept]) == ((6, 4), torch.float32, True, 1)
    assert repr(kept) == "MovedParameter(0.0.weight, shape [6, 4])"
    return [message(use) for use in uses]


def what_still_trains():
    """A layer that stays whole keeps its parameters, and an optimizer of these alone may be older."""
    model = nn.Sequential(*model_of_two(), nn.Linear(4, 2))
    early = torch.optim.SGD(model[1].parameters(), lr=0.1)
    start = model[1].weight.detach().clone()
    cut(model)(torch.ones(2, 4)).sum().backward()
    early.step()
    return bool((model[1].weight != start).any())


def groups_by_name():
    model = FullyShard(model_of_two())
    named = list(model.named_parameters())
    groups = [[p for name, p in named if ("bias" in name) == is_bias] for is_bias in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    model(torch.ones(2, 4)).sum().backward()
    model.synchronize()
    return message(optimizer.step)


def test_a_parameter_from_before_refuses_to_be_used_and_says_what_became_of_it(ranks):
    moves = {"FullyShard moved it into a shard": FullyShard, "gave each rank its part": cut}

    def all_of_it():
        return {words: uses_of_what_was(move) for words, move in moves.items()}, what_still_trains(), groups_by_name()

    for rank, (said, trains, groups) in enumerate(ranks(2).run(all_of_it)):
        for words, texts in said.items():
            for text in texts:
                assert text.startswith(f"RuntimeError: rank {rank}: this is 0.0."), text
                assert words in text, text
                assert "must be built afterwards" in text
        assert trains
        assert groups.startswith(f"ValueError: rank {rank}: group 1 of the optimizer has no parameters")
        assert "Use ShardedOptimizer" in groups
