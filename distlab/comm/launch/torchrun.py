"""Start a script on ranks with torchrun, as a child that is watched: output by rank, root cause first, nothing left.

torchrun prints its ranks' output unmarked and, after a failure, a page of its own in which the reason is easily missed.
Here torchrun runs inside a small agent process that reports in a file which ranks failed and how; the caller passes the
output on line by line and raises the same `RankError` as `distlab.comm.run`.

    python -m distlab.comm.launch.torchrun PARENT_PID FOLDER torchrun's arguments ...

is the agent. When its parent goes it kills its ranks and goes too; should the agent itself be killed, the kernel kills
the ranks that are in a `process_group` (Linux).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from distlab.comm.checks import check_timeout, check_world_size
from distlab.comm.command import runnable
from distlab.comm.launch import failures
from distlab.comm.launch.failures import PEER_NOISE, Failure, RankTimeout, by_cause, describe_exit, error_of, standing
from distlab.comm.launch.processes import PR_SET_CHILD_SUBREAPER, children, kill_group, prctl
from distlab.comm.rendezvous import STORE_FILE

SAID = 3  # exit status of a rank that has said all there is to say: a wrong result, told in its own words
REFUSED = 2  # of one that was asked for something that cannot be: one line is enough
_STOPPED = -signal.SIGTERM  # how torchrun ends the ranks that are left when one has failed
_HUNG = "raised RankTimeout: "
_LINE = re.compile(r"\[rank(\d+)\]:")
_ENDED, _ERROR = "ended.json", "error.json"
_GRACE_S = 5.0

Echo = Callable[[int | None, str], None]


def plain_command(script: str | Path, num_ranks: int, arguments: Sequence[str] = ()) -> str:
    """Return what a user types to start the same without distlab."""
    return runnable(shlex.join(["torchrun", "--nproc-per-node", str(num_ranks), str(script), *arguments]))


def run_script(
    script: str | Path, num_ranks: int, arguments: Sequence[str] = (), *, echo: Echo, limit_s: float = 600.0
) -> int:
    """Run a script on ranks of this machine and return 0, or 1 when its ranks said themselves what is wrong.

    Args:
        script: the Python file.
        num_ranks: how many processes run it.
        arguments: its own arguments.
        echo: called with (rank, line) for each line of output, in this thread; rank None is torchrun's own output.
        limit_s: after this everything is killed.

    Raises:
        RankError: a rank failed; the text begins with the root cause.
        RankTimeout: the script did not end in time.
        ValueError: the script does not exist, or an argument cannot be; or the ranks refused theirs.
    """
    num_ranks, limit_s = check_world_size(num_ranks), check_timeout(limit_s)
    if not Path(script).is_file():
        raise ValueError(f"there is no script {script}; pass the path of a Python file")
    with tempfile.TemporaryDirectory(prefix="distlab-torchrun-") as folder, _terminable():
        flags = ["--nnodes", "1", "--nproc-per-node", str(num_ranks), "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"{folder}/rendezvous", "--rdzv-conf", "store_type=file"]
        flags += ["--local-addr", "127.0.0.1", "--max-restarts", "0"]
        flags += ["--role", "rank", "--tee", "3", "--log-dir", folder, "--monitor-interval", "0.1"]
        agent = [sys.executable, "-m", "distlab.comm.launch.torchrun", str(os.getpid()), folder]
        command = [*agent, *flags, str(script), *arguments]
        with _started(command, {STORE_FILE: f"{folder}/store"}) as process:
            own_words = _pass_on(process, echo, limit_s)
        return _conclude(Path(folder), num_ranks, process.returncode, own_words)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception while the block runs, so that it ends what it started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _started(command: Sequence[str], more: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start the agent in a session of its own, so that Ctrl-C reaches this process alone; take it down at the end."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        env=own_environment() | more,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_agent(process)


def own_environment() -> dict[str, str]:
    """Return the environment for a new job: this process may be a rank itself, so without its own job's variables."""
    foreign = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE_FILE)
    prefixes = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith(prefixes)}
    root = str(Path(__file__).resolve().parents[3])  # the agent finds this very distlab, whatever is installed
    path = os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])
    kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torch's own would listen on every interface; rank 0 makes ours
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def kill_agent(process: subprocess.Popen[Any]) -> None:
    """Kill the agent and its ranks with all that these have started.

    The agent is stopped first: it cannot collect a rank that ends now, so no process number is given away meanwhile.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
        _kill_children(process.pid)
    kill_group(process.pid)
    process.wait()


def _kill_children(pid: int | None = None) -> None:
    """Kill an agent's children and their children. Orphans become the agent's children, so look four times."""
    for _ in range(4):
        for child in children(pid):
            kill_group(child)
        time.sleep(0.02)


def _pass_on(process: subprocess.Popen[str], echo: Echo, limit_s: float) -> list[str]:
    """Hand the output on until it ends; return the last lines of torchrun's own.

    Raises:
        RankTimeout: it does not end in time.
    """
    late = threading.Event()

    def stop() -> None:
        if process.poll() is None:  # else this process was stopped, and the ranks ended meanwhile
            late.set()
            kill_agent(process)

    timer = threading.Timer(limit_s, stop)
    timer.daemon = True
    timer.start()
    own_words: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = _LINE.match(line)
            if found is None:
                own_words = [*own_words[-99:], line.rstrip("\n")]
            else:
                echo(int(found[1]), line[found.end() :].rstrip("\n"))
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:  # its output is closed and it lives on
        kill_agent(process)
    finally:
        timer.cancel()
    if late.is_set():
        raise RankTimeout(f"the ranks had not ended {limit_s:g} s after their start, and were killed")
    return own_words


def _conclude(folder: Path, num_ranks: int, status: int, own_words: list[str]) -> int:
    """Say how the run ended.

    Raises:
        RankError: a rank failed.
        ValueError: the ranks refused what they were asked to do.
        RuntimeError: torchrun itself failed.
    """
    if status == 0:
        return 0
    reported = by_cause(_reported(folder))
    exits = _exits(folder)
    if not reported and SAID in exits.values() and set(exits.values()) <= {SAID, _STOPPED}:
        return 1
    if reported and REFUSED in exits.values():
        raise ValueError(reported[0].summary.partition(": ")[2])
    known = {failure.rank for failure in reported}
    failures = reported + [
        Failure(rank, describe_exit(code), "", code == _STOPPED, time.time_ns())
        for rank, code in exits.items()
        if rank not in known and code != SAID
    ]
    hung = sorted(failure for failure in failures if failure.summary.startswith(_HUNG))
    if hung and all(failure in hung or failure.is_noise for failure in failures):
        words = next(filter(None, (failure.summary.removeprefix(_HUNG).strip() for failure in hung)), "the ranks hang")
        stacks = {failure.rank: failure.traceback for failure in hung}
        raise RankTimeout("\n".join([words, *standing(stacks, [])]), None, failures)
    if failures:
        raise error_of(failures, {}, (), num_ranks)
    last = own_words[-20:]
    raise RuntimeError("\n".join([f"torchrun ended with status {status}, no rank said why; its last words:", *last]))


def _reported(folder: Path) -> list[Failure]:
    """Read the exceptions that ranks wrote down before they ended."""
    failures = []
    for path in folder.glob(f"*/attempt_*/*/{_ERROR}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message: Any = json.loads(path.read_text())["message"]
            text, more = message["message"], message["extraInfo"]
            noise = PEER_NOISE.search(text.partition("\n")[0]) is not None
            stack = more.get("stack", more["py_callstack"])
            failures.append(Failure(int(path.parent.name), f"raised {text}", stack, noise, path.stat().st_mtime_ns))
    return failures


def _exits(folder: Path) -> dict[int, int]:
    """Read how the ranks that torchrun saw fail ended, by rank."""
    with contextlib.suppress(OSError, ValueError):
        return {int(rank): int(code) for rank, code in json.loads((folder / _ENDED).read_text()).items()}
    return {}


def launcher_folder() -> Path | None:
    """Return a folder of torchrun's for this rank, which `run_script` removes at the end; None without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent if path else None


def record_failure(error: BaseException, stack: str = "") -> bool:
    """Write an exception where torchrun and `run_script` look for it; return whether there is such a launcher."""
    folder = launcher_folder()
    if folder is None:
        return False
    text = failures.shortened(f"{type(error).__name__}: {failures.text_of(error)}", failures.MAX_SUMMARY)
    stack = failures.shortened(stack)
    whole = stack if text in stack else f"{text}\n{stack}"
    more = {"py_callstack": whole, "timestamp": str(int(time.time())), "stack": stack}
    fresh = folder / f"{_ERROR}.new"  # torchrun itself ends where it meets half a file of a rank that was killed
    fresh.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    fresh.replace(folder / _ERROR)
    return True


def _agent(parent: int, folder: Path, arguments: Sequence[str]) -> int:
    """Run torchrun in this process; write down which ranks failed and how."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a rank has started becomes ours when the rank ends
    threading.Thread(target=_end_with, args=(parent, folder), name="lifeline", daemon=True).start()
    try:
        torchrun.run(torchrun.parse_args(list(arguments)))
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (folder / _ENDED).write_text(json.dumps(ended))
        return 1
    finally:
        _kill_children()
    return 0


def _end_with(parent: int, folder: Path) -> None:
    """End this process and all that it has started when its parent is gone, however that ended; remove its folder."""
    while os.getppid() == parent:
        time.sleep(0.2)
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpid())


if __name__ == "__main__":
    sys.exit(_agent(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
