"""run: results, output, where it can be called from, and what it refuses before it starts anything."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch import fork_client
from distlab.comm.launch.fork_client import preload


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)


SCRIPT = """
from typing import Any
from distlab.comm import run
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
print("imported once")
"""
EXPECTED = "[6.0, 6.0, 6.0] ['__main__', '__main__'] [-3]\nimported once\n"


# From `python -c` and from standard input: test_no_orphans; from a notebook: tests/course/notebook/test_magic.py.
def test_works_from_a_script_without_a_guard_and_imports_it_once_with_all_names_that_a_function_reads(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = python("-W", "default", str(script))
    assert (done.stdout, done.stderr) == (EXPECTED, "")  # nor a warning: of sockets, or of forks beside threads


def test_functions_of_a_module_that_was_loaded_by_path_travel_by_value(tmp_path):
    path = tmp_path / "lesson_by_path.py"
    path.write_text("CONSTANT = 5\ndef work():\n    return CONSTANT\n")
    spec = importlib.util.spec_from_file_location("lesson_by_path", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lesson_by_path"] = module
    spec.loader.exec_module(module)
    assert run(module.work, 1) == [5]


def test_the_lines_of_what_ranks_run_are_named_though_cloudpickle_leaves_the_file_out(monkeypatch):
    table, kind = cloudpickle.Pickler.dispatch_table.maps[0], type(python.__code__)
    plain = table[kind]

    def without_file(code):  # cloudpickle 3.1.3
        make, parts = plain(code)
        return make, tuple("<dynamic-code>" if part == code.co_filename else part for part in parts)

    monkeypatch.setitem(table, kind, without_file)
    with pytest.raises(RankError) as failed:
        run(lambda: [[].pop() for _ in range(1)], 1)
    assert f'File "{__file__}", line {failed.traceback[0].lineno + 1}, in <lambda>' in str(failed.value)


class Reading:
    def __init__(self, value: float) -> None:
        self.value = value


def test_results_keep_their_class_and_large_ones_arrive():
    def work(offset: torch.Tensor) -> tuple[Reading, torch.Tensor]:
        return Reading(dist.get_rank() + 0.5), offset + torch.arange(300_000)

    results = run(work, 2, args=(torch.full((300_000,), 7),))
    assert [type(reading) for reading, _ in results] == [Reading, Reading]
    assert [reading.value for reading, _ in results] == [0.5, 1.5]
    assert all(torch.equal(tensor, 7 + torch.arange(300_000)) for _, tensor in results)


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
    def look() -> tuple[list[str], int]:
        dist.barrier()
        addresses = [c.laddr.ip for c in psutil.Process().net_connections("inet")]
        return addresses, len(addresses)

    pool = ranks(2)
    seen = pool.run(look)
    addresses = {address for found, _ in seen for address in found}
    assert addresses <= {"127.0.0.1", "::1"}
    assert addresses, "gloo uses sockets"
    assert pool._pool is not None
    assert pool._pool.folder.stat().st_mode & 0o777 == 0o700


def test_output_is_prefixed_and_streamed_also_from_c(capfd, tmp_path):
    was_seen = tmp_path / "seen"

    def talk() -> None:
        import ctypes

        print("from Python")
        print("no line end", end="")
        sys.stderr.write("from stderr\n")
        os.write(1, b"from a descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        while not was_seen.exists():
            time.sleep(0.02)

    thread = threading.Thread(target=run, args=(talk, 1), kwargs={"timeout_s": 90})
    thread.start()
    seen, deadline = "", time.monotonic() + 60
    while "from C" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().out
        time.sleep(0.02)
    assert "from C" in seen, "what a rank prints must be seen while it runs"
    was_seen.touch()
    thread.join()
    lines = seen.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert {"[rank 0] from a descriptor", "[rank 0] from C", "[rank 0] from Python"} <= set(lines)


def test_a_last_line_without_line_end_is_shown_and_echo_can_be_off(capfd):
    run(lambda: print("end", end=""), 1)
    assert capfd.readouterr().out == "[rank 0] end\n"
    run(lambda: print("end"), 1, echo=False)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("world_size", [0, -1, "4", True, 2.5, None, 10**9])
def test_a_world_size_that_cannot_be_is_refused_in_one_sentence(world_size):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError, match="world_size is") as caught:
        run(print, world_size)
    assert "\n" not in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "glo"}, "backend is 'glo'; pass one of gloo, shared, nccl"),
        ({"backend": 3}, "backend is 3"),
        ({"timeout_s": 0}, "timeout_s is 0; pass a positive number"),
        ({"timeout_s": "60"}, "timeout_s is '60'"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"args": "ab"}, "args is 'ab'; pass a tuple"),
        ({"args": 3}, "args is 3; pass a tuple"),
        ({"fn": 3}, r"fn is 3; pass a function .* not train\(\)"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(**{"fn": print, "world_size": 2} | options)


def test_nccl_without_a_gpu_each_is_refused():
    if torch.cuda.device_count() >= 64:
        pytest.skip("this machine has 64 GPUs")
    with pytest.raises(ValueError, match="backend nccl needs a GPU for each of 64 ranks"):
        run(print, 64, backend="nccl")


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to the ranks: the outer variable 'lock' cannot be pickled"):
        run(lambda: lock, 2)
    with pytest.raises(ValueError, match="argument 1 cannot be pickled"):
        run(print, 2, args=(1, lock))


def test_a_result_that_cannot_be_pickled_is_explained():
    def work() -> object:
        return threading.Lock() if dist.get_rank() == 1 else None

    with pytest.raises(RankError, match=r"rank 1 of 2 returned a lock that cannot be sent back") as caught:
        run(work, 2)
    assert caught.value.rank == 1


def test_a_fork_of_the_launcher_does_not_hold_its_ranks_alive():
    with Ranks(1) as pool:
        pool.run(os.getpid)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if fork_client._Current.server is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_fork_server_is_started_anew_when_it_was_killed(monkeypatch):
    monkeypatch.setattr(fork_client._Current, "server", None)  # the other tests' ranks stay with theirs
    first = fork_client.fork_server()
    psutil.Process(first.pid).kill()
    deadline = time.monotonic() + 60
    while first.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        assert run(os.getppid, 1) == [fork_client.fork_server().pid]
        assert fork_client.fork_server().pid != first.pid
    finally:
        fork_client.shut_down()


def test_a_fork_server_that_was_stopped_goes_on_with_the_next_run_and_ends(monkeypatch):
    monkeypatch.setattr(fork_client._Current, "server", None)  # the other tests' ranks stay with theirs
    server = psutil.Process(fork_client.fork_server().pid)

    def stop_it():
        os.kill(os.getppid(), signal.SIGSTOP)
        raise ValueError("on purpose")

    try:
        assert run(os.getppid, 1) == [server.pid]
        with pytest.raises(RankError, match="on purpose"):
            run(stop_it, 1, echo=False)
        server.suspend()
        assert run(os.getppid, 1, timeout_s=60) == [server.pid]
        server.suspend()
    finally:
        begin = time.monotonic()
        fork_client.shut_down()
    assert time.monotonic() - begin < 9, "a stopped server was killed after 10 s"
    assert not server.is_running()


def test_two_threads_may_run_at_once():
    results: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: run(dist.get_world_size, n)})) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [1], 2: [2, 2], 3: [3, 3, 3]}


def _open_files() -> set[tuple[str, str]]:
    """Return each open descriptor of this process with what it names: ("7", "pipe:[1234]")."""
    gc.collect()
    numbers = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    return {(fd, os.readlink(f"/proc/self/fd/{fd}")) for fd in numbers}


def test_no_descriptor_and_no_folder_is_left(monkeypatch):
    run(os.getpid, 2)
    ours = fork_client.fork_server()._prefix
    folders = set(ours.parent.glob(f"{ours.name}_*"))
    before = _open_files()
    for _ in range(3):
        run(os.getpid, 2)
    with pytest.raises(RankError):
        run(lambda: 1 / 0, 2)
    assert _open_files() - before == set()  # an earlier test's files may close meanwhile, none may be new
    assert set(ours.parent.glob(f"{ours.name}_*")) <= folders  # those of ranks that other tests keep


def test_a_function_may_name_torch_and_an_attribute_ops(ranks):
    import torch

    class Record:
        ops = 3

    assert ranks(2).run(lambda: (torch.tensor(1).item(), Record().ops)) == [(1, 3)] * 2


def test_a_module_is_loaded_once_for_all_ranks_that_start_later():
    def is_loaded():
        return "tabnanny" in sys.modules

    assert run(is_loaded, 1) == [False]
    preload("tabnanny", "no_such_module")
    assert run(is_loaded, 2) == [True, True]


def test_the_backend_that_nobody_names_can_be_chosen_outside(monkeypatch):
    monkeypatch.setenv("DISTLAB_BACKEND", "gloo")
    assert run(dist.get_backend, 2, record=False) == ["gloo"] * 2
    assert run(dist.get_backend, 1, backend="shared", record=False) == ["shared"]
    assert run(dist.get_backend, 1, backend="cpu", record=False) == ["gloo"], "only the kind is named"
    monkeypatch.setenv("DISTLAB_BACKEND", "telepathy")
    with pytest.raises(ValueError, match="DISTLAB_BACKEND is 'telepathy'; pass one of gloo, shared"):
        run(dist.get_backend, 2)
