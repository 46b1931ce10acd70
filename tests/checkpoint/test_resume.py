"""A run that is resumed repeats the bits of the run that was never stopped, and refuses what is not its own."""

import os
import random
import signal
from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
from killing import DiskThat, require_kill, same_bits, twice
from ways import REPLICAS, SCHEDULES, SHARDED, Coarse, train

from distlab.checkpoint import files, load, newest, save
from distlab.comm import RankError
from distlab.rng import generator, seed_rank
from distlab.sharding import FullyShard, ShardedState, full_state_dict

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "close", "listdir")
FEW = (*REPLICAS[:3], "as it is", "ZeRO-2")


@pytest.mark.equality("checkpoint")
@pytest.mark.soak_where(world_size=(1, 3, 4))
@pytest.mark.parametrize(
    ("world_size", "names"),
    [(1, FEW), (2, REPLICAS), (2, SHARDED), (2, SCHEDULES), (3, FEW), (4, FEW)],
    ids=["1", "2, replicas", "2, sharded", "2, stages", "3", "4"],
)
def test_resumed_at_the_same_world_size_every_way_ends_with_the_same_bits(ranks, tmp_path, world_size, names):
    """A run that is resumed at its last checkpoint but one repeats its own end, the memory of a hook included."""
    for name in names:
        results = ranks(world_size).run(lambda name=name: twice(train, tmp_path / name, name=name))
        for rank, ends in enumerate(results):
            assert same_bits(*ends), f"{name}, rank {rank}"
        if name == "hook" and world_size > 1:
            assert not same_bits(results[0][1][2], results[1][1][2])  # each rank has its own memory


def test_a_rank_that_holds_an_empty_piece_of_a_unit_resumes_as_the_others_do(ranks, tmp_path):
    def run(name, saves, reshard=False):
        torch.manual_seed(0)
        model = FullyShard(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 8)))
        optimizer = getattr(torch.optim, name)(model.parameters(), 0.05)
        parts = {"training": ShardedState(model, optimizer)}
        if saves:
            model(torch.ones(2, 1)).sum().backward()
            model.synchronize()
            optimizer.step()
            save(tmp_path / name, 1, parts=parts)
        else:
            assert load(tmp_path / name, parts=parts, reshard=reshard).step == 1
        return full_state_dict(model)

    for name in ("AdamW", "SGD"):
        expected = ranks(4).run(run, name, True)
        for world_size, reshard in ((4, False), (4, True), (2, True)):
            assert same_bits(ranks(world_size).run(run, name, False, reshard), expected[:world_size])


def save_and_die(directory, step, victim, stop_at):
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, step)
    operations = count(1)

    def operation(real, *arguments):
        if next(operations) == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    mine = OPERATIONS if dist.get_rank() == victim else ()
    with DiskThat(files, **{name: partial(operation, getattr(os, name)) for name in mine}):
        save(directory, step, parts={"model": module}, keep=2)
    return module.weight[0, 0].item()


@pytest.mark.parametrize(
    ("world_size", "victim", "stride"),
    [
        *((2, 0, 5), (2, 1, 4)),
        *(pytest.param(*one, 1, marks=pytest.mark.soak) for one in ((1, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3))),
    ],
)
def test_whichever_rank_dies_wherever_in_a_save_a_whole_checkpoint_is_newest(
    ranks, tmp_path, world_size, victim, stride, record_property
):
    tried, outcomes, finished = 0, set(), False
    while not finished:
        tried += 1
        directory = tmp_path / str(tried)
        ranks(world_size).run(save_and_die, directory, 1, None, 0)
        try:
            ranks(world_size).run(save_and_die, directory, 2, victim, 1 + stride * (tried - 1))
            finished = True
        except RankError as error:
            require_kill(error)
        found = newest(directory)
        assert found.step in ((2,) if finished else (1, 2))
        assert found.world_size == world_size
        outcomes.add(found.step)
    record_property("tried", tried)
    assert outcomes == {1, 2}


def test_at_a_different_world_size_what_is_shared_is_taken_and_what_was_each_ranks_own_stays_behind(ranks, tmp_path):
    def parts(value):
        torch.manual_seed(0)
        model, hook = torch.nn.Linear(2, 2), Coarse()
        torch.nn.init.constant_(model.weight, value)
        return {"model": model, "hook": hook}

    def write():
        made = parts(5)
        made["hook"].memory = {0: torch.full((3,), 1.0 + dist.get_rank())}
        save(tmp_path, 7, parts=made, data_position={"epoch": 1, "sample": 30})

    def read(reshard):
        made = parts(0)
        torch.manual_seed(1)
        resumed = load(tmp_path, parts=made, reshard=reshard)
        memory = [one.tolist() for one in made["hook"].memory.values()]
        return resumed.step, resumed.data_position, made["model"].weight[0, 0].item(), memory, torch.initial_seed()

    ranks(2).run(write)
    place = {"epoch": 1, "sample": 30}
    assert ranks(2).run(read, False) == [(7, place, 5.0, [[1.0 + rank] * 3], 0) for rank in range(2)]
    assert ranks(3).run(read, True) == [(7, place, 5.0, [], 1)] * 3
    with pytest.raises(RankError, match="saved by 2 ranks, this job has 3; resume with 2"):
        ranks(3).run(read, False)


def test_each_rank_gets_its_own_buffers_and_generators_back(ranks, tmp_path):
    def write():
        rank = dist.get_rank()
        model = torch.nn.BatchNorm1d(3)
        model(torch.full((2, 3), float(rank)) + torch.rand(2, 3))
        noise = generator(0, rank, "noise")
        seed_rank(0, rank)
        save(tmp_path, 1, parts={"model": model, "noise": noise})
        return dict(model.named_buffers()), torch.rand(2), torch.rand(2, generator=noise), random.random()

    def read():
        model, noise = torch.nn.BatchNorm1d(3), torch.Generator()
        load(tmp_path, parts={"model": model, "noise": noise})
        return dict(model.named_buffers()), torch.rand(2), torch.rand(2, generator=noise), random.random()

    written, back = ranks(2).run(write), ranks(2).run(read)
    assert same_bits(written, back)
    assert not same_bits(written[0], written[1])
