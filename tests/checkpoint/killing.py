"""What the tests of killed runs share: a run that saves, the ways to die, and what "the same bits" means."""

import os
import random
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from distlab.checkpoint import files, load, save
from distlab.comm import RankError

SAVE_EVERY = 3


def go_on(directory, parts, one_step, end, *, victim=None, steps=None, saves=None, delay_s=0.0):
    """Go on from the newest checkpoint; the victim is killed delay_s into a step or a save (None: in a write)."""
    resumed = load(directory, parts=parts)
    first = resumed.data_position if resumed else 0
    num_saves = 0
    for step in range(first, end):
        if dist.get_rank() == victim and step - first == steps:
            kill_after(delay_s)
        one_step(step)
        if (step + 1) % SAVE_EVERY == 0:
            if dist.get_rank() == victim and num_saves == saves:
                kill_at_flush() if delay_s is None else kill_after(delay_s)
            save(directory, step + 1, parts=parts, data_position=step + 1, keep=2)
            num_saves += 1


def lose_the_newest(directory):
    """Run on each rank: the checkpoint before it is the newest again."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(files.saved(directory)[0][2], directory.parent / f"later than {directory.name}")
    dist.barrier()


def twice(train, directory, **how):
    """Run on each rank: train to the end, and again from the last checkpoint but one."""
    final = train(directory, **how)
    lose_the_newest(directory)
    return final, train(directory, **how)


def kill_until(ranks, train, folder, kills, *, first=None, delay_s=0.02):
    """Kill runs of two ranks at random moments and resume them; each must end with the bits of one never killed.

    `first` is how the first one dies. Returns the number of kills while a save was unfinished.
    """
    expected = ranks(2).run(train, folder / "uninterrupted")
    chance = random.Random(0)
    num_kills = num_runs = num_while_saving = 0
    while num_kills < kills:
        num_runs += 1
        directory, final = folder / f"run {num_runs}", None
        while final is None:
            when = {"steps": chance.randrange(12)} if chance.random() < 0.5 else {"saves": chance.randrange(3)}
            death = {"victim": chance.randrange(2), "delay_s": chance.uniform(0, delay_s), **when}
            death = first if num_kills == 0 and first else {} if num_kills == kills else death
            try:
                final = ranks(2).run(lambda directory=directory, death=death: train(directory, **death))
            except RankError as error:
                require_kill(error)
                num_kills += 1
                num_while_saving += has_unfinished_save(directory)
        assert same_bits(final, expected), f"run {num_runs}"
    print(f"{num_kills} kills in {num_runs} runs, {num_while_saving} while saving")
    return num_while_saving


def kill_after(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def kill_at_flush():
    """Die where the next file is flushed to the disk: inside a save, whatever the machine is doing."""

    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die


def require_kill(error):
    if "SIGKILL" not in str(error):
        raise error


def has_unfinished_save(directory):
    return directory.is_dir() and any(name.startswith(".saving") for name in os.listdir(directory))


def refused(call, *words):
    """Call, which must raise ValueError with these words; return its text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are looked at)
        call()
    assert all(one in str(caught.value) for one in words), str(caught.value)
    return str(caught.value)


def same_bits(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other
