"""ZeRO-1, ZeRO-2 and FullyShard train like one process, in every way of using them, and repeat bit for bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from equal import OPTIMIZERS, alone, awkward_model, backward, difference, finals, square
from torch import nn

from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard, PlainSharded, ShardedOptimizer
from distlab.sharding.plain import cut_shard, plain_step

MAX_NORM = 0.5
UNITS = {
    "default": {},
    "whole until backward": {"reshard_after_forward": False},
    "far prefetch": {"prefetch": 2},
    "nested units": {"units": ["blocks.0", "blocks.0.attention", "blocks.2"]},
    "recomputed": {},
    "offloaded": {"offload": True},
}
PIECES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, tensors": {"stage": 1, "split": "tensors"},
    "stage 2, tensors": {"stage": 2, "split": "tensors"},
}


def build(way, name, dtype, replicas):
    """Return what is called, what averages gradients, and what updates."""
    module = awkward_model(dist.get_rank(), dtype)
    if way == "recomputed":
        recompute_blocks(module)
    if way in PIECES:
        optimizer = ShardedOptimizer(module, OPTIMIZERS[name], bucket_bytes=20_000, **PIECES[way])
        return module, optimizer, optimizer
    groups = dict(zip(("group", "replicas"), square(), strict=True)) if replicas else {}
    model = FullyShard(module, **groups, **UNITS[way])
    return model, model, OPTIMIZERS[name](model.parameters())


def train(cases, dtype=torch.float64, *, accumulate="", clip=None, replicas=False, by_module=False):
    """Run each (way, optimizer) for ten updates; return every case's final parameters."""
    found = {}
    for way, name in cases:
        model, gradients, optimizer = build(way, name, dtype, replicas)
        for step in range(10):
            (model if by_module else optimizer).zero_grad()
            place = dist.get_rank(), dist.get_world_size()
            *first, last = backward(model, step, *place, batches=2 if accumulate else 1)
            for call in first:
                with gradients.no_sync() if accumulate == "no_sync" else nullcontext():
                    call()
                if accumulate == "synchronize each":
                    gradients.synchronize()
            last()
            gradients.synchronize()
            if clip:
                gradients.clip_gradients_(clip)
            optimizer.step()
        if way in PIECES:
            found[way, name] = finals(model)
        else:
            assert not any(unit.buffer.untyped_storage().nbytes() for unit in model.units)
            with model.summon() as module:
                found[way, name] = finals(module)
        gradients.close()
    return found


def check(results, **how):
    for case, final in results[0].items():
        assert difference(final, alone(case[1], **how)) <= 1e-10, case
        assert all(difference(result[case], final) == 0.0 for result in results), f"{case}: ranks differ"


FEW = [("default", "sgd"), ("default", "adamw"), ("stage 1", "adam"), ("stage 2", "sgd"), ("stage 2, tensors", "lamb")]
UNITS_TOO = [(way, "adamw" if way == "far prefetch" else "sgd") for way in UNITS]
PIECES_TOO = [("stage 1", "sgd"), ("stage 2", "adamw"), ("stage 1, tensors", "lamb"), ("stage 2, tensors", "adamw")]


@pytest.mark.equality("fully_shard")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize(("world_size", "cases"), [(1, FEW), (2, FEW), (3, UNITS_TOO), (3, PIECES_TOO), (4, FEW)])
def test_ten_updates_in_float64_equal_one_process(ranks, world_size, cases):
    check(ranks(world_size).run(train, cases))


@pytest.mark.equality("zero")
def test_accumulation_clipping_and_zeros_by_the_module_equal_one_process(ranks):
    ways = [
        (["default", "stage 1", "stage 2"], {"accumulate": "no_sync", "clip": MAX_NORM}),
        (["whole until backward"], {"accumulate": "in shards"}),
        (["stage 2, tensors"], {"accumulate": "synchronize each"}),
        (["stage 1", "stage 2"], {"accumulate": "no_sync", "by_module": True}),
    ]
    found = ranks(2).run(lambda: [train([(way, "sgd") for way in each], **how) for each, how in ways])
    for (_, how), results in zip(ways, zip(*found, strict=True), strict=True):
        check(results, clip=how.get("clip"), batches=2)
    start = finals(awkward_model(0))
    moved = [name for name in start if (start[name] - alone("sgd", clip=MAX_NORM)[name]).abs().max() > 1e-6]
    assert len(moved) == len(start) - 2, "all but the frozen parameters"
    assert difference(alone("sgd"), alone("sgd", clip=MAX_NORM)) > 1e-3


@pytest.mark.equality("fully_shard")
def test_hybrid_sharding_equals_one_process(ranks):
    how = {"accumulate": "no_sync", "clip": MAX_NORM}
    check(ranks(4).run(lambda: train([("default", "sgd")], replicas=True, **how)), clip=MAX_NORM, batches=2)


@pytest.mark.equality("zero")
def test_float32_equals_one_process_and_repeats_bit_for_bit(ranks):
    cases = [(way, "sgd") for way in ("default", "stage 2")]
    for first, second in ranks(2).run(lambda: [train(cases, torch.float32) for _ in range(2)]):
        for case in cases:
            assert difference(first[case], alone("sgd", torch.float32)) <= 1e-5
            assert difference(first[case], second[case]) == 0.0


def zero_plainly():
    """The plainest ZeRO: average all gradients, update what is mine, broadcast it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = awkward_model(0)
    optimizer = PlainSharded(model.parameters(), OPTIMIZERS["adam"])
    for step in range(10):
        backward(model, step, rank, world_size)[0]()
        for parameter in optimizer.parameters:
            dist.all_reduce(parameter.grad.div_(world_size))
        optimizer.step()
        model.zero_grad()
    return finals(model), len(optimizer.optimizer.state)


def modules():
    torch.manual_seed(0)
    sizes = [5, 7, 3]  # nothing here is even
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in zip(sizes, sizes[1:], strict=False)]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(step):
    return torch.randn(6, 5, dtype=torch.float64, generator=generator(step, 0, "batch"))


def sharded_plainly():
    model = modules()
    shards = [cut_shard(module) for module in model]
    optimizer = momentum(shards)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for step in range(10):
        plain_step(model, shards, batch(step)[mine], lambda made: made.square().mean())
        optimizer.step()
    return [shard.detach() for shard in shards]


@pytest.mark.equality("zero")
def test_the_plainest_ways_equal_one_process(ranks):
    model = nn.Sequential(*modules())
    optimizer = momentum(model.parameters())
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    results = ranks(3).run(lambda: (zero_plainly(), sharded_plainly()))
    assert all(difference(final, alone("adam")) <= 1e-10 for (final, _), _ in results)
    num_wanting = sum(p.requires_grad for p in awkward_model(0).parameters())
    assert sum(num for (_, num), _ in results) == num_wanting, "each parameter's state lies on one rank"
    for index, module in enumerate(model):
        row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        found = torch.cat([shards[index] for _, shards in results])[: len(row)]
        assert (found - row).abs().max() <= 1e-10
