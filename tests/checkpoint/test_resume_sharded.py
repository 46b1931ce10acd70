"""Killed at any moment, a sharded run goes on too and ends with the very bits of the run that was never killed."""

import os
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from killing import has_unfinished_save, kill_after, require_kill, same_bits

from distlab.checkpoint import files, load, newest, save
from distlab.comm import RankError
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.plan import Precision
from distlab.rng import generator, seed_rank
from distlab.sharding import FullyShard, ShardedOptimizer, ShardedState, full_state_dict

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.2)
SAVE_EVERY = 3


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


def train(directory, victim=None, num_steps_before=None, num_saves_before=None, delay_s=0.0, end=40, **options):
    """Train with everything that has a state; the victim is killed delay_s into a step or a save."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    seed_rank(3, rank)
    model, optimizer, gradients, scheduled, parts = shard(GPT(CONFIG, generator(3, rank, "weights")), options)
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 7, 0.8)
    parts |= {"schedule": schedule}
    resumed = load(directory, parts=parts)
    step = resumed.data_position if resumed else 0
    num_steps = num_saves = 0
    while step < end:
        if rank == victim and num_steps == num_steps_before:
            kill_after(delay_s)
        inputs, targets = corpus.batch(step, 6, seed=3, rank=rank, world_size=world_size)
        weight = 1 + 0.1 * random.random()
        (weight * GPT.loss(model(inputs), targets)).backward()
        gradients.synchronize()
        gradients.clip_gradients_(1.0)
        optimizer.step()
        gradients.zero_grad()
        schedule.step()
        step += 1
        num_steps += 1
        if step % SAVE_EVERY == 0:
            if rank == victim and num_saves == num_saves_before:
                kill_after(delay_s)
            save(directory, step, parts=parts, data_position=step, keep=2)
            num_saves += 1
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    final = weights, scheduled.state_dict()["state"], random.random(), torch.rand(())
    gradients.close()
    return final


@pytest.mark.parametrize(
    ("stage", "kills"), [(3, 3), *(pytest.param(stage, 10, marks=pytest.mark.soak) for stage in (2, 3))]
)
def test_kills_at_random_moments_and_the_same_final_bits(ranks, tmp_path, stage, kills):
    run = partial(train, end=24, **({} if stage == 3 else {"stage": stage}))
    expected = ranks(2).run(run, tmp_path / "uninterrupted")
    chance = random.Random(0)
    num_kills = num_runs = num_while_saving = 0
    while num_kills < kills:
        num_runs += 1
        directory = tmp_path / f"run {num_runs}"
        final = None
        while final is None:
            steps, saves = (None, chance.randrange(3)) if chance.random() < 0.5 else (chance.randrange(12), None)
            victim = None if num_kills == kills else chance.randrange(2)
            try:
                final = ranks(2).run(run, directory, victim, steps, saves, chance.uniform(0, 0.02))
            except RankError as error:
                require_kill(error)
                num_kills += 1
                num_while_saving += has_unfinished_save(directory)
        assert same_bits(final, expected), f"run {num_runs}"
    print(f"{num_kills} kills in {num_runs} runs, {num_while_saving} while saving")


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

    def both(name):
        directory = tmp_path / name
        final = train(directory, end=6, **OPTIONS[name])
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(files.saved(directory)[0][2], directory.parent / f"later than {name}")
        dist.barrier()
        return final, train(directory, end=6, **OPTIONS[name])

    for rank, results in enumerate(ranks(world_size).run(lambda: [both(name) for name in names])):
        for name, (uninterrupted, resumed) in zip(names, results, strict=True):
            assert same_bits(uninterrupted, resumed), f"{name}, rank {rank}"


@pytest.mark.equality("checkpoint")
def test_at_another_number_of_ranks_shards_are_cut_anew(ranks, tmp_path):
    def write():
        train(tmp_path, end=6)
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
        texts = []
        for part in (model, torch.optim.SGD(model.parameters(), 0.1)):
            with pytest.raises(ValueError, match="part holds shards") as caught:
                save(tmp_path, 1, parts={"part": part})
            texts.append(str(caught.value))
        return texts

    for texts in ranks(2).run(fail):
        assert all("ShardedState(model, optimizer)" in text for text in texts)
    assert newest(tmp_path) is None


def test_other_parts_than_were_saved_are_refused_and_nothing_changes(ranks, tmp_path):
    def refuse():
        torch.manual_seed(0)
        model = FullyShard(torch.nn.Linear(3, 2))
        save(tmp_path / "sharded", 1, parts={"model": ShardedState(model)})
        save(tmp_path / "whole", 1, parts={"model": torch.nn.Linear(3, 2)})
        other = FullyShard(torch.nn.Linear(4, 2))
        before = other.units[0].shard.detach().clone()
        texts = []
        for where, part in (
            ("sharded", torch.nn.Linear(3, 2)),
            ("whole", ShardedState(model)),
            ("sharded", ShardedState(other)),
            ("sharded", ShardedState(FullyShard(torch.nn.Linear(3, 2).double()))),
        ):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 (looked at below)
                load(tmp_path / where, parts={"model": part})
            texts.append(str(caught.value))
        assert torch.equal(other.units[0].shard, before)
        return texts

    for texts in ranks(2).run(refuse):
        assert "model is whole here and sharded in the checkpoint" in texts[0]
        assert "model is sharded here and whole in the checkpoint" in texts[1]
        assert "weight is [2, 4] in the model and [2, 3] in the saved state" in texts[2]
        assert "weight is float64 in the model and float32 in the saved state" in texts[3]
