"""One set of rank processes as the launcher sees them: start, talk, listen, ask for stacks, kill."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import re
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from distlab.comm.checks import FDS_PER_RANK
from distlab.comm.launch.failures import LONGEST_LINE, Failure, describe_exit, format_stack
from distlab.comm.launch.fork_client import fork_server
from distlab.comm.launch.forkserver import NOT_STARTED, STATUS
from distlab.comm.launch.messages import Body, Job, Reply, Settings, result_path
from distlab.comm.launch.worker import stack_path
from distlab.comm.where.answer import SIGNAL, is_whole
from distlab.nodes import Nodes

ONE_NODE = Nodes(1)
SERVE_RANK = "distlab.comm.launch.worker:serve_rank"  # what runs inside a rank
MAX_REPLY_BYTES = 1 << 20  # a larger result comes in a file
ANSWER_S = 0.5  # for ranks to say where they stand
CRASH = "Fatal Python error"  # begins a stack that faulthandler writes by itself
NEXT_JOB = "recv_bytes"  # where a rank stands between two jobs
MAX_LINE = 65536  # a longer line is passed on in pieces: to join it anew at every read would take quadratic time
MAX_READ = 1 << 20  # bytes per read: a rank that prints without end must not stop its launcher from its other work
_LINE_END = re.compile(r"\r\n|\n|\r")


class Ended(NamedTuple):
    """What ended on a rank: a job, with its reply, or the process."""

    rank: int
    reply: Reply | None


class Output:
    """A rank's standard output and error, split into whole lines, which are shown as they come."""

    def __init__(self, rank: int, fd: int, *, echo: bool) -> None:
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
        if self.echo:
            sys.stdout.write(f"[rank {self.rank}] {line}\n")


@dataclass
class RankProcess:
    """The launcher's ends of one rank: its socket, its output, and the pipe on which the fork server reports."""

    rank: int
    connection: Connection
    output: Output
    status_fd: int
    pid: int | None = None
    wait_status: int | None = None
    ended_ns: int = 0
    is_gone: bool = False
    why_not: str = ""  # it could not be started

    def read_status(self) -> None:
        """Read what the fork server reports: the process's number, later how it ended."""
        data = os.read(self.status_fd, STATUS.size)
        if len(data) < STATUS.size:
            self.is_gone = True
            self.ended_ns = self.ended_ns or time.monotonic_ns()
            return
        pid, status, now = STATUS.unpack(data)
        if pid == NOT_STARTED:
            self.why_not, self.ended_ns, self.is_gone = os.strerror(status), now, True
            return
        self.pid = pid
        if status >= 0:
            self.wait_status, self.ended_ns, self.is_gone = status, now, True


@dataclass
class Pool:
    """A set of rank processes with its private folder; alive from its making until `close` or `kill`."""

    world_size: int
    backend: str | None
    group_timeout_s: float
    record: bool
    echo: bool
    plain: bool = False
    nodes: Nodes = ONE_NODE
    ranks: list[RankProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = fork_server()
        self._selector = selectors.DefaultSelector()
        self._is_down = False
        self.folder = self._server.make_folder()
        self._name = self.folder.name
        try:
            for rank in range(self.world_size):
                self._start(rank)
            for process in self.ranks:
                with contextlib.suppress(ConnectionError):  # one that was not forked, or is dead: `poll` tells why
                    process.connection.send_bytes(pickle.dumps(self._settings(process.rank)))
        except BaseException as error:
            self.kill()
            if not isinstance(error, OSError):
                raise
            raise RuntimeError(
                f"rank {len(self.ranks)} of {self.world_size} cannot be started ({error.strerror}): each takes "
                f"{FDS_PER_RANK} open files here; close some, raise their limit (ulimit -n), or start fewer ranks"
            ) from error

    def _settings(self, rank: int) -> Settings:
        return Settings(
            rank=rank,
            world_size=self.world_size,
            backend=self.backend,
            group_timeout_s=self.group_timeout_s,
            record=self.record,
            folder=str(self.folder),
            environment=dict(os.environ),
            import_path=tuple(sys.path),
            directory=os.getcwd(),
            plain=self.plain,
            nodes=self.nodes,
        )

    def _start(self, rank: int) -> None:
        """Ask the fork server for one rank and keep our ends of its channels."""
        ours, theirs = socket.socketpair()
        output_r, output_w = os.pipe()
        status_r, status_w = os.pipe()
        output = Output(rank, output_r, echo=self.echo)
        process = RankProcess(rank, Connection(ours.detach()), output, status_r)
        self.ranks.append(process)
        for fileobj, name in ((process.connection, "reply"), (output_r, "output"), (status_r, "status")):
            self._selector.register(fileobj, selectors.EVENT_READ, (rank, name))
        try:
            request: dict[str, object] = {"kind": "fork", "pool": self._name, "rank": rank, "run": SERVE_RANK}
            self._server.request(request, (status_w, output_w, theirs.fileno()))
        finally:
            theirs.close()
            os.close(output_w)
            os.close(status_w)

    def send(self, kind: str, data: bytes, ranks: Iterable[int]) -> None:
        """Hand a job to some ranks; one that has died is noticed by `poll`.

        Raises:
            RuntimeError: the job is large, and its file cannot be written.
        """
        try:
            message = pickle.dumps(Job(kind, Body.of(data, self.folder / "job")))
        except OSError as error:
            raise RuntimeError(
                f"{len(data)} bytes for the ranks cannot be written into {self.folder} ({error.strerror}); make room "
                "there, or set TMPDIR to another folder"
            ) from error
        for rank in ranks:
            with contextlib.suppress(OSError):
                self.ranks[rank].connection.send_bytes(message)

    def poll(self, timeout_s: float) -> list[Ended]:
        """Wait for something to happen; pass on output, and return replies and deaths."""
        names: dict[str, list[int]] = {"output": [], "reply": [], "status": []}
        for key, _ in self._selector.select(timeout_s):
            rank, name = key.data
            names[name].append(rank)
        for rank in names["output"]:
            self._read_output(rank)
        ended = [one for rank in names["reply"] if (one := self._read_reply(rank)) is not None]
        for rank in names["status"]:
            process = self.ranks[rank]
            process.read_status()
            if process.is_gone:
                self._forget(process.status_fd)
                last_word = self._read_reply(rank)  # which may have arrived after the select
                self._read_output(rank)
                ended.append(last_word or Ended(rank, None))
        if names["output"] and self.echo:
            sys.stdout.flush()
        return ended

    def _read_output(self, rank: int) -> None:
        output = self.ranks[rank].output
        if self._is_listening(output.fd) and not output.read():
            self._forget(output.fd)

    def _read_reply(self, rank: int) -> Ended | None:
        connection = self.ranks[rank].connection
        try:
            if not self._is_listening(connection) or not connection.poll(0):
                return None
            reply = Reply.from_bytes(connection.recv_bytes(MAX_REPLY_BYTES), rank, result_path(self.folder, rank))
        except ValueError as error:
            reply = Reply(failure=Failure(rank, str(error), "", False, time.monotonic_ns()))
        except (EOFError, OSError):
            self._forget(connection)
            return None
        self._read_output(rank)  # what it printed before it replied
        return Ended(rank, reply)

    def _has_replied(self, rank: int) -> bool:
        """Return whether a rank has said what `poll` has not read yet, or has gone."""
        with contextlib.suppress(OSError):
            return self.ranks[rank].connection.poll(0)
        return True

    def _is_listening(self, fileobj: int | Connection) -> bool:
        return fileobj in self._selector.get_map()

    def _forget(self, fileobj: int | Connection) -> None:
        if self._is_listening(fileobj):
            self._selector.unregister(fileobj)

    def failure_of_exit(self, rank: int) -> Failure:
        """Describe the death of a rank's process, with the stack that a crash left or its last output."""
        process = self.ranks[rank]
        summary = "ended with its fork server, which was killed"
        if process.wait_status is not None:
            summary = describe_exit(os.waitstatus_to_exitcode(process.wait_status))
        if process.why_not:
            summary = (
                f"could not be started ({process.why_not}): this user or container may have no more processes, or the "
                "machine no more memory; end some, raise the limit (ulimit -u), or start fewer ranks"
            )
        text = self._stack_text(rank)
        if not text and process.output.last:
            text = "its last output:\n" + "\n".join(f"    {line[:LONGEST_LINE]}" for line in process.output.last)
        return Failure(rank, summary, text, False, process.ended_ns)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks (all if None); SIGKILL goes to everything that they have started too."""
        request: dict[str, object] = {"kind": "signal", "pool": self._name, "ranks": ranks, "signal": int(number)}
        self._server.request(request)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ranks where they stand; works while they wait in C, and says when one does not answer.

        Those that have replied meanwhile are left out: they wait for their next job.
        """
        asked = [rank for rank in ranks if not self.ranks[rank].is_gone and not self._has_replied(rank)]
        for rank in asked:
            with contextlib.suppress(OSError):  # it is starting
                os.truncate(stack_path(self.folder, rank), 0)  # `distlab where` may have asked before
        with contextlib.suppress(RuntimeError):
            self.signal(SIGNAL, asked)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not all(self._has_answered(rank) for rank in asked):
            time.sleep(0.01)
        texts = {rank: self._stack_text(rank) or self._silence(rank) for rank in asked}
        return {rank: text for rank, text in texts.items() if NEXT_JOB not in text or not self._has_replied(rank)}

    def _has_answered(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            if is_whole(stack_path(self.folder, rank).read_text(errors="replace")):
                return True
        return self._is_stopped(rank)

    def _is_stopped(self, rank: int) -> bool:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.ranks[rank].pid}/stat").read_text()
            return status.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def _silence(self, rank: int) -> str:
        if self._is_stopped(rank):
            return "it is stopped by a signal (SIGSTOP or a debugger) and does nothing until it gets SIGCONT"
        return "it does not answer: it is starting, or it gets no time to run"

    def _stack_text(self, rank: int) -> str:
        try:
            text = stack_path(self.folder, rank).read_text(errors="replace")
        except OSError:
            return ""
        return format_stack(text[max(0, text.rfind(CRASH)) :])  # what it was asked before its crash matters no more

    def close(self, grace_s: float = 2.0) -> None:
        """Let the ranks leave their group and exit; kill those that take longer than the grace."""
        for process in self.ranks:
            with contextlib.suppress(OSError):
                process.connection.send_bytes(b"")
        self._wait_for_end(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill every rank, wait until it is gone, close everything and remove the folder."""
        if self._is_down:
            return
        self._is_down = True
        with contextlib.suppress(RuntimeError):
            if not all(process.is_gone for process in self.ranks):
                self.signal(signal.SIGKILL)
        self._wait_for_end(10.0)
        self._selector.close()
        for process in self.ranks:
            process.output.flush()
            process.connection.close()
            os.close(process.output.fd)
            os.close(process.status_fd)
        self._server.remove_folder(self.folder)

    def _wait_for_end(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not all(process.is_gone for process in self.ranks) and (left := deadline - time.monotonic()) > 0:
            self.poll(left)
