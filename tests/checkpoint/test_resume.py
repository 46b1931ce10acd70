"""A run that is resumed repeats the bits of the run that was never stopped, and refuses what is not its own."""

import os
import random
import signal
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from killing import go_on, require_kill, same_bits, twice

from distlab.checkpoint import PerRank, files, load, newest, save
from distlab.comm import RankError
from distlab.compression import make_hook
from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import DataParallel, average_flat, broadcast_parameters, train_step
from distlab.models import GPT, GPTConfig
from distlab.plan.compression import METHODS, Compression
from distlab.rng import generator, seed_rank

CONFIG = GPTConfig(vocab_size=256, context=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.2)


class Coarse:
    """A hook that sends gradients rounded to a grid, and adds what it cut off to the next ones: a state of its rank."""

    def __init__(self):
        self.memory = {}

    def start(self, bucket, group):
        whole = bucket.buffer + self.memory.get(bucket.index, 0.0)
        sent = torch.round(whole * 4096) / 4096
        self.memory[bucket.index] = whole - sent
        bucket.buffer.copy_(sent / dist.get_world_size(group))
        return dist.all_reduce(bucket.buffer, group=group, async_op=True)

    def state_dict(self):
        return {"memory": dict(self.memory)}

    def load_state_dict(self, state_dict):
        self.memory = dict(state_dict["memory"])


def replicate(way, model):
    """Return what averages the gradients, and the hook if there is one."""
    if way == "manual":
        broadcast_parameters(model)
        return (lambda: average_flat(model.parameters())), None
    hook = Coarse() if way == "hook" else make_hook(Compression(way)) if way in METHODS else None
    return DataParallel(model, bucket_bytes=40_000, first_bucket_bytes=4_000, hook=hook).synchronize, hook


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def train(directory, way="bucketed", optimizer="adamw", num_steps=8):
    """Train with everything that has a state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    seed_rank(3, rank)
    model = GPT(CONFIG, generator(3, rank, "weights"))
    synchronize, hook = replicate(way, model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    noise = generator(3, rank, "noise")
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "noise": noise}
    parts |= {"hook": hook} if hook else {}

    def one_step(step):
        batch = corpus.batch(step, 6, seed=3, rank=rank, world_size=world_size)
        weight = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand((), generator=noise).item()
        train_step(model, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=synchronize, weight=weight)
        schedule.step()

    go_on(directory, parts, one_step, num_steps)
    draws = random.random(), np.random.rand(), torch.rand(()).item()
    return model.state_dict(), optimizer.state_dict()["state"], hook and hook.state_dict(), draws


@pytest.mark.equality("checkpoint")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resumed_at_the_same_world_size_every_way_ends_with_the_same_bits(ranks, tmp_path, world_size):
    """A run that is resumed at its last checkpoint but one repeats its own end, the memory of a hook included."""
    ways = [("manual", "adamw"), ("bucketed", "sgd"), ("bucketed", "adamw"), ("hook", "sgd")]

    def both(way, optimizer):
        return twice(train, tmp_path / f"{way} {optimizer}", way=way, optimizer=optimizer)

    results = ranks(world_size).run(lambda: [both(*way) for way in ways])
    for index, way in enumerate(ways):
        for rank, result in enumerate(results):
            assert same_bits(*result[index]), f"{way}, rank {rank}"
    memories = [result[-1][1][2] for result in results]
    assert world_size == 1 or not same_bits(memories[0], memories[1])  # each rank has its own


def test_every_compressors_memory_comes_back(ranks, tmp_path):
    def both(method):
        return twice(train, tmp_path / method, way=method, optimizer="sgd", num_steps=5)

    for result in ranks(2).run(lambda: {method: both(method) for method in METHODS}):
        for method, ends in result.items():
            assert same_bits(*ends), method


def test_a_hooks_memory_stays_behind_at_a_different_world_size(ranks, tmp_path):
    def write():
        hook = Coarse()
        hook.memory = {0: torch.full((3,), 1.0 + dist.get_rank())}
        torch.manual_seed(0)
        save(tmp_path, 1, parts={"model": torch.nn.Linear(2, 2), "hook": hook})

    def read(reshard):
        hook = Coarse()
        load(tmp_path, parts={"model": torch.nn.Linear(2, 2), "hook": hook}, reshard=reshard)
        return [memory.tolist() for memory in hook.memory.values()]

    def read_without():
        with pytest.raises(ValueError, match=r"has parts \['hook', 'model'\]; got \['model'\]"):
            load(tmp_path, parts={"model": torch.nn.Linear(2, 2)})

    ranks(2).run(write)
    assert ranks(2).run(read, False) == [[[1.0] * 3], [[2.0] * 3]]
    assert ranks(3).run(read, True) == [[], [], []]
    ranks(2).run(read_without)


class DyingDisk:
    """Stands for `os`: kills the process at one operation of a save."""

    def __init__(self, stop_at):
        self.left = stop_at

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "mkdir", "rename", "close", "listdir"):
            return real

        def operation(*arguments):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return operation


def save_and_die(directory, step, victim, stop_at):
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, step)
    if dist.get_rank() == victim:
        files.os = DyingDisk(stop_at)
    try:
        save(directory, step, parts={"model": module}, keep=2)
    finally:
        files.os = os
    return module.weight[0, 0].item()


@pytest.mark.parametrize(
    ("world_size", "victim"),
    [(2, 0), (2, 1), *(pytest.param(*one, marks=pytest.mark.soak) for one in ((1, 0), (4, 0), (4, 1), (4, 2), (4, 3)))],
)
def test_whichever_rank_dies_wherever_in_a_save_a_whole_checkpoint_is_newest(
    ranks, tmp_path, world_size, victim, record_property
):
    stop_at, outcomes, finished = 0, set(), False
    while not finished:
        stop_at += 1
        directory = tmp_path / str(stop_at)
        ranks(world_size).run(save_and_die, directory, 1, None, 0)
        try:
            ranks(world_size).run(save_and_die, directory, 2, victim, stop_at)
            finished = True
        except RankError as error:
            require_kill(error)
        found = newest(directory)
        assert found.step in ((2,) if finished else (1, 2))
        assert found.world_size == world_size
        outcomes.add(found.step)
    record_property("tried", stop_at)
    assert outcomes == {1, 2}


def test_a_different_world_size_is_refused_or_takes_the_shared_state_alone(ranks, tmp_path):
    def write():
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, 5)
        save(tmp_path, 7, parts={"model": model}, data_position={"epoch": 1, "sample": 30})

    def read(reshard):
        model = torch.nn.Linear(2, 2)
        torch.manual_seed(1)
        resumed = load(tmp_path, parts={"model": model}, reshard=reshard)
        return resumed.step, resumed.data_position, model.weight[0, 0].item(), torch.initial_seed()

    ranks(2).run(write)
    with pytest.raises(RankError, match="saved by 2 ranks, this job has 3; resume with 2"):
        ranks(3).run(read, False)
    assert ranks(3).run(read, True) == [(7, {"epoch": 1, "sample": 30}, 5.0, 1)] * 3


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


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"other": torch.nn.Linear(3, 2)}, r"has parts \['model'\]; got \['other'\]"),
        ({"model": torch.nn.Linear(3, 4)}, r"weight is torch.float32 \[2, 3\] in the checkpoint"),
        ({"model": torch.nn.Linear(3, 2, bias=False)}, "bias is .* in the checkpoint and nothing in the model"),
        ({"model": torch.nn.Linear(3, 2).double()}, "float32 .* in the checkpoint and torch.float64"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_any_changes(tmp_path, parts, words):
    save(tmp_path, 1, parts={"model": torch.nn.Linear(3, 2)})
    before = [parameter.clone() for part in parts.values() for parameter in part.parameters()]
    with pytest.raises(ValueError, match=words):
        load(tmp_path, parts=parts)
    after = [parameter for part in parts.values() for parameter in part.parameters()]
    assert all(map(torch.equal, before, after))


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    model = torch.nn.Linear(3, 2)
    save(tmp_path, 1, parts={"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    optimizer = torch.optim.SGD([model.weight], 0.1)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters in the checkpoint, of \[1\] here"):
        load(tmp_path, parts={"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_of_a_different_kind_is_refused_and_nothing_changes(tmp_path, wrapped):
    def parts(make):
        model = torch.nn.Linear(3, 2)
        made = {"model": model, "optimizer": make(model.parameters())}
        return {"training": PerRank(made)} if wrapped else made, model

    kinds = [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
    for saved in kinds:
        directory = tmp_path / str(kinds.index(saved))
        save(directory, 1, parts=parts(saved)[0])
        for other in kinds:
            made, model = parts(other)
            before = model.weight.detach().clone()
            if other is saved:
                assert load(directory, parts=made).step == 1
                continue
            there, here = (type(kind([model.weight])).__name__ for kind in (saved, other))
            with pytest.raises(ValueError, match=f"optimizer is {there} in the checkpoint and {here} here; build"):
                load(directory, parts=made)
            assert torch.equal(model.weight, before)


class Meter:
    """A part whose state cannot be loaded without running code."""

    def state_dict(self):
        return {"history": [1.0, {"last": object()}]}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parts": {"meter": Meter()}}, r"meter\['history'\]\[1\]\['last'\] is a object"),
        ({"parts": {}, "data_position": np.int64(3)}, "data_position is a int64"),
        ({"parts": {}, "keep": 0}, "keep is 0"),
        ({"parts": {}, "step": -1}, "step is -1"),
        ({"parts": {}, "step": "last"}, "step is 'last'"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        save(tmp_path, **({"step": 1} | arguments))
    assert os.listdir(tmp_path) == []
