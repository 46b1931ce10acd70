"""A pipeline that is resumed repeats the bits of the run that was never stopped, and refuses other stages."""

import random

import pytest
import torch
import torch.distributed as dist
from killing import go_on, refused, same_bits, twice

from distlab.checkpoint import load, newest, save
from distlab.comm import RankError
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline, StageState, find_tied, split_gpt
from distlab.plan import make_schedule
from distlab.rng import generator, seed_rank

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=4, num_heads=2, hidden_size=16, dropout=0.2, tied=True)
WAYS = {"one_f_one_b": 1, "interleaved": 2, "zb_v": 2}


def train(directory, name="one_f_one_b", end=6):
    """Train with everything that has a state."""
    rank = dist.get_rank()
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    seed_rank(3, rank)
    schedule = make_schedule(name, dist.get_world_size(), 2, stages_per_rank=WAYS[name])
    stages = split_gpt(GPT(CONFIG, generator(3, 0, "weights")), schedule.num_stages)
    own = {number: stages[number] for number, home in enumerate(schedule.home) if home == rank}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, tied=find_tied(stages))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)

    def one_step(step):
        pipeline.zero_grad()
        pipeline.step(*corpus.batch(step, 4, seed=3))
        optimizer.step()
        decay.step()

    go_on(directory, {"training": StageState(own, optimizer), "decay": decay}, one_step, end)
    pipeline.close()
    weights = [parameter.detach().clone() for parameter in pipeline.parameters()]
    return weights, optimizer.state_dict()["state"], random.random(), torch.rand(())


def test_every_schedule_resumes_with_the_same_bits_and_other_stages_are_refused(ranks, tmp_path):
    """A run that is resumed at its last checkpoint but one repeats its own end."""

    def both():
        return {name: twice(train, tmp_path / name, name=name) for name in WAYS}

    for rank, results in enumerate(ranks(2).run(both)):
        for name, ends in results.items():
            assert same_bits(*ends), f"{name}, rank {rank}"

    def refuse():
        def state(numbers, width=4):
            modules = {number: torch.nn.Linear(3, width) for number in numbers}
            parameters = [parameter for module in modules.values() for parameter in module.parameters()]
            return StageState(modules, torch.optim.SGD(parameters, lr=0.1))

        rank = dist.get_rank()
        save(tmp_path / "small", 1, parts={"training": state([rank])})
        other = "resume with the schedule that it was saved with"
        wider = "bias is float32 [5] here and float32 [4] in the checkpoint"
        for numbers, width, words in (([1 - rank], 4, other), ([rank, rank + 2], 4, other), ([rank], 5, wider)):
            part = state(numbers, width)
            refused(lambda part=part: load(tmp_path / "small", parts={"training": part}), "stage", words)

    ranks(2).run(refuse)
    assert newest(tmp_path / "small").step == 1
    with pytest.raises(RankError, match="saved by 2 ranks, this job has 3"):
        ranks(3).run(train, tmp_path / "one_f_one_b")
