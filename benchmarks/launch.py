"""How soon ranks start, how soon a failure is told, and that nothing is left, from a script and from a kernel.

Each case of the table of leftovers starts all seven ways to go wrong at once, with `run` and with `Ranks`, on two
ranks each; then its launcher ends in one of four ways, and 5 seconds later processes, listening ports and folders are
counted. They are recognised by a mark in their environment, which children inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from _blocks import seconds_of
from _rows import Row, absolute, single
from _script import run_script

from distlab.comm import RankError, Ranks, run
from distlab.comm.launch.fork_client import shut_down

MARK = "DISTLAB_ORPHANS"
KINDS = ("exception", "segfault", "SIGKILL", "SIGSTOP", "endless loop", "blocked in a collective", "SIGTERM ignored")
ENDED_BY_THEMSELVES = ("exception", "segfault", "SIGKILL")
ENDS = {"script": ("end", "interrupt", "kill"), "kernel": ("end", "interrupt", "restart", "kill")}

# What the launcher executes, in a script or in a cell. It must not use anything of this file.
PROGRAM = """
import os, threading
from distlab.comm import Ranks, run

def misbehave(kind, folder, name):
    import ctypes, signal, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    rank = dist.get_rank()
    dist.barrier()
    if kind == "SIGTERM ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"{name}-{rank}").touch()
    time.sleep(0.1)
    if rank == 0 and kind != "endless loop":
        dist.all_reduce(torch.ones(1))  # the other never comes
    if kind == "exception":
        raise ValueError("on purpose")
    if kind == "segfault":
        ctypes.string_at(0)
    if kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, kind))
    while True:
        if kind != "endless loop":
            time.sleep(0.1)

held = []
def start(api, kind, folder, name):
    try:
        if api == "run":
            run(misbehave, 2, args=(kind, folder, name), timeout_s=600, echo=False)
        else:
            held.append(Ranks(2, timeout_s=600, echo=False))
            held[-1].run(misbehave, kind, folder, name)
    except RuntimeError:
        pass
    finally:
        open(f"{folder}/{name}-over", "w").close()

def start_all(folder, kinds):
    for api in ("run", "Ranks"):
        for index, kind in enumerate(kinds):
            threading.Thread(target=start, args=(api, kind, folder, f"{api}{index}"), daemon=True).start()
"""


def all_reduce_once() -> float:
    """The smallest job: one all-reduce."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def fail(how: str) -> None:
    """Fail on rank 1 while the others wait for it."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def report_delay(how: str) -> float:
    """Seconds from a rank's failure to the error in the launcher."""
    try:
        run(fail, 4, args=(how,), echo=False)
    except RankError as error:
        if error.rank != 1:
            raise RuntimeError(f"rank {error.rank} was blamed, and rank 1 had failed") from error
        return time.monotonic() - error.failures[0].time_ns / 1e9
    raise AssertionError("the failure was not reported")


class Case:
    """One launcher, a script or a kernel, with everything that it started recognisable by a mark."""

    def __init__(self, launcher: str, kinds: tuple[str, ...] = KINDS) -> None:
        self.kinds, self.mark = kinds, uuid.uuid4().hex
        self._temporary = tempfile.TemporaryDirectory(prefix="orphans-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)}
        self.kernel: Any = None
        if launcher == "script":
            self.process = subprocess.Popen(
                [sys.executable, "-i", "-q", "-c", PROGRAM],  # a live interpreter that takes statements and interrupts
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                start_new_session=True,
            )
        else:
            from jupyter_client.manager import KernelManager

            self.kernel = KernelManager(kernel_name="python3", shutdown_wait_time=2.0)
            self.kernel.start_kernel(env=environment)
            self.client = self.kernel.client()
            self.client.start_channels()
            self.client.wait_for_ready(timeout=60)
            self.client.execute_interactive(PROGRAM, timeout=60, output_hook=lambda _: None)

    @property
    def pid(self) -> int:
        """Process number of the launcher that is alive now."""
        return self.process.pid if self.kernel is None else self.kernel.provisioner.pid

    def execute(self, source: str) -> None:
        """Have the launcher execute source text, without waiting for it."""
        if self.kernel is None:
            assert self.process.stdin is not None
            self.process.stdin.write(source + "\n")
            self.process.stdin.flush()
        else:
            self.client.execute(source, stop_on_error=False)  # or what comes next would be dropped after an interrupt

    def wait_for(self, names: list[str], timeout_s: float = 120) -> None:
        """Wait until these ranks have come to the point where they misbehave."""
        deadline = time.monotonic() + timeout_s
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > deadline:
                missing = [name for name in names if not (self.folder / name).exists()]
                raise RuntimeError(f"ranks did not start within {timeout_s} s: {missing}")
            time.sleep(0.05)
        time.sleep(0.5)

    def start_all(self) -> None:
        """Start every kind of misbehaviour at once, with run and with Ranks."""
        self.execute(f"start_all({str(self.folder)!r}, {self.kinds!r})")
        numbers = range(len(self.kinds))
        self.wait_for([f"{api}{index}-{rank}" for api in ("run", "Ranks") for index in numbers for rank in (0, 1)])

    def interrupt_each(self) -> None:
        """Start one kind after the other in the main thread, and interrupt each."""
        for api in ("run", "Ranks"):
            for index, kind in enumerate(self.kinds):
                name = f"{api}{index}"
                self.execute(f"start({api!r}, {kind!r}, {str(self.folder)!r}, {name!r})")
                by_itself = kind in ENDED_BY_THEMSELVES
                self.wait_for([f"{name}-0", f"{name}-1"] + [f"{name}-over"] * by_itself)
                os.kill(self.pid, signal.SIGINT)
                self.wait_for([f"{name}-over"])

    def end(self, how: str) -> None:
        """End the launcher: end, restart or kill."""
        if how == "kill":
            os.kill(self.pid, signal.SIGKILL)
        elif self.kernel is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        elif how == "restart":
            self.kernel.restart_kernel()
        else:
            self.kernel.shutdown_kernel()

    def leftovers(self, wait_s: float = 5.0, *, fork_server_stays: bool = False) -> list[str]:
        """What is still there after wait_s, or as soon as nothing is: processes, listening ports, folders."""
        deadline = time.monotonic() + wait_s
        while (found := self._leftovers(fork_server_stays)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _leftovers(self, fork_server_stays: bool) -> list[str]:
        alive = self.pid if self.kernel is not None or self.process.poll() is None else None
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.pid == alive or (fork_server_stays and process.ppid() == alive):
                    continue
                listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                found += [f"process {process.pid}: {process.status()}"] + [f"port {c.laddr.port}" for c in listening]
            except psutil.Error:
                continue
        return found + [f"folder {path.name}" for path in self.temporary.glob("distlab-*")]

    def close(self) -> None:
        """End the launcher if it still runs."""
        if self.kernel is not None:
            self.client.stop_channels()
            with contextlib.suppress(Exception):
                self.kernel.shutdown_kernel(now=True)
        else:
            self.process.kill()
            self.process.communicate()
        self._temporary.cleanup()


def leftovers_after(launcher: str, how: str, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Count what one cell of the table leaves behind."""
    case = Case(launcher, kinds)
    try:
        if how == "interrupt":
            case.interrupt_each()
            return case.leftovers(fork_server_stays=True)
        case.start_all()
        case.end(how)
        return case.leftovers()
    finally:
        case.close()


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure; quick takes few repeats and two cells of the table."""
    cold = []
    for _ in range(1 if quick else 3):
        shut_down()
        cold.append(seconds_of(lambda: run(all_reduce_once, 4)))
    yield single("first run() of a program, 4 ranks", cold, "s", note="loads torch once; later calls do not")
    warm = [seconds_of(lambda: run(all_reduce_once, 4)) for _ in range(3 if quick else 20)]
    yield absolute("run() of 4 ranks, warm: start, one all_reduce, end", warm, bar=0.15, unit="s")
    many = [seconds_of(lambda: run(all_reduce_once, 64)) for _ in range(1 if quick else 5)]
    yield absolute("run() of 64 ranks: start, one all_reduce, end", many, bar=3.0, unit="s")
    for how, words in (("raise", "raises"), ("kill", "is killed by SIGKILL")):
        delays = [report_delay(how) for _ in range(2 if quick else 20)]
        yield absolute(f"a rank that {words} is reported, 3 others wait for it", delays, bar=1.0, unit="s")
    with Ranks(4) as ranks:
        ranks.run(all_reduce_once)
        calls = [seconds_of(lambda: ranks.run(all_reduce_once)) for _ in range(5 if quick else 100)]
    yield single("Ranks(4).run, kept alive", calls, "s")
    for launcher, ends in ENDS.items():
        for how in ends if not quick else ends[-1:]:
            left = leftovers_after(launcher, how)
            claim = f"left 5 s after: {launcher}, {how}; {len(KINDS)} ways to go wrong x run and Ranks"
            yield absolute(claim, [float(len(left))], bar=0, unit="things", note="; ".join(left[:5]))


if __name__ == "__main__":
    run_script(__doc__, rows)
