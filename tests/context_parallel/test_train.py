"""A GPT on a sequence that is spread over ranks trains like one process on the whole of it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from equal import OPTIMIZERS, awkward_model

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.context_parallel import average_gradients_, context_parallel, gather_sequence, scatter_sequence
from distlab.recompute import recompute_blocks
from distlab.rng import generator

CONFIG = GPTConfig(vocab_size=29, context=30, num_layers=2, num_heads=12, hidden_size=24, tied=True)
SHORT = replace(CONFIG, num_layers=1)  # for 3 and 4 ranks, that share two cores and wait at each exchange
LENGTH = 24  # shorter than the context, a multiple of 2n for 1 to 4 ranks
WAYS = {"ring": "sgd", "all_to_all": "adam", "ring, recomputed": "adam", "ring, again": "sgd", "all_to_all, sgd": "sgd"}


def config_for(num_ranks):
    return CONFIG if num_ranks <= 2 else SHORT


def batch(step):
    draw = generator(step, 0, "tokens")
    return [torch.randint(CONFIG.vocab_size, (3, LENGTH), generator=draw) for _ in range(2)]


def batches(step):
    """One batch a step; two in the third, whose gradients add up."""
    return [batch(step), batch(100)] if step == 3 else [batch(step)]


def one_process(optimizer_name, config):
    model, losses = awkward_model(0, config=config), []
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(10):
        optimizer.zero_grad()
        for inputs, targets in batches(step):
            loss = GPT.loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses, model(batch(0)[0]).detach()


@cache
def oracles(pool):
    """Train alone, on a rank: it has one thread, as the ranks have that train together."""
    return pool.run(lambda: {(name, c): one_process(name, c) for name in OPTIMIZERS for c in (CONFIG, SHORT)})[0]


def train(way):
    model = awkward_model(dist.get_rank(), config=config_for(dist.get_world_size()))
    optimizer = OPTIMIZERS[WAYS[way]](model.parameters())  # before the change: the parameters stay the same ones
    model = context_parallel(model, kind=way.partition(",")[0])
    if way == "ring, recomputed":
        recompute_blocks(model)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        for inputs, targets in batches(step):
            loss = GPT.loss(model(scatter_sequence(inputs)), scatter_sequence(targets))
            loss.backward()
        average_gradients_(model)
        optimizer.step()
        losses.append(loss.item())
    logits = gather_sequence(model(tokens=scatter_sequence(batch(0)[0])))
    return {name: value.clone() for name, value in model.state_dict().items()}, losses, logits.detach()


def everything():
    found = {way: train(way) for way in (WAYS if dist.get_world_size() == 2 else list(WAYS)[:3])}
    with recorded() as seen:
        average_gradients_(unused_model())
    return found, seen.records.payload_bytes(dist.get_rank(), "all_reduce"), averaged()


def unused_model():
    """Gradients on rank 0 alone for one parameter, on no rank for another."""
    model = awkward_model(0, config=SHORT)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, dist.get_rank() + 1.0)
    model.norm.bias.grad = torch.ones_like(model.norm.bias) if dist.get_rank() == 0 else None
    model.norm.weight.grad = None
    return model


def averaged():
    model = unused_model()
    average_gradients_(model)
    return model.norm.bias.grad[0].item(), model.norm.weight.grad, model.output.weight.grad[0, 0].item()


@pytest.mark.equality("context_parallel")
@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    config = config_for(world_size)
    alone = {name: oracles(ranks(1))[name, config] for name in OPTIMIZERS}
    results = ranks(world_size).run(everything)
    for found, sent, (some, none, all_) in results:
        for way, (state, _, logits) in found.items():
            wanted, _, wanted_logits = alone[WAYS[way]]
            assert state.keys() == wanted.keys()
            assert all((state[name] - wanted[name]).abs().max() <= 1e-10 for name in wanted), way
            assert (logits - wanted_logits).abs().max() <= 1e-10, way
            first = results[0][0][way][0]
            assert all(torch.equal(state[name], first[name]) for name in wanted), f"{way}: ranks differ"
        one, again = found["ring"][0], found.get("ring, again", found["ring"])[0]
        assert all(torch.equal(one[name], again[name]) for name in one), "repeats bit for bit"
        GPT(config).double().load_state_dict(one)
        count = [p.numel() for p in awkward_model(0, config=SHORT).parameters() if p.requires_grad]
        assert sent == (8 * (sum(count) + len(count)) if world_size > 1 else 0)
        mean = (world_size + 1) / 2
        assert (some, none, all_) == (pytest.approx(1 / world_size), None, pytest.approx(mean))
    for way in results[0][0]:
        every = [found[way][1] for found, _, _ in results]
        mean = [sum(column) / world_size for column in zip(*every, strict=True)]
        assert mean == pytest.approx(alone[WAYS[way]][1], rel=1e-10), way


def test_the_updates_are_not_trivial(ranks):
    before, after = awkward_model(0, config=CONFIG), oracles(ranks(1))["sgd", CONFIG][0]
    for name, parameter in before.named_parameters():
        moved = (parameter - after[name]).abs().max().item()
        assert moved > 1e-6 if parameter.requires_grad else moved == 0.0, name
