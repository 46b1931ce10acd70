"""The fork server: a process that has torch loaded and forks each rank from itself in a few milliseconds.

A forked rank inherits the loaded modules, so ranks start at once and share memory. The program that asks for ranks is
never forked: it may be a notebook that has used torch, whose threads and locks a fork would break. `run` and notebooks
have a server each (`fork_client`); the ranks of one torchrun share one (`distlab.comm.standby`).

The server also guards its ranks. It is their parent, so it alone may signal them without the risk that the system gave
a process number to a different one. Where one who asked for ranks ends, in whatever way, the server reads end of file.
It then kills those ranks with SIGKILL (also a stopped rank, or one that ignores SIGTERM). Where its owner ends, it also
removes their folders and exits. If the server itself is killed, the kernel kills the ranks (Linux).

This file loads nothing but the standard library. What a rank does stands in the request, as "module:function".
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.comm.where.stacks import SIGNAL

JOB_VARIABLE = "DISTLAB_JOB"  # in each rank's environment: the name of its set's folder
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LENGTH = struct.Struct("I")
STATUS = struct.Struct("qqq")  # process number, wait status (-1 while it runs), time in nanoseconds
NOT_STARTED = 0  # in place of a process number; then the status is the error's number


def send_request(control: socket.socket, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    """Send one request, with the file descriptors that go with it."""
    body = json.dumps(request).encode()
    socket.send_fds(control, [LENGTH.pack(len(body)) + body], list(fds))


def receive_request(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one request and its file descriptors; None at end of file."""
    head, fds, _, _ = socket.recv_fds(control, LENGTH.size, 8)
    body = b""
    num_bytes = LENGTH.unpack(head)[0] if head else 1
    while len(body) < num_bytes:
        if not (more := control.recv(num_bytes - len(body))):
            return None
        body += more
    return json.loads(body), fds


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere do nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process and to everything in its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children(pid: int | None = None) -> list[int]:
    """Process numbers of a process's children, this one's by default, adopted ones included (Linux; elsewhere none)."""
    found: list[int] = []
    tasks = Path(f"/proc/{pid or 'self'}/task")
    for path in tasks.glob("*/children") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def job_of(pid: int) -> str | None:
    """Return the set of ranks that a process comes from, read from its environment; None where it is not named."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name.decode(errors="replace") == JOB_VARIABLE:
                return value.decode(errors="replace")
    return None


@dataclass
class Child:
    """A rank as its server sees it: who asked for it, its set of ranks, and the pipe that reports on it."""

    client: socket.socket
    pool: str
    rank: int
    status_fd: int

    def report(self, pid: int, status: int) -> None:
        """Tell who asked that the process started (status -1) or how it ended."""
        with contextlib.suppress(OSError):
            os.write(self.status_fd, STATUS.pack(pid, status, time.monotonic_ns()))


@dataclass
class RankServer:
    """The running fork server.

    Attributes:
        owner: process number of the one with which it ends.
        wake: readable when a child ends; `waker` is its other end.
        folders: a pattern of the folders to remove at the end.
        clients: who may ask for ranks: the launcher, or those that came to the listener.
        listeners: where more of them come; none: the launcher is the only one.
        ranks: its children by process number.
    """

    owner: int
    wake: socket.socket
    waker: socket.socket
    folders: str
    clients: list[socket.socket] = field(default_factory=list)
    listeners: list[socket.socket] = field(default_factory=list)
    ranks: dict[int, Child] = field(default_factory=dict)

    def loop(self) -> None:
        """Serve until the owner is gone, then take everything down."""
        try:
            gone = [os.pidfd_open(self.owner)] if hasattr(os, "pidfd_open") else []
            while self.clients or self.listeners:
                heard: list[Any] = [self.wake, *self.listeners, *self.clients, *gone]
                ready, _, _ = select.select(heard, [], [], 0.5)
                if not set(gone).isdisjoint(ready):
                    break
                os.kill(self.owner, 0)  # is it there?
                if self.wake in ready:
                    self.wake.recv(65536)
                    self.reap()
                for client in [client for client in self.clients if client in ready]:
                    received = receive_request(client)
                    self.answer(client, *received) if received is not None else self.part_with(client)
                self.clients += [listener.accept()[0] for listener in self.listeners if listener in ready]
        except ProcessLookupError:  # the owner
            pass
        finally:
            self.end()

    def answer(self, client: socket.socket, request: Mapping[str, Any], fds: list[int]) -> None:
        """Do what one request asks."""
        kind = request["kind"]
        if kind == "fork":
            self.fork(client, request, fds)
        elif kind == "signal":
            chosen, number = request["ranks"], request["signal"]
            for pid, child in self.ranks.items():
                if child.pool == request["pool"] and (chosen is None or child.rank in chosen):
                    kill_group(pid) if number == signal.SIGKILL else os.kill(pid, number)
        elif kind == "load":
            load(request["modules"])
        else:
            self.part_with(client)

    def part_with(self, client: socket.socket) -> None:
        """Kill the ranks of one who is gone, or asks for their end."""
        self.clients.remove(client)
        client.close()
        for pid, child in self.ranks.items():
            if child.client is client:
                kill_group(pid)

    def fork(self, client: socket.socket, request: Mapping[str, Any], fds: list[int]) -> None:
        """Fork one rank; fds are its status pipe and the files that its function takes."""
        status_fd, *files = fds
        server_pid = os.getpid()
        child = Child(client, request["pool"], request["rank"], status_fd)
        try:
            pid = os.fork()
        except OSError as error:  # a limit of processes
            child.report(NOT_STARTED, error.errno or 0)
            close_all(fds)
            return
        if pid == 0:
            code = 1
            try:
                self.become_child(status_fd)
                if os.getppid() == server_pid:  # else the server died before the kernel knew to kill this one with it
                    module, _, function = request["run"].partition(":")
                    code = getattr(importlib.import_module(module), function)(request, files)
            except BaseException:  # the last frame of the rank: report, then exit without the server's exit code
                sys.excepthook(*sys.exc_info())
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        close_all(files)
        self.ranks[pid] = child
        child.report(pid, -1)

    def become_child(self, status_fd: int) -> None:
        """In a new child: drop what is the server's, and take a session of its own."""
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all((status_fd, *(child.status_fd for child in self.ranks.values())))
        for end in (self.wake, self.waker, *self.clients, *self.listeners):
            end.close()

    def reap(self) -> None:
        """Report every rank that ended, and kill what it left in its process group."""
        with contextlib.suppress(ChildProcessError):
            while True:
                if hasattr(os, "waitid"):  # look first: the group's number stays reserved until the rank is reaped
                    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if info is not None and info.si_pid in self.ranks:
                        kill_group(info.si_pid)
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                child = self.ranks.pop(pid, None)
                if child is not None:
                    child.report(pid, status)
                    os.close(child.status_fd)
        self.kill_strays()

    def kill_strays(self) -> None:
        """Kill processes that sets of ranks, ended since, have left (Linux, where this process adopts them)."""
        alive = {child.pool for child in self.ranks.values()}
        for pid in children():
            if pid not in self.ranks and (not alive or job_of(pid) not in {*alive, None}):
                kill_group(pid)

    def end(self) -> None:
        """Kill every rank and every descendant, remove their folders."""
        deadline = time.monotonic() + 5
        for pid in self.ranks:
            kill_group(pid)
        while time.monotonic() < deadline:
            self.reap()
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            time.sleep(0.005)
        for folder in glob.glob(self.folders):
            shutil.rmtree(folder, ignore_errors=True)
        signal.set_wakeup_fd(-1)
        for end in (*self.clients, self.wake, self.waker):  # who asks Python for all warnings reads of open sockets
            end.close()


def load(modules: Sequence[str]) -> None:
    """Load modules that ranks will need, unless they are there; of "module:function", call the function too."""
    missing = [name for name in modules if name not in sys.modules]
    gc.disable()  # a module's objects stay: to look for garbage among them takes a fifth of the time
    for module, _, function in (name.partition(":") for name in missing):
        with contextlib.suppress(ImportError):  # the rank that needs it says what is missing
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
    gc.enable()
    if missing:
        gc.collect()
        gc.freeze()  # the collector then leaves the loaded modules' pages shared


def take_files(files: Mapping[int, int]) -> None:
    """In a new child: take over its standard files, by number."""
    for number, fd in files.items():
        os.dup2(fd, number)
    close_all([*set(files.values())])
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for fd in (1, 2)
    )


def serve(fd: int, owner: int, preload: Sequence[str], folders: str, is_listening: bool) -> None:
    """Run the fork server: load the modules, then serve requests until the owner is gone.

    Args:
        fd: the socket to the owner, or where those who ask for ranks connect.
        owner: its process number.
        preload: modules to load once, here, for all ranks.
        folders: a pattern of the folders to remove at the end.
        is_listening: whether others connect.
    """
    for number in (SIGNAL, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    load(preload)
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    end = socket.socket(fileno=fd)
    clients, listeners = ([], [end]) if is_listening else ([end], [])
    RankServer(owner, wake, waker, folders, clients, listeners).loop()
