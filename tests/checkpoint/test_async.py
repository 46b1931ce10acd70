"""Saves that run beside training: what is on the disk, who waits for whom, and who hears of a failure."""

import os
import random
import threading
import time
import warnings
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_cuda import fake_gpu
from killing import DiskThat, full, kill_after, require_kill, same_bits
from test_files import cut_off_everywhere, model_of
from torch.optim.optimizer import _global_optimizer_pre_hooks

from distlab.checkpoint import AsyncSaves, CheckpointError, asynchronous, files, load, newest, save
from distlab.checkpoint.snapshot import Snapshot
from distlab.comm import RankError, device
from distlab.comm.device import CopyStream
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedState


class Net(torch.nn.Module):
    """Weights that are copied later, and large buffers that forward changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(20, 20_000), torch.nn.BatchNorm1d(20_000)
        self.last = torch.nn.Linear(20_000, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def training(sharded, seed=0):
    """Return a step, and what is saved."""
    torch.manual_seed(seed)
    model = FullyShard(Net()) if sharded else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)

    def step(number):
        optimizer.zero_grad()
        model(torch.rand(4, 20, generator=generator(number, 0, "data"))).sum().backward()
        if sharded:
            model.synchronize()
        optimizer.step()
        schedule.step()

    parts = {"training": ShardedState(model, optimizer)} if sharded else {"model": model, "optimizer": optimizer}
    return step, parts | {"schedule": schedule}


def compare(folder, sharded):
    """Save beside training, and at once; return whether both hold the same at each step, and where a load goes on."""
    finish, (step, parts) = Snapshot.finish, training(sharded)
    slow = lambda self: time.sleep(0.1) or finish(self)  # noqa: E731 (an update that did not wait would be seen)
    with patch.object(Snapshot, "finish", slow), AsyncSaves(folder / "beside", keep=9) as saves:
        for number in range(2):
            step(number)
            save(folder / "at once", number + 1, parts=parts, data_position=[number], keep=9)
            saves.save(number + 1, parts=parts, data_position=[number])  # the next update is under way at once
        step(2)
        path = saves.wait()
    assert path.name == "step-0000000002"
    contents = []
    for path in sorted((folder / "at once").iterdir()):
        beside, names = folder / "beside" / path.name, sorted(os.listdir(path))
        assert sorted(os.listdir(beside)) == names
        for name in (name for name in names if name.endswith(".pt")):
            contents.append(same_bits(*(torch.load(at / name, weights_only=True) for at in (path, beside))))
    resumed = load(folder / "beside", parts=training(sharded, seed=1)[1])
    return contents, resumed.step, resumed.data_position


@pytest.mark.soak_where(world_size=[1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_saved_is_the_state_when_save_was_called(ranks, tmp_path, world_size):
    for sharded in (False, True):
        for found in ranks(world_size).run(compare, tmp_path / str(sharded), sharded):
            assert found == ([True] * 2 * (1 + world_size), 2, [1])


class Live:
    """A part that gives its own lists and tensors, and goes on to change them."""

    def __init__(self):
        self.history, self.best = [], {}

    def state_dict(self):
        return {"history": self.history, "best": self.best, "empty": []}

    def load_state_dict(self, state):
        self.history, self.best = state["history"], state["best"]


@pytest.fixture
def disk(monkeypatch):
    """A disk that writes nothing until it is set; it notes the newest checkpoint at each write."""
    gate, write = threading.Event(), asynchronous.write
    gate.seen = []

    def slow(prepared, *arguments):
        gate.seen.append(newest(prepared.parent))
        assert gate.wait(60)
        return write(prepared, *arguments)

    monkeypatch.setattr(asynchronous, "write", slow)
    return gate


def test_what_a_part_goes_on_to_change_is_saved_as_it_was(tmp_path, disk):
    part, small = Live(), torch.zeros(3)
    part.history.append(small)
    with AsyncSaves(tmp_path) as saves:
        saves.save(1, parts={"live": part})
        small += 1
        part.history.append(2)
        part.best["loss"] = 0.5
        disk.set()
    back = Live()
    load(tmp_path, parts={"live": back})
    assert same_bits(back.history, [torch.zeros(3)])
    assert back.best == {}


def test_a_second_save_waits_for_the_first_and_nothing_is_left(tmp_path, disk):
    before = threading.active_count()
    saves = AsyncSaves(tmp_path)
    saves.save(1, parts={"model": model_of(1)})
    assert newest(tmp_path) is None
    threading.Timer(0.3, disk.set).start()
    saves.save(2, parts={"model": model_of(2)})
    saves.wait()
    assert [one and one.step for one in disk.seen] == [None, 1], "the first is complete before the second begins"
    assert sorted(os.listdir(tmp_path)) == ["step-0000000001", "step-0000000002"]
    assert threading.active_count() <= before + 1, "the timer at most"


def fail_on_one_rank(folder):
    """Run on each rank: ranks differ, then the second save fails on rank 1's disk; the run goes on."""
    saves, odd = AsyncSaves(folder), Live()
    odd.best = {1, 2}
    for step, parts, words in (
        (1 + dist.get_rank(), {}, r"ranks save different steps or data positions .rank 0: 1 and 0, rank 1: 2 and 0"),
        (1, {"odd": odd}, r"odd\['best'\] is a set"),
    ):
        with pytest.raises(ValueError, match=words):
            saves.save(step, parts=parts)
    saves.save(1, parts={"model": model_of(1)})
    saves.wait()
    with DiskThat(files, write=full) if dist.get_rank() == 1 else nullcontext():
        saves.save(2, parts={"model": model_of(2)})  # no word of it yet
        with pytest.raises(CheckpointError) as caught:
            saves.save(3, parts={"model": model_of(3)})
    dist.barrier()
    found = newest(folder).step, sorted(os.listdir(folder))
    dist.barrier()
    saves.save(4, parts={"model": model_of(4)})
    saves.wait()
    return str(caught.value), found, newest(folder).step


def fail_to_publish(folder):
    """Run on each rank: rank 0 cannot give the checkpoint its name."""
    saves = AsyncSaves(folder)
    with patch.object(files, "publish", side_effect=TypeError("no manifest")):
        saves.save(1, parts={"model": model_of(1)})
        with pytest.raises(CheckpointError) as caught:
            saves.wait()
    return str(caught.value)


def fail_to_train(folder):
    """Run on each rank: training raises while rank 1's file never comes; return whether threads and hooks are gone."""

    def train():
        with AsyncSaves(folder) as saves:
            saves.save(1, parts={"model": model_of(1)})
            saves.wait()
            with patch.object(asynchronous, "write") if dist.get_rank() == 1 else nullcontext():
                saves.save(2, parts={"model": model_of(2)})
                raise ZeroDivisionError

    before = threading.active_count(), len(_global_optimizer_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        train()
    return before == (threading.active_count(), len(_global_optimizer_pre_hooks))


def test_an_error_on_one_rank_reaches_every_rank_at_the_next_save_and_leaves_the_one_before(ranks, tmp_path):
    for told, found, last in ranks(2).run(fail_on_one_rank, tmp_path / "disk"):
        assert told == f"cannot save step 2 in {str(tmp_path / 'disk')!r}: rank 1: [Errno 28] No space left on device"
        assert found == (1, ["step-0000000001"]), "the one before is still there, and nothing of the failed one"
        assert last == 4
    one, other = ranks(2).run(fail_to_publish, tmp_path / "name")
    assert one == other
    assert one.endswith("rank 0: TypeError: no manifest")
    assert os.listdir(tmp_path / "name") == []
    assert ranks(2).run(fail_to_train, tmp_path / "raised") == [True, True]
    assert newest(tmp_path / "raised").step == 1


def test_who_changes_weights_by_hand_is_told_and_nothing_torn_is_published(tmp_path, monkeypatch):
    finish, go_on = Snapshot.finish, threading.Event()
    monkeypatch.setattr(Snapshot, "finish", lambda self: go_on.wait(60) and finish(self))
    model = torch.nn.Linear(300, 300)
    with AsyncSaves(tmp_path) as saves:
        saves.save(1, parts={"model": model})
        with torch.no_grad():
            model.weight.add_(1.0)
        go_on.set()
        torch.optim.SGD(model.parameters()).step()  # no update waits for a copy that failed
        with pytest.raises(CheckpointError, match=r"a tensor \[300, 300\] of torch.float32 was changed while"):
            saves.wait()
        assert os.listdir(tmp_path) == []
        saves.save(2, parts={"model": model})
        saves.wait()
        with torch.no_grad():
            model.weight.add_(1.0)
    assert newest(tmp_path).step == 2


def races_of(monkeypatch, fault=None):
    """Update in a stream of its own, take a snapshot, copy it in a different stream as a thread does, and read it."""
    with fake_gpu() as gpu, monkeypatch.context() as changed:
        if fault:
            changed.setattr(device, fault, lambda *_: None)
        weights, small = torch.zeros(300, 300), torch.zeros(3)
        taken = Snapshot()
        with CopyStream(torch.device("cpu")).after_current():
            weights.add_(1)
            small.add_(1)
            state = taken.begin({"weights": weights, "small": small})
        assert gpu.waits == [], "the host goes on to train"
        taken.finish()
        assert (state["weights"] + 0).sum() + (state["small"] + 0).sum() == 300 * 300 + 3
        return gpu.races, gpu.pinned


def test_on_a_gpu_copies_come_after_the_update_and_before_the_writer(monkeypatch):
    """By a double of torch.cuda, which sees a missing wait."""
    assert races_of(monkeypatch) == ([], 2)
    for fault in ("wait_in_stream", "wait_for_event"):
        assert races_of(monkeypatch, fault)[0], fault


class InPlace:
    """Stands for a thread: what it runs is seen at each call, as of the thread that looks."""

    def __init__(self, target, **_):
        self.start = target

    def join(self):
        pass


@pytest.mark.parametrize("power_fails", [False, True])
def test_cut_off_at_any_operation_the_newest_checkpoint_is_whole(tmp_path, power_fails, record_property):
    def act(directory):
        with patch.object(threading, "Thread", InPlace):
            AsyncSaves(directory, keep=2).save(3, parts={"model": model_of(3)})

    outcomes = [found for _, found in cut_off_everywhere(tmp_path, (1, 2), act, power_fails=power_fails)]
    record_property("tried", len(outcomes))
    assert len(outcomes) > 15
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {2, 3}


def save_for_ever(directory, victim, delay_s):
    """Run on each rank: save beside training, step after step; note each step that is known to be on the disk."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    found = load(directory, parts={"model": model})
    step = found.step if found else 0
    assert not found or bool((model.weight == step).all())
    if rank == victim:
        kill_after(delay_s)
    saves = AsyncSaves(directory, keep=1)
    while True:
        step += 1
        path = saves.wait()
        if path is not None and rank == 0:
            (directory / "known").write_text(str(int(path.name[5:15])))
        torch.nn.init.constant_(model.weight, step)
        saves.save(step, parts={"model": model})


@pytest.mark.parametrize(("world_size", "kills"), [(2, 3), pytest.param(4, 60, marks=pytest.mark.soak)])
def test_killed_at_random_moments_nothing_known_to_be_saved_is_lost(
    ranks, tmp_path, world_size, kills, record_property
):
    record_property("tried", kills)
    chance = random.Random(world_size)
    for _ in range(kills):
        with pytest.raises(RankError) as caught:
            ranks(world_size).run(save_for_ever, tmp_path, chance.randrange(world_size), chance.uniform(0, 0.1))
        require_kill(caught.value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = newest(tmp_path)
        known = int((tmp_path / "known").read_text() or 0) if (tmp_path / "known").exists() else 0
        assert (found.step if found else 0) >= known
