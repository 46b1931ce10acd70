"""The launcher's end of the fork server: start it once, ask it for ranks."""

from __future__ import annotations

import atexit
import contextlib
import glob
import itertools
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from distlab.comm.launch.forkserver import send_request

OPTIMIZERS = "torch._dynamo"  # torch.optim loads it, which takes as long as torch itself: once here, not once per rank
PRELOAD = (OPTIMIZERS, "cloudpickle", "distlab.comm.launch.worker")
PREPARE = "distlab.comm.launch.worker:before_forks"


def start_server(
    end: socket.socket, owner: int, modules: Sequence[str], folders: str, *, is_listening: bool
) -> subprocess.Popen[bytes]:
    """Start a process that loads modules and then serves requests; the arguments are those of `forkserver.serve`.

    Raises:
        OSError: the system makes no process.
    """
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from distlab.comm.launch.forkserver import serve; "
        f"serve({end.fileno()}, {owner}, {tuple(modules)!r}, {folders!r}, {is_listening})"
    )
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", program],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | one_thread,
        start_new_session=True,  # torchrun and Ctrl-C signal a whole session
    )


class ForkServer:
    """A fork server that belongs to this process and ends with it.

    Attributes:
        is_lost: a rank's channel to it has ended: it was killed, also if the system has not said so yet.
    """

    is_lost = False

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock, self._owner, self._number = threading.Lock(), os.getpid(), itertools.count()
        self._prefix = Path(tempfile.gettempdir()) / f"distlab-{secrets.token_hex(8)}"
        self._control, theirs = socket.socketpair()
        with theirs:
            folders = f"{glob.escape(str(self._prefix))}_*"
            self._process = start_server(theirs, os.getpid(), (*modules, PREPARE), folders, is_listening=False)
        self.pid = self._process.pid

    def is_alive(self) -> bool:
        """Whether the server still runs and belongs to this process (a fork of this process has none)."""
        return os.getpid() == self._owner and not self.is_lost and self._process.poll() is None

    def request(self, request: dict[str, object], fds: Sequence[int] = ()) -> None:
        """Send the server one request; a RuntimeError says that it is gone."""
        try:
            with self._lock:
                send_request(self._control, request, fds)
        except OSError as error:
            raise RuntimeError(
                "the fork server, which starts the ranks, has gone; run again to start a new one"
            ) from error

    def make_folder(self) -> Path:
        """Make a private folder, which the server removes at its end where it is still there."""
        path = Path(f"{self._prefix}_{next(self._number)}")
        path.mkdir(mode=0o700)
        return path

    def close(self) -> None:
        """End the server and every rank, and wait until they have ended."""
        if os.getpid() == self._owner:
            with contextlib.suppress(RuntimeError):
                self.request({"kind": "end"})  # a copy of this process may hold the connection open
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control.close()


class _Current:
    """This process's fork server: the one thing here that outlives a call, since starting it loads torch."""

    lock = threading.Lock()
    server: ForkServer | None = None


def fork_server(modules: Sequence[str] = ()) -> ForkServer:
    """Return this process's fork server; where there is none, start one that loads these modules (none: PRELOAD)."""
    with _Current.lock:
        if _Current.server is not None and not _Current.server.is_alive():
            _Current.server.close()
            _Current.server = None
        if _Current.server is None:
            _Current.server = ForkServer(modules or PRELOAD)
        return _Current.server


def preload(*modules: str) -> None:
    """Load modules once in the fork server, so that ranks which start from now on need not load them each."""
    fork_server().request({"kind": "load", "modules": modules})


def shut_down() -> None:
    """End this process's fork server and every rank; the next run starts a new one."""
    with _Current.lock:
        if _Current.server is not None:
            _Current.server.close()
            _Current.server = None


atexit.register(shut_down)
