"""One set of rank processes as the launcher sees them: start, talk, listen, ask for stacks, kill."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from distlab.comm.launch.failures import LONGEST_LINE, Failure, describe_exit, format_stack, recorded_failure
from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.forkserver import NOT_STARTED, STATUS
from distlab.comm.launch.messages import CALL, SETTINGS, START, Settings, rank_file, write_new
from distlab.comm.where.stacks import SIGNAL, SILENT, ask

Echo = Callable[[int, str], object]  # takes a rank, and a line that it has printed
Said = tuple[int, Failure | None, bool]  # a rank; how its call went (None: well) or its process ended; is that gone?

SERVE_RANK = "distlab.comm.launch.worker:serve_rank"  # what runs inside a rank
MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 0.5  # for ranks to say where they stand
CRASH = "Fatal Python error"  # begins a stack that faulthandler writes by itself
MAX_LINE = 65536  # a longer line is passed on in pieces: to join it anew at every read would take quadratic time
MAX_READ = 1 << 20  # bytes per read: a rank that prints without end must not stop its launcher from its other work
OUTPUT, REPLY, STATUS_CHANGE = range(3)  # what may arrive from a rank; in this order it is read
_LINE_END = re.compile(r"\r\n|\n|\r")


def show(rank: int, line: str) -> None:
    """Print a line of a rank's."""
    sys.stdout.write(f"[rank {rank}] {line}\n")


class Output:
    """A rank's standard output and error, split into whole lines, which are passed on as they come."""

    def __init__(self, rank: int, fd: int, echo: Echo | None) -> None:
        self.rank, self.fd, self.echo = rank, fd, echo
        self.last = deque[str](maxlen=20)
        self.num_bytes = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._partial = ""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Pass on what has arrived, at most about MAX_READ bytes, and return whether more may come."""
        limit = self.num_bytes + MAX_READ
        while self.num_bytes < limit:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                self.flush()
                return False
            self.num_bytes += len(data)
            *lines, self._partial = _LINE_END.split(self._partial + self._decode(data))
            for line in lines:
                self._pass_on(line)
            if len(self._partial) > MAX_LINE:
                self.flush()
        return True

    def flush(self) -> None:
        """Pass on a last line that has no line end."""
        if self._partial:
            self._pass_on(self._partial)
            self._partial = ""

    def _pass_on(self, line: str) -> None:
        self.last.append(line)
        if self.echo is not None:
            self.echo(self.rank, line)


@dataclass
class RankProcess:
    """The launcher's ends of one rank: its socket, its output, and the pipe on which the fork server reports."""

    rank: int
    connection: Connection
    output: Output
    status_fd: int
    pid: int | None = None
    summary: str = "ended with its fork server, which was killed"  # how it ended, once it is gone
    ended_ns: int = 0
    is_gone: bool = False

    def read_status(self) -> bool:
        """Read what the fork server reports: the process's number, later how it ended; return False once it is gone."""
        data = os.read(self.status_fd, STATUS.size)
        if len(data) < STATUS.size:
            self.ended_ns, self.is_gone = time.monotonic_ns(), True
            return False
        pid, status, now = STATUS.unpack(data)
        if pid == NOT_STARTED:
            self.summary = (
                f"could not be started ({os.strerror(status)}): this user or container may have no more processes, or "
                "the machine no more memory; end some, raise the limit (ulimit -u), or start fewer ranks"
            )
        elif status < 0:
            self.pid = pid
            return True
        else:
            self.summary = describe_exit(os.waitstatus_to_exitcode(status))
        self.ended_ns, self.is_gone = now, True
        return True


class Pool:
    """A set of rank processes with its private folder; alive from its making until `close`.

    Args:
        settings: of all its ranks.
        echo: gets each line that a rank prints; None: nobody.
    """

    def __init__(self, settings: Settings, echo: Echo | None) -> None:
        self.settings, self.ranks = settings, list[RankProcess]()
        self._server = fork_server()
        self._selector = selectors.DefaultSelector()
        self.folder = self._server.make_folder()
        try:
            (self.folder / SETTINGS).write_bytes(pickle.dumps(settings))
            for rank in range(settings.world_size):
                self._start(rank, echo)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, echo: Echo | None) -> None:
        ours, theirs = socket.socketpair()
        output_r, output_w = os.pipe()
        status_r, status_w = os.pipe()
        process = RankProcess(rank, Connection(ours.detach()), Output(rank, output_r, echo), status_r)
        self.ranks.append(process)
        for fileobj, what in ((process.connection, REPLY), (output_r, OUTPUT), (status_r, STATUS_CHANGE)):
            self._selector.register(fileobj, selectors.EVENT_READ, (what, rank))
        try:
            request = {"kind": "fork", "pool": self.folder.name, "rank": rank, "run": SERVE_RANK}
            self._server.request({**request, "folder": str(self.folder)}, (status_w, output_w, theirs.fileno()))
        finally:
            theirs.close()
            os.close(output_w)
            os.close(status_w)

    def send(self, call: bytes, ranks: Iterable[int]) -> None:
        """Let some ranks make a call; one that has died is noticed by `poll`."""
        write_new(self.folder / CALL, call)
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.ranks[rank].connection.send_bytes(START)

    def poll(self, timeout_s: float) -> list[Said]:
        """Wait for something to happen; pass on output, and return what came from ranks that replied or ended."""
        said = list[Said]()
        ready = sorted(key.data for key, _ in self._selector.select(timeout_s))
        for what, rank in ready:
            process = self.ranks[rank]
            if what == OUTPUT:
                self._read_output(process)
            elif what == REPLY:
                said += self._read_reply(process)
            else:
                self._server.is_lost |= not process.read_status()
                if process.is_gone:
                    self._forget(process.status_fd)
                    said += self._read_reply(process)  # which may have come after the select
                    self._read_output(process)
                    text = self._crash(rank)
                    if not text and process.output.last:
                        last = [f"    {line[:LONGEST_LINE]}" for line in process.output.last]
                        text = "\n".join(["its last output:", *last])
                    said.append((rank, Failure(rank, process.summary, text, False, process.ended_ns), True))
        if ready and ready[0][0] == OUTPUT:
            sys.stdout.flush()
        return said

    def _read_output(self, process: RankProcess) -> None:
        if self._is_listening(process.output.fd) and not process.output.read():
            self._forget(process.output.fd)

    def _read_reply(self, process: RankProcess) -> list[Said]:
        rank, connection = process.rank, process.connection
        try:
            if not self._is_listening(connection) or not connection.poll(0):
                return []
            reply = json.loads(connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError):
            self._forget(connection)
            return []
        self._read_output(process)  # what it printed before it replied
        return [(rank, Failure(*reply) if reply else None, False)]

    def _is_listening(self, fileobj: int | Connection) -> bool:
        return fileobj in self._selector.get_map()

    def _forget(self, fileobj: int | Connection) -> None:
        if self._is_listening(fileobj):
            self._selector.unregister(fileobj)

    def told(self, rank: int, time_ns: int) -> Failure | None:
        """Return what a rank that runs a script wrote down of its failure, or None."""
        return None if self.settings.joined else recorded_failure(rank_file(self.folder, rank, "error"), rank, time_ns)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks (all if None); SIGKILL goes to everything that they have started too."""
        self._server.request({"kind": "signal", "pool": self.folder.name, "ranks": ranks, "signal": int(number)})

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks where they stand; works while they wait in C, and says when one does not answer."""
        files = {rank: rank_file(self.folder, rank, "stack") for rank in ranks if not self.ranks[rank].is_gone}
        with contextlib.suppress(RuntimeError):
            said = ask(files, lambda asked: self.signal(SIGNAL, asked), ANSWER_S)
            return {rank: format_stack(text) or SILENT for rank, text in said.items()}
        return dict.fromkeys(files, SILENT)

    def _crash(self, rank: int) -> str:
        """Return the stack that a crash left, or ""."""
        with contextlib.suppress(OSError):
            _, found, text = rank_file(self.folder, rank, "stack").read_text(errors="replace").rpartition(CRASH)
            return format_stack(found + text) if found else ""
        return ""

    def close(self) -> None:
        """Kill every rank with all that it has started, wait until they are gone, and remove the folder."""
        if self._selector.get_map() is None:  # it is closed
            return
        with contextlib.suppress(RuntimeError):
            self.signal(signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while not all(process.is_gone for process in self.ranks) and (left := deadline - time.monotonic()) > 0:
            self.poll(left)
        self._selector.close()
        for process in self.ranks:
            process.output.flush()
            process.connection.close()
            os.close(process.output.fd)
            os.close(process.status_fd)
        shutil.rmtree(self.folder, ignore_errors=True)
