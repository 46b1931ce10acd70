"""run: results, output, where it can be called from, and what it refuses before it starts anything."""

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch.fork_client import preload

SCRIPT = """
import os, signal, time, warnings
from typing import Any
import psutil
from distlab.comm import run
from distlab.comm.launch.fork_client import OPTIMIZERS, PRELOAD, fork_server, shut_down
few = [module for module in PRELOAD if module != OPTIMIZERS]  # these ranks have no optimizers, whose loading takes long
fork_server(few)
class Base: sign = -1
def f():
    class Inner(Base):
        size: Any = 3
        def get(self: Any): return self.sign * self.size
    return Inner().get()
def total(k):
    import torch
    import torch.distributed as dist
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item() * k
print(run(total, 3, args=(2,)), run(lambda: __name__, 2), run(f, 1))
first = psutil.Process(fork_server().pid)
first.kill()
while fork_server(few).pid == first.pid:
    time.sleep(0.01)
second = psutil.Process(fork_server(few).pid)
print("a new one:", run(os.getppid, 1) == [second.pid])
warnings.simplefilter("ignore")
child = os.fork()
if not child:  # a copy of this program does not hold its ranks alive
    time.sleep(60)
    os._exit(0)
begin = time.monotonic()
shut_down()
print("ends soon:", time.monotonic() - begin < 9, second.is_running())
os.kill(child, signal.SIGKILL)
"""
EXPECTED = """[6.0, 6.0, 6.0] ['__main__', '__main__'] [-3]
a new one: True
ends soon: True False
"""


# From `python -c` and from standard input: test_no_orphans; from a notebook: tests/course/notebook/test_magic.py.
def test_a_script_without_a_guard_runs_once_with_its_names_and_its_fork_server_is_replaced_when_it_has_gone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-W", "default", str(script)], capture_output=True, text=True, timeout=280)
    assert (done.stdout, done.stderr) == (EXPECTED, "")  # nor a warning: of sockets, or of forks beside threads


class Reading:
    def __init__(self, value: float) -> None:
        self.value = value


def test_results_keep_their_class_and_large_ones_arrive(ranks):
    class Record:
        ops = 3  # beside the name torch: cloudpickle would send torch.ops

    def work(offset: torch.Tensor) -> tuple[Reading, torch.Tensor]:
        return Reading(dist.get_rank() + 0.5), offset + torch.arange(300_000), Record.ops

    results = ranks(2).run(work, torch.full((300_000,), 7))
    assert [type(reading) for reading, *_ in results] == [Reading, Reading]
    assert [reading.value for reading, *_ in results] == [0.5, 1.5]
    assert all(torch.equal(tensor, 7 + torch.arange(300_000)) and ops == 3 for _, tensor, ops in results)


def test_each_rank_has_one_thread_and_the_launcher_s_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTLAB_PASSED_ON", "yes")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # `make test` sets it
    monkeypatch.chdir(tmp_path)

    def look() -> tuple:
        names = ("DISTLAB_PASSED_ON", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        return torch.get_num_threads(), os.getcwd(), *(os.environ.get(name) for name in names)

    expected = (1, str(tmp_path), "yes", None)
    assert run(look, 2) == [(*expected, "0", "2", "0"), (*expected, "1", "2", "1")]


@pytest.mark.gloo("looks at gloo's sockets; in shared memory there are none")
def test_every_socket_is_on_loopback_and_the_folder_is_private(ranks):
    def look() -> tuple[set[str], int]:
        dist.barrier()
        folder = Path(tempfile.gettempdir(), os.environ["DISTLAB_JOB"])
        return {c.laddr.ip for c in psutil.Process().net_connections("inet")}, folder.stat().st_mode & 0o777

    for addresses, mode in ranks(2).run(look):
        assert addresses, "gloo uses sockets"
        assert addresses <= {"127.0.0.1", "::1"}
        assert mode == 0o700


def test_output_is_prefixed_and_streamed_also_from_c(capfd, tmp_path):
    go, seen = tmp_path / "go", []

    def talk() -> None:
        import ctypes

        print("from Python")
        sys.stderr.write("from stderr\n")
        os.write(1, b"from a descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        while not go.exists():
            time.sleep(0.02)
        print("end", end="")

    def echo(rank: int, line: str) -> None:
        seen.append(line)
        if line == "from C":  # what a rank prints is seen while it runs
            go.touch()

    with Ranks(1, timeout_s=200, echo=echo) as pool:
        pool.run(talk)
    assert {"from Python", "from stderr", "from a descriptor", "from C"} == set(seen[:-1])
    assert seen[-1] == "end"
    run(lambda: print("shown"), 1)
    run(lambda: print("hidden"), 1, echo=False)
    assert capfd.readouterr().out == "[rank 0] shown\n"


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"world_size": size}, f"world_size is {size!r}") for size in (0, "4", True, 10**9)),
        ({"backend": "glo"}, "backend is 'glo'; pass one of gloo, shared, nccl"),
        ({"backend": "gloo", "nodes": 2}, "the ranks make 2 nodes, which have a backend of their own"),
        ({"backend": 3}, "backend is 3"),
        ({"backend": "nccl", "world_size": 99}, "backend nccl needs a GPU for each of 99 ranks"),
        ({"timeout_s": 0}, "timeout_s is 0; pass a positive number"),
        ({"timeout_s": "60"}, "timeout_s is '60'"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"args": "ab"}, "args is 'ab'; pass a tuple"),
        ({"args": 3}, "args is 3; pass a tuple"),
        ({"fn": 3}, r"fn is 3; pass a function .* not train\(\)"),
        ({"args": (1, LOCK)}, "argument 1 cannot be pickled"),
        ({"fn": lambda: LOCK}, "cannot be sent to the ranks: the global variable 'LOCK' cannot be pickled"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError, match=message) as caught:
        run(**{"fn": print, "world_size": 2} | options)
    assert "\n" not in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) <= before


def _open_files() -> set[tuple[str, str]]:
    """Return each open descriptor of this process with what it names: ("7", "pipe:[1234]")."""
    gc.collect()
    numbers = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    return {(fd, os.readlink(f"/proc/self/fd/{fd}")) for fd in numbers}


def a_mismatch():
    """Ranks that make other calls: the record is read for the text."""
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def test_no_descriptor_no_open_file_and_no_folder_is_left():
    (name,) = run(lambda: os.environ["DISTLAB_JOB"], 1)
    pattern = f"{name.rpartition('_')[0]}_*"
    folders = set(Path(tempfile.gettempdir()).glob(pattern))
    before = _open_files()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(os.getpid, 2)
        for fails in (lambda: 1 / 0, a_mismatch):
            with pytest.raises(RankError):
                run(fails, 2, echo=False)
        gc.collect()
    assert [str(one.message) for one in seen if issubclass(one.category, ResourceWarning)] == []
    assert _open_files() - before == set()  # an earlier test's files may close meanwhile, none may be new
    assert set(Path(tempfile.gettempdir()).glob(pattern)) <= folders  # those of ranks that other tests keep


def test_a_module_is_loaded_once_for_all_ranks_that_start_later():
    def is_loaded():
        return "tabnanny" in sys.modules

    assert run(is_loaded, 1) == [False]
    preload("tabnanny", "no_such_module")
    assert run(is_loaded, 2) == [True, True]


def test_the_backend_that_nobody_names_can_be_chosen_outside(monkeypatch):
    monkeypatch.delenv("DISTLAB_BACKEND", raising=False)
    assert run(dist.get_backend, 2, backend="cpu", record=False) == ["shared"] * 2
    assert run(dist.get_backend, 2, backend="gloo", record=False) == ["gloo"] * 2
    monkeypatch.setenv("DISTLAB_BACKEND", "gloo")
    assert run(dist.get_backend, 1, record=False) == ["gloo"]
    assert run(dist.get_backend, 1, backend="cpu", record=False) == ["gloo"], "only the kind is named"
    monkeypatch.setenv("DISTLAB_BACKEND", "telepathy")
    with pytest.raises(ValueError, match="DISTLAB_BACKEND is 'telepathy'; pass one of gloo, shared"):
        run(dist.get_backend, 2)
