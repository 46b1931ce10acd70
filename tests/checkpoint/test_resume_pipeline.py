"""Killed at any moment, a pipeline goes on too and ends with the very bits of the run that was never killed."""

import os
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from killing import kill_after, require_kill, same_bits

from distlab.checkpoint import files, load, newest, save
from distlab.comm import RankError
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline, StageState, find_tied, split_gpt
from distlab.plan import make_schedule
from distlab.rng import generator, seed_rank

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=4, num_heads=2, hidden_size=16, dropout=0.2, tied=True)
SAVE_EVERY = 3
WAYS = {"one_f_one_b": 1, "interleaved": 2, "zb_v": 2}


def train(directory, name="one_f_one_b", victim=None, num_steps_before=0, delay_s=0.0, *, end=12):
    """Train with everything that has a state; the victim is killed delay_s into a step, which may be in a save."""
    rank = dist.get_rank()
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    seed_rank(3, rank)
    schedule = make_schedule(name, dist.get_world_size(), 2, stages_per_rank=WAYS[name])
    stages = split_gpt(GPT(CONFIG, generator(3, 0, "weights")), schedule.num_stages)
    own = {number: stages[number] for number, home in enumerate(schedule.home) if home == rank}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, tied=find_tied(stages))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    parts = {"training": StageState(own, optimizer), "decay": decay}
    resumed = load(directory, parts=parts)
    step = first = resumed.data_position if resumed else 0
    while step < end:
        if rank == victim and step - first == num_steps_before:
            kill_after(delay_s)
        pipeline.zero_grad()
        pipeline.step(*corpus.batch(step, 4, seed=3))
        optimizer.step()
        decay.step()
        step += 1
        if step % SAVE_EVERY == 0:
            save(directory, step, parts=parts, data_position=step, keep=2)
    pipeline.close()
    weights = [parameter.detach().clone() for parameter in pipeline.parameters()]
    return weights, optimizer.state_dict()["state"], random.random(), torch.rand(())


def test_kills_at_random_moments_and_the_same_final_bits(ranks, tmp_path):
    expected = ranks(2).run(train, tmp_path / "uninterrupted")
    chance = random.Random(0)
    final, num_kills = None, 0
    while final is None:
        victim = chance.randrange(2) if num_kills < 3 else None
        when = partial(train, victim=victim, num_steps_before=chance.randrange(5), delay_s=chance.uniform(0, 0.02))
        try:
            final = ranks(2).run(when, tmp_path / "killed")
        except RankError as error:
            require_kill(error)
            num_kills += 1
    assert same_bits(final, expected)
    print(f"{num_kills} kills")


def test_every_schedule_resumes_with_the_same_bits_and_other_stages_are_refused(ranks, tmp_path):
    """A run that is resumed at its last checkpoint but one repeats its own end."""

    def both(name):
        directory = tmp_path / name
        final = train(directory, name, end=6)
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(files.saved(directory)[0][2], directory.parent / f"later than {name}")
        dist.barrier()
        return final, train(directory, name, end=6)

    for rank, results in enumerate(ranks(2).run(lambda: {name: both(name) for name in WAYS})):
        for name, (uninterrupted, resumed) in results.items():
            assert same_bits(uninterrupted, resumed), f"{name}, rank {rank}"

    def refuse():
        def state(numbers, width=4):
            modules = {number: torch.nn.Linear(3, width) for number in numbers}
            parameters = [parameter for module in modules.values() for parameter in module.parameters()]
            return StageState(modules, torch.optim.SGD(parameters, lr=0.1))

        rank = dist.get_rank()
        save(tmp_path / "small", 1, parts={"training": state([rank])})
        texts = []
        for numbers, width in (([1 - rank], 4), ([rank, rank + 2], 4), ([rank], 5)):
            with pytest.raises(ValueError, match="stage") as caught:
                load(tmp_path / "small", parts={"training": state(numbers, width)})
            texts.append(str(caught.value))
        return texts

    for other, more, wider in ranks(2).run(refuse):
        assert "resume with the schedule that it was saved with" in other
        assert "resume with the schedule that it was saved with" in more
        assert "bias is float32 [5] here and float32 [4] in the checkpoint" in wider
    assert newest(tmp_path / "small").step == 1
    with pytest.raises(RankError, match="saved by 2 ranks, this job has 3"):
        ranks(3).run(train, tmp_path / "one_f_one_b")
