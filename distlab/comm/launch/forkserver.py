"""The fork server: a process that has torch loaded and forks each rank from itself in a few milliseconds.

A forked rank inherits the loaded modules, so ranks start at once and share memory. The program that asks for ranks is
never forked: it may be a notebook that has used torch, whose threads and locks a fork would break.

The server also guards its ranks. It is their parent, so it alone may signal them without the risk that the system gave
a process number to another process. When the launcher ends, in whatever way, the server reads end of file. It then
kills every rank with SIGKILL (also a stopped rank, or one that ignores SIGTERM), removes their folders and exits. If
the server itself is killed, the kernel kills the ranks (Linux), and a thread in each rank sees the end of file of the
server's pipe. multiprocessing's fork server does not do this: each child holds its pipe open.

This file holds the server's side and loads nothing but the standard library; `fork_client` holds the launcher's side,
and names the function that runs inside a rank (`worker.serve_rank`).
"""

from __future__ import annotations

import contextlib
import gc
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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distlab.comm.launch.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    children,
    close_all,
    job_of,
    kill_group,
    prctl,
)

LENGTH = struct.Struct("I")
STATUS = struct.Struct("qqq")  # process number, wait status (-1 while it runs), time in nanoseconds
NOT_STARTED = 0  # in place of a process number; then the status is the error's number


def send_request(control: socket.socket, request: dict[str, object], fds: Sequence[int] = ()) -> None:
    """Send one request, with the file descriptors that go with it."""
    body = json.dumps(request).encode()
    socket.send_fds(control, [LENGTH.pack(len(body)) + body], list(fds))


def receive_request(control: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """Receive one request and its file descriptors; None at end of file."""
    head, fds, _, _ = socket.recv_fds(control, LENGTH.size, 8)
    if not head:
        return None
    body = head
    while len(body) < LENGTH.size or len(body) < LENGTH.size + LENGTH.unpack_from(body)[0]:
        more = control.recv(65536 if len(body) < LENGTH.size else LENGTH.size + LENGTH.unpack_from(body)[0] - len(body))
        if not more:
            return None
        body += more
    return json.loads(body[LENGTH.size :]), fds


@dataclass
class Child:
    """A rank as its server sees it: which set of ranks it belongs to, and the pipe that reports on it."""

    pool: str
    rank: int
    status_fd: int

    def report(self, pid: int, status: int) -> None:
        """Tell the launcher that the process started (status -1) or how it ended."""
        with contextlib.suppress(OSError):
            os.write(self.status_fd, STATUS.pack(pid, status, time.monotonic_ns()))


@dataclass
class Server:
    """The running fork server: its children by process number, and the folders to remove at the end."""

    control: socket.socket
    launcher_pid: int
    alive_r: int
    alive_w: int
    wake: socket.socket
    waker: socket.socket
    serve_rank: Callable[[int, int], int]
    ranks: dict[int, Child] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def loop(self) -> None:
        """Serve until the launcher is gone, then take everything down."""
        try:
            while os.getppid() == self.launcher_pid:
                ready, _, _ = select.select([self.control, self.wake], [], [], 0.5)
                if self.wake in ready:
                    self.wake.recv(65536)
                    self.reap()
                if self.control in ready:
                    received = receive_request(self.control)
                    if received is None:
                        break
                    self.answer(*received)
        finally:
            self.end()

    def answer(self, request: dict[str, object], fds: list[int]) -> None:
        """Do what one request asks."""
        kind, pool = request["kind"], str(request.get("pool"))
        if kind == "fork":
            self.fork(pool, int(str(request["rank"])), fds)
        elif kind == "signal":
            chosen, number = request["ranks"], int(str(request["signal"]))
            for pid, child in self.ranks.items():
                if child.pool == pool and (chosen is None or child.rank in chosen):  # type: ignore[operator]
                    if number == signal.SIGKILL:
                        kill_group(pid)
                    else:
                        os.kill(pid, number)
        elif kind == "load":
            load(request["modules"])  # type: ignore[arg-type]
        elif kind == "folder":
            self.folders.add(str(request["path"]))
        elif kind == "forget":
            self.folders.discard(str(request["path"]))

    def fork(self, pool: str, rank: int, fds: list[int]) -> None:
        """Fork one rank; fds are its socket to the launcher, its output pipe and its status pipe."""
        job_fd, output_fd, status_fd = fds
        server_pid = os.getpid()
        child = Child(pool, rank, status_fd)
        try:
            pid = os.fork()
        except OSError as error:  # a limit of processes
            child.report(NOT_STARTED, error.errno or 0)
            close_all(fds)
            return
        if pid == 0:
            code = 1
            try:
                self.become_rank(output_fd, status_fd)
                if os.getppid() != server_pid:
                    os._exit(code)  # the server died before the kernel knew to kill this process with it
                code = self.serve_rank(job_fd, self.alive_r)
            except KeyboardInterrupt:  # outside of a job; end as the signal ends a program that does not catch it
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:  # the last frame of the rank: report, then exit without the server's exit code
                sys.excepthook(*sys.exc_info())
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        close_all((job_fd, output_fd))
        self.ranks[pid] = child
        child.report(pid, -1)

    def become_rank(self, output_fd: int, status_fd: int) -> None:
        """In the child: drop what is the server's, take a session of its own, and write to the launcher's pipe."""
        close_all((self.alive_w, status_fd, *(child.status_fd for child in self.ranks.values())))
        become_child((self.control, self.wake, self.waker), {1: output_fd, 2: output_fd})

    def reap(self) -> None:
        """Report every rank that ended, and kill what it left in its process group."""
        for pid, status in ended_children(self.ranks):
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

    def take_folders(self) -> None:
        """Read the folders that a launcher named before it died, perhaps while this process still loaded torch."""
        self.control.setblocking(False)
        with contextlib.suppress(OSError):
            while (received := receive_request(self.control)) is not None:
                request, fds = received
                if request["kind"] in ("folder", "forget"):
                    self.answer(request, fds)

    def end(self) -> None:
        """Kill every rank and every descendant, remove their folders."""
        deadline = time.monotonic() + 5
        self.take_folders()
        for pid in self.ranks:
            kill_group(pid)
        while time.monotonic() < deadline:
            self.reap()
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            time.sleep(0.005)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        signal.set_wakeup_fd(-1)
        for end in (self.control, self.wake, self.waker):  # who asks Python for all warnings reads of open sockets
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


def become_parent(preload: Sequence[str]) -> tuple[socket.socket, socket.socket]:
    """Load modules for ranks to come, adopt what they leave, and return a socket that is readable when a child ends.

    The second socket is its other end, which must stay open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    load(preload)
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    return wake, waker


def ended_children(ranks: Container[int]) -> Iterator[tuple[int, int]]:
    """Yield number and wait status of each child that has ended, and kill what a rank left in its process group."""
    with contextlib.suppress(ChildProcessError):
        while True:
            if hasattr(os, "waitid"):  # look first: the group's number stays reserved until the rank is reaped
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if info is not None and info.si_pid in ranks:
                    kill_group(info.si_pid)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def become_child(ends: Iterable[socket.socket], files: Mapping[int, int]) -> None:
    """In a new child: drop what is the server's, take a session of its own, and take over files by number."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in ends:
        end.close()
    for number, fd in files.items():
        os.dup2(fd, number)
    close_all([*set(files.values())])
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for fd in (1, 2)
    )


def serve(control_fd: int, launcher_pid: int, preload: Sequence[str], serve_rank: tuple[str, str]) -> None:
    """Run the fork server: load the modules, then serve requests until the launcher is gone.

    Args:
        control_fd: the socket to the launcher.
        launcher_pid: the launcher's process number.
        preload: modules to load once, here, for all ranks.
        serve_rank: module and name of the function that runs inside each rank.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    wake, waker = become_parent(preload)
    module, name = serve_rank
    run_rank = getattr(importlib.import_module(module), name)
    Server(socket.socket(fileno=control_fd), launcher_pid, *os.pipe(), wake, waker, run_rank).loop()
