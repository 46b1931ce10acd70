"""The process that stands by: it has torch loaded, forks a rank for each that asks, and says how the rank ended.

A connection is one rank: what comes over it are signals for the rank, what goes back is how it ended. Where the asking
process goes, its rank is killed; where this process goes, the kernel kills the ranks. It goes when torchrun does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

from distlab.comm.launch.fork_client import PRELOAD
from distlab.comm.launch.forkserver import become_child, become_parent, ended_children, receive_request
from distlab.comm.launch.processes import children, kill_group

ENDED = struct.Struct("q")  # a rank's wait status
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.5


@dataclass
class Server:
    """The running process: its ranks by process number, and who asked for each."""

    listener: socket.socket
    wake: socket.socket
    agent: int
    asked_by: dict[int, socket.socket] = field(default_factory=dict)

    def loop(self) -> None:
        """Serve until the agent is gone."""
        gone = [os.pidfd_open(self.agent)] if hasattr(os, "pidfd_open") else []
        while _exists(self.agent):
            heard: list[Any] = [self.listener, self.wake, *self.asked_by.values(), *gone]
            ready, _, _ = select.select(heard, [], [], LOOK_EVERY_S)
            if gone and gone[0] in ready:
                break
            if self.wake in ready:
                self.wake.recv(65536)
                self.reap()
            for pid, control in list(self.asked_by.items()):
                if control in ready:
                    self.pass_on(pid, control)
            if self.listener in ready:
                control, _ = self.listener.accept()
                received = receive_request(control)
                if received is not None:
                    self.fork(control, *received)

    def pass_on(self, pid: int, control: socket.socket) -> None:
        """Send a rank the signals that were asked for; kill it where the asking process is gone."""
        numbers = control.recv(64)
        for number in numbers:
            os.kill(pid, number)
        if not numbers:
            kill_group(pid)
            self.asked_by.pop(pid).close()

    def fork(self, control: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        """Fork a rank."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ends = (self.listener, self.wake, control, *self.asked_by.values())
                become_child(ends, dict(enumerate(fds)))
                if os.getppid() == server:
                    code = run_script(request)
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        self.asked_by[pid] = control

    def reap(self) -> None:
        """Tell who asked how each rank ended."""
        for pid, status in ended_children(self.asked_by):
            if (control := self.asked_by.pop(pid, None)) is not None:
                with contextlib.suppress(OSError):
                    control.send(ENDED.pack(status))
                control.close()


def run_script(request: dict[str, Any]) -> int:
    """Become the rank: take over what torchrun gave the process that asked, and run its script to the end."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:], sys.argv[:] = request["path"], request["arguments"]
    os.chdir(request["directory"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a process of its own: else all ranks would have the server's state
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # the last frame of the rank
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


def serve(listener_fd: int, agent: int, folder: str) -> None:
    """Load torch, then fork ranks until the agent of torchrun is gone; leave nothing."""
    wake, _waker = become_parent(PRELOAD)
    try:
        Server(socket.socket(fileno=listener_fd), wake, agent).loop()
    finally:
        for _ in range(4):
            for pid in children():
                kill_group(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
