"""What the tests of killed runs share: a run that saves, a kill, and what "the same bits" means."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from distlab.checkpoint import files, load, save

SAVE_EVERY = 3


def go_on(directory, parts, one_step, end):
    """Go on from the newest checkpoint, and save every third step."""
    resumed = load(directory, parts=parts)
    for step in range(resumed.data_position if resumed else 0, end):
        one_step(step)
        if (step + 1) % SAVE_EVERY == 0:
            save(directory, step + 1, parts=parts, data_position=step + 1, keep=2)


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


def kill_after(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def require_kill(error):
    if "SIGKILL" not in str(error):
        raise error


class DiskThat:
    """Stands for `os` in a module under test, with one function changed; where it is entered, in that module."""

    def __init__(self, module, **changed):
        self.module, self.changed = module, changed

    def __getattr__(self, name):
        return self.changed.get(name) or getattr(os, name)

    def __enter__(self):
        self.module.os = self

    def __exit__(self, *_):
        self.module.os = os


def full(*_):
    raise OSError(28, "No space left on device")


def refused(call, *words):
    """Call, which must raise ValueError with these words; return its text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words are looked at)
        call()
    assert all(one in str(caught.value) for one in words), str(caught.value)
    return str(caught.value)


class Evil:
    """Makes a folder where a pickle of it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


def same_bits(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other
