"""What the tests of killed runs share: the ways to die, and what "the same bits" means."""

import os
import signal
import threading

import torch


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


def same_bits(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other
