"""Endings that nobody plans: full disks, limits, folders that are gone, signals, copies, errors that cannot be read."""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch import fork_client
from distlab.comm.launch.fork_client import ForkServer, fork_server
from distlab.comm.record import file
from distlab.comm.record.file import RecordWriter


def test_a_record_has_its_room_before_the_first_call(tmp_path, monkeypatch):
    """To write into a mapped file where the disk has no room would end the rank with SIGBUS."""
    writer = RecordWriter(tmp_path, 0, 64)
    assert os.stat(writer._file.fileno()).st_blocks * 512 >= len(writer._map)
    writer._names = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left on device"):
        writer.text("train.py:3")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        RecordWriter(tmp_path, 1, 64)


FULL = """
import os, subprocess, sys, tempfile
from distlab.comm import run

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", sys.argv[1]], check=True)
tempfile.tempdir = sys.argv[1]
run(int, 2)
"""


def test_ranks_without_room_for_their_records_are_refused(tmp_path):
    apart = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no program mount a disk that others do not see")
    (tmp_path / "script.py").write_text(FULL)
    (tmp_path / "small").mkdir()
    command = [*apart, sys.executable, str(tmp_path / "script.py"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "could not join the group in " in done.stderr
    assert "make room there, or set TMPDIR to a different folder): OSError: [Errno 28] No space left" in done.stderr


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_a_result_that_cannot_be_read_names_its_rank():
    with Ranks(2) as pool:
        with pytest.raises(RankError, match=r"rank 1 of 2 returned what cannot be read: ZeroDivision.*; return plain"):
            pool.run(lambda: Bomb() if dist.get_rank() == 1 else None)
        assert pool.run(dist.get_rank) == [0, 1], "the ranks go on"


def copy_itself():
    """A copy of rank 1 comes out of the function as the rank does, and sooner."""
    if dist.get_rank() == 1:
        copy = os.fork()
        if not copy:
            return "copy"
        os.waitpid(copy, 0)
    return "rank"


def test_a_copy_of_a_rank_does_not_answer_for_it():
    with Ranks(2) as pool:
        for _ in range(2):
            assert pool.run(copy_itself) == ["rank", "rank"]


CLOSED = """
import sys
from distlab.comm import run
try:
    run(int, 2)
except RuntimeError as error:
    open(sys.argv[1], "w").write(str(error))
"""


def test_a_program_without_standard_files_is_refused(tmp_path):
    (tmp_path / "script.py").write_text(CLOSED)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, tmp_path / "script.py", tmp_path / "said"]
    subprocess.run(command, timeout=100)
    assert "standard input, output or errors are closed" in (tmp_path / "said").read_text()


def test_a_rank_that_cannot_open_its_files_names_them_and_what_to_do(monkeypatch):
    """As where a disk has room, and no inodes."""
    make = ForkServer.make_folder

    def with_something_in_the_way(self):
        folder = make(self)
        (folder / "rank1.stack").mkdir()
        return folder

    monkeypatch.setattr(ForkServer, "make_folder", with_something_in_the_way)
    says = r"rank 1 of 2 could not join the group in /.* \(make room there, or set TMPDIR to .* folder\): IsADir"
    with pytest.raises(RankError, match=says) as caught:
        run(dist.barrier, 2)
    assert "rank1.stack" in str(caught.value)


def test_a_limit_of_open_files_is_named():
    fork_server()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(120 - psutil.Process().num_fds())]
    used = psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
        with pytest.raises(ValueError, match=r"can start at most 1 \(real processes with 3 open files each; raise"):
            run(int, 16)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
        with pytest.raises(RuntimeError, match=r"rank \d+ of 16 cannot be started \(Too many open files\): each"):
            run(int, 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            os.close(file)
    assert run(dist.get_rank, 2) == [0, 1]


def test_a_limit_of_processes_is_named_by_the_server(tmp_path, monkeypatch):
    """The third rank cannot be forked; the two before it end with the job. This server starts without torch._dynamo."""
    (tmp_path / "few_forks.py").write_text(FEW_FORKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = "cloudpickle", "distlab.comm.launch.worker", "few_forks"
    monkeypatch.setattr(fork_client._Current, "server", None)  # the other tests' ranks stay with theirs
    fork_server(modules)
    try:
        with pytest.raises(RankError, match=r"rank 2 of 3 could not be started \(Resource temporarily unavailable"):
            run(dist.barrier, 3)
        assert run(has_what_optimizers_load, 1) == [(False, True)]
    finally:
        fork_client.shut_down()


def has_what_optimizers_load():
    """Tell whether it is loaded before and after a first optimizer."""
    before = fork_client.OPTIMIZERS in sys.modules
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()
    return before, fork_client.OPTIMIZERS in sys.modules


FEW_FORKS = """
import errno, itertools, os

fork, turns = os.fork, itertools.count(1)

def few():
    if next(turns) % 3:
        return fork()
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = few
"""


def test_of_a_huge_error_a_page_is_told():
    text = "line\n" * 300_000 + "x" * 1_500_000

    def fail():
        raise ValueError(text)

    with pytest.raises(RankError, match="rank 0 of 1 raised ValueError: (x|line)") as caught:
        run(fail, 1, timeout_s=60)
    said = str(caught.value)
    assert re.search(r"\[\.\.\. 2,99\d,\d\d\d characters \.\.\.\]", said)
    assert "raise ValueError(text)" in said
    assert len(said) < 30_000
    assert max(map(len, said.splitlines())) < 600


def leave_the_group():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(4))


def interrupt_itself():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


class NoText(ValueError):
    def __str__(self):
        raise KeyError("no text")

    def __eq__(self, other):
        raise KeyError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def raise_without_text():
    raise NoText


def raise_half_a_letter():
    raise ValueError("half \ud800")


def write_too_much():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return bytes(1_000_000)


def exit_with_an_object():
    sys.exit(NoText())


CASES = [
    (leave_the_group, r"rank 0 of 2 destroyed a group that the other ranks still used \(group .*rank 1"),
    (interrupt_itself, r"was interrupted \(SIGINT\)"),
    (raise_without_text, r"raised NoText: \(no text: its __str__ raised KeyError\)"),
    (exit_with_an_object, r"exited with status \(no text: its __str__ raised KeyError\)"),
    (raise_half_a_letter, r"raised ValueError: half \\ud800"),
    (write_too_much, r"could not write its result \(1000\d\d\d bytes\); make room there, .*File too large"),
]


@pytest.mark.parametrize(("fn", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_cause_is_named(fn, says):
    with pytest.raises(RankError, match=f"(?s){says}") as caught:
        run(fn, 2 if fn is leave_the_group else 1, timeout_s=60)
    assert caught.value.rank == 0, str(caught.value)
    str(caught.value).encode()  # it can be printed


def test_a_folder_for_ranks_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server(), "_prefix", tmp_path / "gone" / "distlab-1")
    with pytest.raises(RuntimeError, match=r"cannot make a folder for the ranks in /.* \(No such file.*; create"):
        run(int, 1)


KILLED = """
import os, signal
from distlab.comm.launch.fork_client import fork_server
print(fork_server().make_folder(), fork_server().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_folder_stays_when_the_launcher_dies_while_torch_loads():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    folder = done.stdout.split()[0]
    deadline = time.monotonic() + 60
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(folder)


STOPPED = """
import os, sys, time
from pathlib import Path
from distlab.comm import Ranks

def late(folder):
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(1)
    return 7

with Ranks(2, timeout_s=60) as ranks:
    ranks.run(int)  # they are up before their time begins to count
    ranks.timeout_s = 5.0
    print(ranks.run(late, sys.argv[1]), flush=True)
"""


def test_a_launcher_that_was_stopped_beyond_its_limit_takes_what_came_meanwhile(tmp_path):
    """Ctrl-Z and fg: the ranks went on, and their results lie in the pipes."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not (tmp_path / "0").exists() or not (tmp_path / "1").exists():  # both have begun
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(8)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
    assert said == "[7, 7]\n"
    assert process.returncode == 0


def no_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    dist.barrier()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        torch.ones(256 << 20)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_a_rank_without_memory_is_the_cause(backend):
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 raised RuntimeError: .*(alloc|memory)") as caught:
        run(no_memory, 3, timeout_s=60, backend=backend)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 30
