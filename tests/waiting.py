"""Wait until something is so, and find processes by words of their environment, which children inherit."""

import contextlib
import os
import time

import psutil


def wait_for(what, limit_s=100):
    """Return what a call returns, once that is something."""
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)
    return found


def are_gone(pids):
    return not any(map(psutil.pid_exists, pids))


def processes_with(*words):
    """Return the living processes, but this one, in whose environment all of these words stand, such as NAME=value."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # one that ends while it is asked is not left
            said = [f"{name}={value}" for name, value in process.environ().items()]
            marked = process.pid != os.getpid() and all(any(word in one for one in said) for word in words)
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
