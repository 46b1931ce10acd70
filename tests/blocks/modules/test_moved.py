"""Who kept a parameter whose values moved, into a shard or as parts to ranks, is told so: it would never train."""

import functools
import pickle

import torch
import torch.nn.functional as F
from torch import nn

from distlab.sharding import FullyShard
from distlab.tensor_parallel import parallelize_module


def model_of_two():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))


def sharded(model):
    return FullyShard(model)


def cut(model):
    return parallelize_module(model, {"0.0": "column", "0.2": "row"}, example=(torch.ones(2, 4),))


def message(action):
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


def uses_of_what_was(move):
    """Return what each use of a parameter from before says."""
    model, x = model_of_two(), torch.ones(2, 4)
    kept, bias = model[0][0].weight, model[0][0].bias
    early = torch.optim.AdamW(model.parameters())
    layer, closure = functools.partial(F.linear, weight=kept, bias=bias), lambda: x @ kept.t()
    moved = move(model)
    moved(x).sum().backward()
    uses = {
        "step": early.step,
        "zero_grad": early.zero_grad,
        "partial": lambda: layer(x),
        "closure": closure,
        "operator": lambda: kept + 1,
        "list": lambda: torch.cat([kept, kept]),
        "clip": lambda: nn.utils.clip_grad_norm_([kept], 1.0),
        "values": lambda: kept.data,
        "gradient": lambda: kept.grad,
        "pickle": lambda: pickle.dumps(kept),
    }
    facts = kept.shape, kept.dtype, isinstance(kept, nn.Parameter), {kept: 1}[kept], repr(kept)
    return {name: message(use) for name, use in uses.items()}, facts


def test_a_parameter_from_before_refuses_to_be_used_and_says_what_became_of_it(ranks):
    for move, words in ((sharded, "FullyShard moved it into a shard"), (cut, "gave each rank its part")):
        for rank, (texts, facts) in enumerate(ranks(2).run(uses_of_what_was, move)):
            for use, text in texts.items():
                assert text is not None, use
                assert text.startswith(f"rank {rank}: this is 0.0."), (use, text)
                assert words in text, (use, text)
                assert "must be built afterwards" in text
            assert facts == ((6, 4), torch.float32, True, 1, "MovedParameter(0.0.weight, shape [6, 4])")


def what_still_trains():
    """A layer that stays whole keeps its parameters, and an optimizer of these alone may be older."""
    model = nn.Sequential(*model_of_two(), nn.Linear(4, 2))
    early = torch.optim.SGD(model[1].parameters(), lr=0.1)
    start = model[1].weight.detach().clone()
    parallelize_module(model, {"0.0": "column", "0.2": "row"}, example=(torch.ones(2, 4),))
    model(torch.ones(2, 4)).sum().backward()
    early.step()
    return bool((model[1].weight != start).any())


def test_layers_that_a_plan_leaves_whole_keep_their_parameters(ranks):
    assert ranks(2).run(what_still_trains) == [True, True]


def groups_by_name():
    model = FullyShard(model_of_two())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(2, 4)).sum().backward()
    model.synchronize()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return None


def test_groups_of_shards_by_names_of_parameters_are_refused(ranks):
    for rank, text in enumerate(ranks(2).run(groups_by_name)):
        assert text is not None
        assert text.startswith(f"rank {rank}: group 1 of the optimizer has no parameters")
        assert "Use ShardedOptimizer" in text
