"""Watch the ranks of a job from inside: end one that cannot go on, with words, on every rank.

Every rank records its calls where all can read them (`record`), and has a thread that looks four times a second. So
all ranks have to be on one machine. The first rank that still makes calls asks the watchdog; what it finds it writes on
a board that all read. Then each rank says it, with the line where it stands itself, and ends. A slow rank is never
ended (`watchdog`).

However the ranks end, nothing is left on the disk: the files lose their names as soon as all ranks have opened them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from distlab.comm.launch.failures import PEER_NOISE, RankError, RankTimeout, record_failure
from distlab.comm.record.recorder import Recorder
from distlab.comm.rendezvous import Address
from distlab.comm.together import together
from distlab.comm.watch.watchdog import Watchdog
from distlab.comm.where.frames import is_machinery, main_frame

LOOK_S = 0.25
TELL_S = 1.0  # for the other ranks to say where they stand
GRACE_S = 0.5  # for the other ranks' calls to be made, when this one has failed


class Watch:
    """What one rank sees of all ranks, and what they have told each other.

    Args:
        rank: this one.
        watchdog: reads their records.
        board: a file that all of them have; it is opened here.
    """

    def __init__(self, rank: int, watchdog: Watchdog, board: Path) -> None:
        self.rank, self.watchdog = rank, watchdog
        self.board = os.open(board, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def look(self) -> str:
        """Return why the job cannot go on, as this rank or a different one has found it; else ""."""
        if said := self.said():
            return said
        finished = self.watchdog.is_finished
        if not all(map(finished, range(self.rank))) or finished(self.rank):
            return ""
        return self.tell(self.watchdog.check() or "")

    def said(self) -> str:
        """Return what a rank has told, or ""."""
        text, end, _ = os.pread(self.board, os.fstat(self.board).st_size, 0).partition(b"\0")
        return text.decode(errors="replace") if end else ""

    def tell(self, words: str) -> str:
        """Let the other ranks know; return the words."""
        if words:
            with contextlib.suppress(OSError):  # a full disk: they learn from this rank's end that something is wrong
                os.write(self.board, words.encode(errors="replace") + b"\0")
        return words

    def why(self, error: Exception) -> str:
        """Return what the records add to an exception of this rank, or ""."""
        deadline = time.monotonic() + (GRACE_S if isinstance(error, RuntimeError) else 0)
        while not (words := self.said() or self.tell(self.watchdog.mismatch() or "")) and time.monotonic() < deadline:
            time.sleep(0.05)
        if words or PEER_NOISE.search(str(error)) is None:
            return words
        gone = [f"rank {rank} {what}" for rank, what in self.watchdog.left().items()]
        return "\n".join(filter(None, [*gone, self.watchdog.failed(self.rank)]))


@contextlib.contextmanager
def watching(address: Address, *, watch: bool, folder: Path | None = None, what: str = "") -> Iterator[None]:
    """Record this rank's calls in the block, and watch over all ranks of the job, which all enter.

    Args:
        address: this rank's place.
        watch: whether to watch, if all ranks are on one machine; else calls are recorded where there is a folder.
        folder: where the records shall stay; None: nowhere.
        what: whose block it is, such as "lab 01", for a launcher that tells all ranks' words as one; else each says it.

    Raises:
        RankError: the calls of the block do not fit together, though they have returned.
        RuntimeError: on every rank, where there is no room for the records of one.
    """
    with contextlib.ExitStack() as stack:
        if watch and address.world_size > 1 and address.is_on_one_machine:
            recorder, eye = _meet(address, folder)
            stack.callback(os.close, eye.board)
            stack.enter_context(contextlib.closing(recorder.start()))
            stack.enter_context(_looking(eye, recorder, what))
        elif folder is not None:
            stack.enter_context(contextlib.closing(Recorder(folder, address.rank).start()))
        yield


@contextlib.contextmanager
def _looking(eye: Watch, recorder: Recorder, what: str) -> Iterator[None]:
    done, main = threading.Event(), threading.get_ident()
    thread = threading.Thread(target=_look, args=(eye, done, main, what), name="watch", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join()

    try:
        yield
    except Exception as error:
        stop()
        with contextlib.suppress(Exception):  # the error itself matters more
            if words := eye.why(error):
                error.add_note(words)
        raise
    except BaseException:
        stop()
        recorder.finish()  # it leaves by its own doing
        raise
    else:
        stop()
        recorder.finish()
        if words := eye.said() or eye.tell(eye.watchdog.mismatch(patient=True) or ""):
            raise RankError(f"rank {eye.rank}: {words}")


def _look(eye: Watch, done: threading.Event, main: int, what: str) -> None:
    while not done.wait(LOOK_S):
        try:
            words = eye.look()
        except Exception as error:
            text = f"rank {eye.rank}: the ranks are watched no more, a hang will not be told ({error})"
            print(text, file=sys.stderr, flush=True)
            return
        if words and not done.is_set():
            who = what or f"rank {eye.rank} of {len(eye.watchdog.ranks)}"
            kind = RankTimeout if what else RankError
            frames = traceback.extract_stack(main_frame(main))
            shown = [frame for frame in frames if not is_machinery(frame.filename)]  # not those that only carry calls
            stack = "".join(traceback.format_list(shown or frames))
            end(kind(f"{who} cannot go on: {words}"), stack, aloud=not what)


def end(error: RankError, stack: str, *, aloud: bool = True) -> NoReturn:
    """Say why this rank ends and where it stands, to its launcher and (aloud, or where none listens) to all; end it."""
    heard = False
    with contextlib.suppress(OSError):
        heard = record_failure(error, stack)
    if aloud or not heard:
        print(f"{error}\n\nIt stands here (innermost call last):\n{stack}", file=sys.stderr, flush=True)
    time.sleep(TELL_S)
    os._exit(1)


def _meet(address: Address, folder: Path | None) -> tuple[Recorder, Watch]:
    """Begin a record on every rank and let all open each other's."""
    rank, private, made = address.rank, "", list[Recorder]()
    what = "record the ranks' calls (make room in TMPDIR, or pass watch=False)"
    try:
        private = together(lambda: tempfile.mkdtemp(prefix="distlab-watch-") if rank == 0 else "", what=what)[0]
        records = folder or Path(private)
        together(lambda: made.append(Recorder(records, rank)), what=what)
        eye = Watch(rank, Watchdog(records, address.world_size, since_ns=0), Path(private) / "board")
        eye.watchdog.follow()
        dist.barrier()  # all files are open
    finally:
        if private and rank == 0:
            shutil.rmtree(private, ignore_errors=True)
    return made[0], eye
