"""What reaches other ranks where no record sees it is refused; what Python and torch do for themselves is not."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import re
import shutil
import signal
import socket
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distlab.grading import Exercise, Fault, load_lesson, reference_of
from distlab.grading.check import examine
from distlab.grading.sandbox.guard import MAX_FILE_BYTES
from distlab.grading.variation.sent import not_taking_part, taking_part


def mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def writes_a_file(tensor):
    with open(f"{tempfile.gettempdir()}/seen-{dist.get_rank()}", "w") as file:
        file.write("1")
    return mean(tensor)


def writes_a_descriptor(tensor):
    os.open(f"{tempfile.gettempdir()}/seen-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
    return mean(tensor)


def writes_by_path(tensor):
    Path(tempfile.gettempdir(), "seen").write_text("1")
    return mean(tensor)


def saves_by_torch(tensor):
    torch.save(tensor, f"{tempfile.gettempdir()}/seen-{dist.get_rank()}.pt")
    return mean(tensor)


def saves_by_numpy(tensor):
    np.save(f"{tempfile.gettempdir()}/seen-{dist.get_rank()}.npy", tensor.numpy())
    return mean(tensor)


def makes_folders(tensor):
    os.mkdir(f"{tempfile.gettempdir()}/seen-{dist.get_rank()}")
    return mean(tensor)


def links(tensor):
    os.symlink("1", f"{tempfile.gettempdir()}/seen-{dist.get_rank()}")
    return mean(tensor)


def maps_a_file(tensor):
    torch.from_file(f"{tempfile.gettempdir()}/seen", shared=True, size=1)
    return mean(tensor)


def maps_memory(tensor):
    mmap.mmap(-1, 100)
    return mean(tensor)


def shares_memory(tensor):
    shared_memory.SharedMemory("seen", create=True, size=100)
    return mean(tensor)


def opens_a_socket(tensor):
    socket.socket()
    return mean(tensor)


def calls_c(tensor):
    ctypes.CDLL(None).open(b"/dev/null", 0)
    return mean(tensor)


def starts_by_c(tensor):
    ctypes.CDLL(None)["popen"]
    return mean(tensor)


def calls_c_by_cffi(tensor):
    importlib.import_module("cffi")
    return mean(tensor)


def writes_a_database(tensor):
    sqlite3.connect(f"{tempfile.gettempdir()}/seen.db").execute("create table if not exists seen(a)")
    return mean(tensor)


def writes_a_shelf(tensor):
    importlib.import_module("dbm.gnu")
    return mean(tensor)


def locks_a_file(tensor):
    with open("/etc/passwd") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    return mean(tensor)


def makes_a_pipe(tensor):
    os.mkfifo(f"{tempfile.gettempdir()}/seen-{dist.get_rank()}")
    return mean(tensor)


def makes_a_file_in_memory(tensor):
    os.memfd_create("seen")
    return mean(tensor)


def signals(tensor):
    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)
    return mean(tensor)


def shares_a_tensor(tensor):
    tensor.share_memory_()
    return mean(tensor)


def asks_a_store(tensor):
    importlib.import_module("torch.distributed.distributed_c10d")._get_default_store().num_keys()
    return mean(tensor)


def reads_memory(tensor):
    with open(f"/proc/{os.getppid()}/mem", "rb") as file:
        file.read(1)
    return mean(tensor)


def cleans_up_and_writes(folder):
    """Write where the arguments say, through each way that a right answer takes."""
    (folder / "a" / "b").mkdir(parents=True)
    torch.save(torch.zeros(1), folder / "a" / "one.pt")
    (folder / "a" / "two").write_text("2")
    os.rename(folder / "a" / "two", folder / "two")
    shutil.rmtree(folder / "a")
    try:
        os.truncate(folder / "two", MAX_FILE_BYTES + 1)
    except OSError:  # a file may not be larger
        (folder / "two").unlink()
    return sorted(os.listdir(folder))


def test_what_lies_in_the_arguments_folder_may_change(mean_exercise: Exercise, tmp_path: Path) -> None:
    one = replace(
        mean_exercise,
        drive=lambda fn: fn(tmp_path),
        judge=lambda evidence: [] if evidence.results[0] == [] else [Fault("left", str(evidence.results))],
        budget=None,
        vary=None,
    )
    report = examine(one, lambda tensor: cleans_up_and_writes(tensor), worlds=(1,))
    assert report.passed, str(report)


def writes_in_a_helper(tensor):
    def write(path):
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"1")

    write(tempfile.gettempdir())
    return mean(tensor)


WAYS = [
    (writes_a_file, r"it writes to the file \S+seen-0, which reaches the other ranks where no record sees it"),
    (writes_a_descriptor, "writes to the file"),
    (writes_by_path, "writes to the file"),
    (saves_by_torch, r"writes to the file \S+seen-0.pt"),
    (saves_by_numpy, r"writes to the file \S+seen-0.npy"),
    (makes_folders, "writes to the file"),
    (links, "writes to the file"),
    (maps_a_file, "calls from_file"),
    (maps_memory, "maps memory"),
    (shares_memory, "calls shm_open"),
    (opens_a_socket, "opens a socket"),
    (calls_c, "calls C's open"),
    (starts_by_c, "calls C's popen"),
    (calls_c_by_cffi, "calls C by cffi"),
    (writes_a_database, r"writes to the file \S+seen.db"),
    (writes_a_shelf, "opens a database"),
    (locks_a_file, "locks the file"),
    (makes_a_pipe, "writes to the file"),
    (makes_a_file_in_memory, "calls memfd_create"),
    (signals, "calls pidfd_open"),
    (shares_a_tensor, "calls share_memory_"),
    (asks_a_store, "calls Store.num_keys"),
    (reads_memory, "reads the memory of a process"),
    (writes_in_a_helper, "writes to the file"),
]


@pytest.mark.parametrize(("fn", "says"), WAYS, ids=[fn.__name__ for fn, _ in WAYS])
def test_a_way_around_is_refused(mean_exercise: Exercise, fn: Callable[..., object], says: str) -> None:
    report = examine(mean_exercise, fn, worlds=(1,))
    assert report.fault == "went around", str(report)
    assert re.search(says, report.message), report.message


def looks_at_lines(tensor):
    """Do what libraries do with files: import, read a source, format a traceback, write where nobody reads."""
    import inspect
    import traceback

    importlib.import_module("this")
    importlib.import_module("wave")
    inspect.getsource(torch.nn.Linear)
    try:
        raise ValueError
    except ValueError:
        traceback.format_exc()
    with open(os.devnull, "w") as file:
        print("nothing", file=file)
    ctypes.CDLL(None).malloc_trim(0)
    sqlite3.connect(":memory:").execute("select 1")
    return torch.compile(lambda x: x * 1, backend="eager")(mean(tensor))


def test_what_libraries_do_with_files_is_not_refused(mean_exercise: Exercise) -> None:
    report = examine(mean_exercise, looks_at_lines, worlds=(2,))
    assert report.passed, str(report)


class Run(NamedTuple):
    """What `taking_part` needs of a run."""

    world_size: int
    records: Any


class Records:
    """Two ranks: one calls what the test says, the other an all-reduce of 8 bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.by_rank = {0: num_bytes, 1: 8}

    def calls(self, rank):
        return [SimpleNamespace(op="all_reduce", num_bytes=self.by_rank[rank])]


def test_a_rank_that_carries_no_number_is_told() -> None:
    barrier, right = taking_part(Run(2, Records(0))), taking_part(Run(2, Records(8)))
    fault = not_taking_part(barrier, right)
    assert fault is not None
    assert "rank 0 sent and received 0 bytes through torch.distributed" in fault.message
    assert not_taking_part(right, right) is None
    assert not_taking_part(right, barrier) is None


def loads_the_reference() -> Callable[..., object]:
    def answer(module):
        from distlab.grading import load_lesson, reference_of

        return reference_of(load_lesson("03.flat").exercise("03.flat"))(module)

    return answer


def holds_the_reference() -> Callable[..., object]:
    reference = reference_of(load_lesson("03.flat").exercise("03.flat"))  # now: other tests load the lesson anew
    return lambda module: reference(module)


@pytest.mark.parametrize("answer", [loads_the_reference, holds_the_reference])
def test_the_reference_is_not_an_answer(answer: Callable[[], Callable[..., object]]) -> None:
    report = examine(load_lesson("03.flat").exercise("03.flat"), answer(), worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "reference"), str(report)
    assert "write the function yourself" in report.message


def starts_a_process_in(name: str) -> Callable[..., object]:
    def answer(tensor):
        exec(f"import os, subprocess, multiprocessing; {name}")
        return mean(tensor)

    return answer


PROCESSES = [
    "os.system('true')",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess.run(['true'])",
    "os.popen('true')",
    "multiprocessing.get_context('fork').Process(target=int).start()",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
]


@pytest.mark.parametrize("line", PROCESSES)
def test_no_process_is_started(mean_exercise: Exercise, line: str) -> None:
    report = examine(mean_exercise, starts_a_process_in(line), worlds=(1,))
    assert report.fault == "forked", str(report)
    assert "it starts a process" in report.message


def test_what_an_answer_returns_runs_behind_the_fence(mean_exercise: Exercise) -> None:
    def answer(tensor):
        def later():
            with open(f"{tempfile.gettempdir()}/seen-later", "w") as file:
                file.write("1")

        return later, 1

    one = replace(mean_exercise, drive=lambda fn: fn(torch.zeros(1))[0](), vary=None)
    report = examine(one, answer, worlds=(1,))
    assert report.fault == "went around", str(report)
