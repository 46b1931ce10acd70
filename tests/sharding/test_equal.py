"""ZeRO-1, ZeRO-2, FullyShard, ByTensor train like one process, in every way of using them, and repeat bit for bit."""

from contextlib import contextmanager, nullcontext
from functools import partial
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from equal import BYTES, DENSE, Row, Way, assert_rows_equal_one_process, corpus, square
from torch import nn

from distlab.data_parallel import broadcast_parameters
from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.sharding import (
    ByTensor,
    FullyShard,
    PlainSharded,
    ShardedOptimizer,
    WholeTensorOptimizer,
    full_state_dict,
)
from distlab.sharding.plain import cut_shard, plain_step


def units(recomputed=False, replicas=False, in_shards=False, by=None, **options):
    """Return the technique of FullyShard; passes of a step add up in shards, or whole, and tensors may have owners."""

    def technique(model, make):
        if recomputed:
            recompute_blocks(model)
        groups = dict(zip(("group", "replicas"), square(), strict=True)) if replicas else {}
        made = FullyShard(model, **groups, **options)
        no_sync = nullcontext if in_shards else made.no_sync
        optimizer = WholeTensorOptimizer(made, make, by=by) if by else make(made.parameters())
        way = Way(made, optimizer, made.synchronize, no_sync, clip=made.clip_gradients_)
        way.state = partial(full_state_dict, made)
        return way

    return technique


def tensors(recomputed=False, by=None, **options):
    """Return the technique of ByTensor; each pass is summed, and tensors may have owners."""

    def technique(model, make):
        made = ByTensor(model, **options)
        if recomputed:
            recompute_blocks(made.module)
        optimizer = WholeTensorOptimizer(made, make, by=by) if by else make(made.parameters())
        way = Way(made, optimizer, clip=made.clip_gradients_)
        way.state = made.full_state
        return way

    return technique


def pieces(stage, split="elements", each=False, by_module=False):
    """Return the technique of ShardedOptimizer; each pass may be summed, and the module forget its gradients."""

    def technique(model, make):
        made = ShardedOptimizer(model, make, stage=stage, split=split, bucket_bytes=20_000)

        @contextmanager
        def summed():
            yield
            made.synchronize()

        if by_module:
            made.zero_grad = model.zero_grad
        return Way(model, made, made.synchronize, summed if each else made.no_sync, clip=made.clip_gradients_)

    return technique


def plainest(model, make):
    """Average all gradients, update what is mine, broadcast it."""
    broadcast_parameters(model)
    made = PlainSharded(model.parameters(), make)
    made.zero_grad = model.zero_grad

    def synchronize():
        for parameter in made.parameters:
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    return Way(model, made, synchronize)


FEW = {
    "units": Row(BYTES, "sgd", units()),
    "units, adamw": Row(BYTES, "adamw", units()),
    "by tensor, adam": Row(BYTES, "adam", tensors()),
    "stage 1": Row(BYTES, "adam", pieces(1)),
    "stage 2": Row(BYTES, "sgd", pieces(2)),
    "stage 2, tensors": Row(BYTES, "lamb", pieces(2, "tensors")),
    "muon": Row(BYTES, "muon", units(by="owners")),
    "lars": Row(BYTES, "lars", units(by="everywhere")),
    "by tensor, muon": Row(BYTES, "muon", tensors(by="owners")),
    "by tensor, lars": Row(BYTES, "lars", tensors(by="everywhere")),
}
halves = methodcaller("chunk", 2)
TWO = {
    "units, float32": Row(BYTES, "sgd", units(), torch.float32),
    "by tensor, float32": Row(BYTES, "sgd", tensors(), torch.float32),
    "by tensor, accumulated": Row(BYTES, "sgd", tensors(), cut=halves, clip=0.5),
    "stage 2, float32": Row(BYTES, "sgd", pieces(2), torch.float32),
    "units, accumulated": Row(BYTES, "sgd", units(), cut=halves, clip=0.5),
    "stage 1, accumulated": Row(BYTES, "sgd", pieces(1), cut=halves, clip=0.5),
    "stage 2, accumulated": Row(BYTES, "sgd", pieces(2), cut=halves, clip=0.5),
    "in shards": Row(BYTES, "sgd", units(in_shards=True, reshard_after_forward=False), cut=halves),
    "each pass summed": Row(BYTES, "sgd", pieces(2, "tensors", each=True), cut=halves),
    "muon, tensors": Row(BYTES, "muon", pieces(2, "tensors")),
    "lars, clipped": Row(BYTES, "lars", units(by="owners", offload=True), clip=0.5),
    "muon everywhere": Row(BYTES, "muon", units(by="everywhere"), cut=halves, clip=0.5),
    "by the module": Row(BYTES, "sgd", pieces(2, by_module=True), cut=halves),
}
THREE = {
    "units": Row(BYTES, "sgd", units()),
    "whole until backward": Row(BYTES, "sgd", units(reshard_after_forward=False)),
    "far prefetch": Row(BYTES, "adamw", units(prefetch=2)),
    "nested": Row(BYTES, "sgd", units(units=["blocks.0", "blocks.0.attention", "blocks.2"])),
    "recomputed": Row(BYTES, "sgd", units(recomputed=True)),
    "by tensor": Row(DENSE, "sgd", tensors(units=["first", "entry"])),
    "by tensor, nested": Row(BYTES, "sgd", tensors(units=["blocks.0", "blocks.0.attention", "blocks.2"])),
    "by tensor, recomputed": Row(BYTES, "adamw", tensors(recomputed=True), clip=0.5),
    "stage 1": Row(BYTES, "sgd", pieces(1)),
    "stage 2": Row(BYTES, "adamw", pieces(2)),
    "stage 1, tensors": Row(BYTES, "lamb", pieces(1, "tensors")),
    "stage 2, tensors": Row(BYTES, "adamw", pieces(2, "tensors")),
    "muon": Row(BYTES, "muon", units(by="owners"), clip=0.5),
    "lamb": Row(BYTES, "lamb", units(by="owners")),
    "lamb everywhere": Row(BYTES, "lamb", units(by="everywhere")),
    "the plainest": Row(BYTES, "adam", plainest),
}
EIGHT = BYTES._replace(batch=lambda step: corpus().batch(step, 8, seed=1))
FOUR = {"sets of shards": Row(EIGHT, "sgd", units(replicas=True), cut=halves, clip=0.5)}
FOUR |= {"muon on sets of shards": Row(EIGHT, "muon", units(replicas=True, by="owners"), clip=0.5)}
FOUR |= {"muon on four": Row(BYTES, "muon", units(by="owners"))}


@pytest.mark.equality("fully_shard")
@pytest.mark.equality("zero")
@pytest.mark.soak_where(rows=(FEW,))
@pytest.mark.parametrize(("world_size", "rows"), [(1, FEW), (2, FEW), (4, FEW), (2, TWO), (3, THREE), (4, FOUR)])
def test_ten_updates_equal_one_process(ranks, world_size, rows):
    assert_rows_equal_one_process(ranks(world_size), rows)


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


@pytest.mark.equality("fully_shard")
def test_the_plainest_shards_equal_one_process(ranks):
    model = nn.Sequential(*modules())
    optimizer = momentum(model.parameters())
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    results = ranks(3).run(sharded_plainly)
    for index, module in enumerate(model):
        row = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        assert (torch.cat([shards[index] for shards in results])[: len(row)] - row).abs().max() <= 1e-10
