"""FullyShard trains like one process, in every way of using it, and repeats bit for bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from equal import CONFIG, OPTIMIZERS, alone, awkward_model, backward, difference, finals, square
from torch import nn

from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard
from distlab.sharding.plain import cut_shard, plain_step

MAX_NORM = 0.5
WAYS = {
    "default": {},
    "whole until backward": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": 0},
    "far prefetch": {"prefetch": 2},
    "small units": {
        "units": [f"blocks.{i}.{part}" for i in range(CONFIG.num_layers) for part in ("attention", "feed_forward")]
    },
    "nested units": {"units": ["blocks.0", "blocks.0.attention", "blocks.2"]},
    "one unit": {"units": []},
    "recomputed": {},
    "offloaded": {"offload": True},
}


def whole(model):
    with model.summon() as module:
        return finals(module)


def train(ways, dtype, optimizer_name, *, accumulate="", clip=None, replicas=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group, across = square() if replicas else (None, None)
    found = {}
    for way in ways:
        module = awkward_model(rank, dtype)
        if way == "recomputed":
            recompute_blocks(module)
        model = FullyShard(module, group, replicas=across, **WAYS[way])
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(10):
            optimizer.zero_grad()
            *first, last = backward(model, step, rank, world_size, batches=2 if accumulate else 1)
            for call in first:
                with model.no_sync() if accumulate == "no_sync" else nullcontext():
                    call()
            last()
            model.synchronize()
            if clip:
                model.clip_gradients_(clip)
            optimizer.step()
        found[way] = whole(model)
        assert not any(unit.buffer.untyped_storage().nbytes() for unit in model.units)
    return found


@pytest.mark.equality("fully_shard")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_in_float64_equal_one_process(ranks, world_size):
    def both():
        ways = list(WAYS) if dist.get_world_size() == 3 else ["default", "whole until backward", "small units"]
        return train(ways, torch.float64, "sgd"), train(["default"], torch.float64, "adamw")

    oracles = [alone(name) for name in ("sgd", "adamw")]
    results = ranks(world_size).run(both)
    for result, first in zip(results, [results[0]] * world_size, strict=True):
        for found, same, oracle in zip(result, first, oracles, strict=True):
            for way in found:
                assert difference(found[way], oracle) <= 1e-10, way
                assert difference(found[way], same[way]) == 0.0, f"{way}: ranks differ"


@pytest.mark.equality("fully_shard")
@pytest.mark.parametrize(
    "options",
    [{"accumulate": "no_sync", "clip": MAX_NORM}, {"accumulate": "shards"}],
    ids=["whole gradients, clipped", "shards of gradients"],
)
def test_accumulation_and_clipping_equal_one_process(ranks, options):
    oracle = alone("sgd", clip=options.get("clip"), batches=2)
    results = ranks(3).run(lambda: train(["default", "whole until backward"], torch.float64, "sgd", **options))
    for result in results:
        assert all(difference(found, oracle) <= 1e-10 for found in result.values())


@pytest.mark.equality("fully_shard")
def test_hybrid_sharding_equals_one_process(ranks):
    results = ranks(4).run(
        lambda: train(["default"], torch.float64, "sgd", replicas=True, accumulate="no_sync", clip=MAX_NORM)
    )
    oracle = alone("sgd", clip=MAX_NORM, batches=2)
    for result in results:
        assert difference(result["default"], oracle) <= 1e-10
        assert difference(result["default"], results[0]["default"]) == 0.0


@pytest.mark.equality("fully_shard")
def test_float32_equals_one_process_and_repeats_bit_for_bit(ranks):
    def twice():
        return [train(["default"], torch.float32, "sgd")["default"] for _ in range(2)]

    oracle = alone("sgd", torch.float32)
    for first, second in ranks(3).run(twice):
        assert difference(first, oracle) <= 1e-5
        assert difference(first, second) == 0.0


@pytest.mark.equality("fully_shard")
def test_the_plain_way_equals_one_process(ranks):
    def modules():
        sizes = [5, 7, 3]  # nothing here is even
        return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in zip(sizes, sizes[1:], strict=False)]

    def batch(step):
        return torch.randn(6, 5, dtype=torch.float64, generator=generator(step, 0, "batch"))

    def sharded():
        torch.manual_seed(0)
        model = modules()
        shards = [cut_shard(module) for module in model]
        optimizer = torch.optim.SGD(shards, lr=0.1, momentum=0.9)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        for step in range(10):
            plain_step(model, shards, batch(step)[mine], lambda made: made.square().mean())
            optimizer.step()
        return [shard.detach() for shard in shards]

    torch.manual_seed(0)
    model = nn.Sequential(*modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    expected = [torch.cat([p.detach().reshape(-1) for p in module.parameters()]) for module in model]
    for world_size in (2, 3):
        results = ranks(world_size).run(sharded)
        for index, row in enumerate(expected):
            found = torch.cat([result[index] for result in results])[: len(row)]
            assert (found - row).abs().max() <= 1e-10
