"""A sharded run that is resumed repeats the bits of the run that was never stopped, or is cut anew for other ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from killing import go_on, refused, same_bits, twice

from distlab.checkpoint import PerRank, load, newest, save
from distlab.comm import RankError
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.plan import Precision
from distlab.rng import generator, seed_rank
from distlab.sharding import FullyShard, ShardedOptimizer, ShardedState, full_state_dict

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def shard(module, options):
    """Return what to call, what updates it, what finishes gradients, what schedules follow, and parts to save."""
    if "stage" in options:
        optimizer = ShardedOptimizer(module, adamw, bucket_bytes=20_000, **options)
        return module, optimizer, optimizer, optimizer.optimizer, {"model": module, "optimizer": optimizer}
    model = FullyShard(module, **options)
    optimizer = adamw(model.parameters())
    return model, optimizer, model, optimizer, {"training": ShardedState(model, optimizer)}


def train(directory, end=6, **options):
    """Train with everything that has a state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    seed_rank(3, rank)
    model, optimizer, gradients, scheduled, parts = shard(GPT(CONFIG, generator(3, rank, "weights")), options)
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 7, 0.8)

    def one_step(step):
        inputs, targets = corpus.batch(step, 6, seed=3, rank=rank, world_size=world_size)
        weight = 1 + 0.1 * random.random()
        (weight * GPT.loss(model(inputs), targets)).backward()
        gradients.synchronize()
        gradients.clip_gradients_(1.0)
        optimizer.step()
        gradients.zero_grad()
        schedule.step()

    go_on(directory, parts | {"schedule": schedule}, one_step, end)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    final = weights, scheduled.state_dict()["state"], random.random(), torch.rand(())
    gradients.close()
    return final


OPTIONS = {
    "as it is": {},
    "kept whole, gathered late": {"reshard_after_forward": False, "prefetch": 0},
    "bfloat16": {"precision": Precision("bfloat16")},
    "offloaded": {"offload": True},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
}
MANY, FEW = list(OPTIONS), ["as it is", "ZeRO-2"]


@pytest.mark.equality("checkpoint")
@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize(("world_size", "names"), [(1, FEW), (2, MANY), (3, FEW), (4, FEW)])
def test_resumed_at_the_same_world_size_every_way_ends_with_the_same_bits(ranks, tmp_path, world_size, names):
    """A run that is resumed at its last checkpoint but one repeats its own end."""

    def both():
        return [twice(train, tmp_path / name, **OPTIONS[name]) for name in names]

    for rank, results in enumerate(ranks(world_size).run(both)):
        for name, ends in zip(names, results, strict=True):
            assert same_bits(*ends), f"{name}, rank {rank}"


@pytest.mark.equality("checkpoint")
def test_at_a_different_number_of_ranks_shards_are_cut_anew(ranks, tmp_path):
    def write():
        train(tmp_path)
        return peek(False)

    def peek(reshard):
        model = FullyShard(GPT(CONFIG))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
        parts = {"training": ShardedState(model, optimizer), "schedule": schedule}
        resumed = load(tmp_path, parts=parts, reshard=reshard)
        return resumed.step, full_state_dict(model), next(iter(optimizer.state.values()))["step"].item()

    expected = ranks(3).run(write)[0]
    assert expected[0] == 6
    assert expected[2] == 6.0
    for world_size in (1, 2, 4):
        assert all(same_bits(found, expected) for found in ranks(world_size).run(peek, True))
    with pytest.raises(RankError, match="saved by 3 ranks, this job has 2"):
        ranks(2).run(peek, False)


def test_shards_as_plain_parts_are_refused_when_they_are_saved(ranks, tmp_path):
    def fail():
        model = FullyShard(torch.nn.Linear(3, 2))
        for part in (model, torch.optim.SGD(model.parameters(), 0.1)):
            refused(
                lambda part=part: save(tmp_path, 1, parts={"part": part}), "part holds shards", "ShardedState(model, "
            )

    ranks(2).run(fail)
    assert newest(tmp_path) is None


def test_other_parts_than_were_saved_are_refused_and_nothing_changes(ranks, tmp_path):
    def refuse():
        torch.manual_seed(0)
        model = FullyShard(torch.nn.Linear(3, 2))
        save(tmp_path / "sharded", 1, parts={"model": ShardedState(model)})
        save(tmp_path / "whole", 1, parts={"model": torch.nn.Linear(3, 2)})
        other = FullyShard(torch.nn.Linear(4, 2))
        before = other.units[0].shard.detach().clone()
        for where, part, words in (
            (
                "sharded",
                torch.nn.Linear(3, 2),
                "model is a whole part here, but the checkpoint saved it as a ShardedState or ShardedOptimizer",
            ),
            (
                "whole",
                ShardedState(model),
                "model is a ShardedState or ShardedOptimizer here, but the checkpoint saved it as a whole part",
            ),
            (
                "sharded",
                PerRank({"model": torch.nn.Linear(3, 2)}),
                "model is a PerRank here, but the checkpoint saved it as a ShardedState or ShardedOptimizer; pass a",
            ),
            ("sharded", ShardedState(other), "weight is [2, 4] in the model and [2, 3] in the saved state"),
            (
                "sharded",
                ShardedState(FullyShard(torch.nn.Linear(3, 2).double())),
                "weight is float64 in the model and float32 in the saved state",
            ),
        ):
            refused(lambda where=where, part=part: load(tmp_path / where, parts={"model": part}), words)
        assert torch.equal(other.units[0].shard, before)

    ranks(2).run(refuse)
