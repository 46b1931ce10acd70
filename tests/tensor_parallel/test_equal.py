"""A split GPT trains like one process, however it is split, and repeats bit for bit."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.models import GPT, GPTConfig
from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.tensor_parallel import clip_tensor_parallel_, full_state_dict, parallelize

CONFIG = GPTConfig(vocab_size=257, context=13, num_layers=2, num_heads=12, hidden_size=24, tied=True)
SHORT = replace(CONFIG, num_layers=1)  # for 3 and 4 ranks, that share two cores and wait at each exchange
UNTIED = GPTConfig(vocab_size=257, context=12, num_layers=1, num_heads=12, hidden_size=12, tied=False)
LENGTH = 12  # 2, 3 and 4 ranks divide it, and it is shorter than the context
WAYS = {
    "whole sequences": {},
    "in parts": {"num_parts": 3},
    "sequence parallel": {"sequence_parallel": True},
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
MAX_NORM = 0.05


def awkward_model(rank, config=CONFIG):
    """Odd vocabulary, tied weight, frozen parameters, biases not zero, other weights on every rank."""
    model = GPT(config, generator(0, rank, "weights")).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(std=0.3, generator=generator(0, rank, name))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    model.blocks[0].attention_norm.weight.requires_grad_(False)
    return model


def train(way, optimizer_name, *, clip=False, config=CONFIG, recomputed=False):
    rank = dist.get_rank() if way != "alone" else 0
    model = awkward_model(rank, config)
    if way != "alone":
        model = parallelize(model, dist.group.WORLD, **WAYS[way])
    if recomputed:
        recompute_blocks(model)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses, norms = [], []
    for step in range(10):
        tokens = torch.randint(config.vocab_size, (3, LENGTH + 1), generator=generator(step, 0, "tokens"))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        optimizer.zero_grad()
        loss = model.loss(model(inputs), targets)
        loss.backward()
        if clip and way == "alone":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        elif clip:
            norms.append(clip_tensor_parallel_(model, MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    state = {n: v.detach().clone() for n, v in model.state_dict().items()} if way == "alone" else full_state_dict(model)
    return state, losses + norms


def several(runs):
    """Train so many ways on each rank: name -> (state, losses and norms)."""
    return {name: train(*args, **options) for name, (args, options) in runs.items()}


RUNS = {
    "sgd": (("whole sequences", "sgd"), {"clip": True}),
    "adam": (("sequence parallel", "adam"), {}),
}
SHORT_RUNS = {f"short {name}": (way, options | {"config": SHORT}) for name, (way, options) in RUNS.items()}
BY_WORLD_SIZE = {
    1: RUNS,
    2: RUNS
    | {
        "sgd, in parts": (("in parts", "sgd"), {"clip": True}),
        "adam, again": (("sequence parallel", "adam"), {}),
        "adam, recomputed": (("whole sequences", "adam"), {"recomputed": True}),
    },
    3: SHORT_RUNS | {"untied": (("sequence parallel", "sgd"), {"config": UNTIED})},
    4: SHORT_RUNS,
}


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@cache
def oracles(pool):
    """Train alone, on a rank: it has one thread, as the ranks have that train together."""
    runs = {
        "sgd": (("alone", "sgd"), {"clip": True}),
        "adam": (("alone", "adam"), {}),
        "short sgd": (("alone", "sgd"), {"clip": True, "config": SHORT}),
        "short adam": (("alone", "adam"), {"config": SHORT}),
        "untied": (("alone", "sgd"), {"config": UNTIED}),
    }
    return pool.run(several, runs)[0]


@pytest.fixture
def alone(ranks):
    return oracles(ranks(1))


@pytest.mark.equality("tensor_parallel")
@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process_and_repeat(ranks, alone, world_size):
    results = ranks(world_size).run(several, BY_WORLD_SIZE[world_size])
    for found in results:
        for name, (state, losses) in found.items():
            expected, expected_losses = alone[name.partition(",")[0]]
            assert difference(state, expected) <= 1e-10, name
            assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) <= 1e-10, name
            assert difference(state, results[0][name][0]) == 0.0, f"{name}: ranks differ"
        if world_size == 2:
            assert difference(found["adam"][0], found["adam, again"][0]) == 0.0


def test_the_updates_are_not_trivial(alone):
    before = awkward_model(0)
    for name, parameter in before.named_parameters():
        moved = (parameter - alone["adam"][0][name]).abs().max().item()
        assert moved > 1e-6 if parameter.requires_grad else moved == 0.0, name
    assert max(alone["adam"][1]) - min(alone["adam"][1]) > 1e-3
    assert min(alone["sgd"][1][10:]) > MAX_NORM, "nothing is clipped"


@pytest.mark.equality("tensor_parallel")
def test_a_state_goes_from_one_number_of_ranks_to_a_different_one(ranks):
    def save():
        model = parallelize(awkward_model(dist.get_rank()), sequence_parallel=True)
        return full_state_dict(model)

    def load(state):
        model = awkward_model(7 + dist.get_rank())
        model.load_state_dict(state)
        return full_state_dict(parallelize(model))

    state = ranks(3).run(save)[2]
    for loaded in ranks(2).run(load, state):
        assert difference(loaded, state) == 0.0
    assert difference(awkward_model(0).state_dict(), state) == 0.0
