"""FullyShard trains like one process, in every way of using it, and repeats bit for bit."""

import pytest
import torch
import torch.distributed as dist
from equal import BATCH_SIZE, CONFIG, CORPUS, awkward_model, difference, finals as finals_of
from torch import nn

from distlab.clip import clip_gradients_
from distlab.data_parallel import loss_weight
from distlab.models import GPT
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
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def whole(model):
    with model.summon() as module:
        return finals_of(module)


def train(ways, dtype, optimizer_name, *, accumulate="", clip=False, replicas=1):
    alone = ways == ["alone"]
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    group, across = hybrid_groups(replicas) if replicas > 1 else (None, None)
    finals = {}
    for way in ways:
        module = awkward_model(rank, dtype)
        if way == "recomputed":
            recompute_blocks(module)
        model = module if alone else FullyShard(module, group, replicas=across, **WAYS[way])
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(10):
            optimizer.zero_grad()
            batches = [CORPUS.batch(step, BATCH_SIZE, seed=1, rank=rank, world_size=world_size)]
            if accumulate:
                batches.append(CORPUS.batch(step, BATCH_SIZE, seed=2, rank=rank, world_size=world_size))
            for index, (inputs, targets) in enumerate(batches):
                weight = loss_weight(len(inputs), BATCH_SIZE, world_size) / len(batches)
                loss = GPT.loss(model(inputs), targets) * weight
                if accumulate == "no_sync" and index == 0 and not alone:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            if not alone:
                model.synchronize()
            if clip:
                clip_gradients_(model.parameters(), MAX_NORM) if alone else model.clip_gradients_(MAX_NORM)
            optimizer.step()
        finals[way] = dict(module.named_parameters()) if alone else whole(model)
        assert alone or not any(unit.is_whole for unit in model.units)
    return finals


def hybrid_groups(replicas):
    """Return this rank's group of shards and its group of replicas."""
    world_size = dist.get_world_size()
    size = world_size // replicas
    mine = []
    for sets in (
        [list(range(start, start + size)) for start in range(0, world_size, size)],
        [list(range(start, world_size, size)) for start in range(size)],
    ):
        groups = [dist.new_group(members) for members in sets]
        mine += [group for group, members in zip(groups, sets, strict=True) if dist.get_rank() in members]
    return mine


def alone(dtype, optimizer_name, **options):
    finals = train(["alone"], dtype, optimizer_name, **options)["alone"]
    return {name: parameter.detach() for name, parameter in finals.items()}


@pytest.mark.equality("fully_shard")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_in_float64_equal_one_process(ranks, world_size):
    def both():
        ways = list(WAYS) if dist.get_world_size() == 3 else ["default", "whole until backward", "small units"]
        return train(ways, torch.float64, "sgd"), train(["default"], torch.float64, "adam")

    oracles = [alone(torch.float64, name) for name in ("sgd", "adam")]
    results = ranks(world_size).run(both)
    for result, first in zip(results, [results[0]] * world_size, strict=True):
        for finals, same, oracle in zip(result, first, oracles, strict=True):
            for way in finals:
                assert difference(finals[way], oracle) <= 1e-10, way
                assert difference(finals[way], same[way]) == 0.0, f"{way}: ranks differ"


@pytest.mark.equality("fully_shard")
@pytest.mark.parametrize(
    "options",
    [{"accumulate": "no_sync", "clip": True}, {"accumulate": "shards"}],
    ids=["whole gradients, clipped", "shards of gradients"],
)
def test_accumulation_and_clipping_equal_one_process(ranks, options):
    oracle = alone(torch.float64, "sgd", **options)
    results = ranks(3).run(lambda: train(["default", "whole until backward"], torch.float64, "sgd", **options))
    for result in results:
        assert all(difference(finals, oracle) <= 1e-10 for finals in result.values())


@pytest.mark.equality("fully_shard")
def test_hybrid_sharding_equals_one_process(ranks):
    results = ranks(4).run(
        lambda: train(["default"], torch.float64, "sgd", replicas=2, accumulate="no_sync", clip=True)
    )
    oracle = alone(torch.float64, "sgd", accumulate="no_sync", clip=True)
    for result in results:
        assert difference(result["default"], oracle) <= 1e-10
        assert difference(result["default"], results[0]["default"]) == 0.0


@pytest.mark.equality("fully_shard")
def test_float32_equals_one_process_and_repeats_bit_for_bit(ranks):
    def twice():
        return [train(["default"], torch.float32, "sgd")["default"] for _ in range(2)]

    oracle = alone(torch.float32, "sgd")
    for first, second in ranks(3).run(twice):
        assert difference(first, oracle) <= 1e-5
        assert difference(first, second) == 0.0


def test_the_updates_are_not_trivial():
    before = dict(awkward_model(0, torch.float64).named_parameters())
    after = alone(torch.float64, "sgd")
    for name, parameter in before.items():
        moved = (parameter - after[name]).abs().max().item()
        assert moved > 1e-6 if parameter.requires_grad else moved == 0.0, name


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
