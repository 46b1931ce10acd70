"""Save while training goes on: a step waits for a copy in memory, and a thread writes the copy to the disk.

    with AsyncSaves(directory) as saves:
        for step in range(first, last):
            train_step(...)
            if (step + 1) % 100 == 0:
                saves.save(step + 1, parts=parts)

What is on the disk is what `save` writes, in the same order: a checkpoint comes to exist when all ranks' files are
flushed, so a kill at any moment leaves the one before it. What differs is who waits:

1. `save` agrees with the other ranks, looks at all tensors, and returns.
2. Each rank's thread copies them (`Snapshot`); the next step of any torch optimizer waits for that.
3. It writes its file, then a note `rank-N.done` next to it. Threads send nothing: that would mix with what training
   sends.
4. Rank 0's thread waits for all notes, writes the manifest and gives the directory its name.
5. The next `save`, or `wait`, first waits until the one before is done (one snapshot at a time: a disk that is too slow
   holds training up, and memory does not grow). Where a thread failed, every rank raises the same error there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.checkpoint import files
from distlab.checkpoint.manifest import CheckpointError, FileRecord, Manifest, rank_file
from distlab.checkpoint.parts import Parts
from distlab.checkpoint.resume import OWN, agreed_contents, write
from distlab.checkpoint.snapshot import Snapshot
from distlab.comm.together import place_in, together

_LOOK_EVERY_S = 0.005


class AsyncSaves(AbstractContextManager["AsyncSaves"]):
    """Saves of one run, each written by a thread while training goes on. Every rank calls the same methods.

    Args:
        directory: as of `save`: where this run's checkpoints are.
        group: the ranks that save together.
        keep: newest checkpoints to leave in the directory.

    Attributes:
        held_s: seconds for which `save`, and steps of optimizers, have held training up so far.

    Cost: `save` exchanges outcomes once, and twice more where a save before it is awaited; nothing else is sent, and
        nothing by threads. Host memory for a copy of what this rank writes, made once and used again.
    """

    def __init__(self, directory: str | Path, *, group: ProcessGroup | None = None, keep: int = 3) -> None:
        self._directory, self._group, self._keep = Path(directory), group, keep
        self._snapshot = Snapshot()
        self._writing: _Writing | None = None
        self._rank, self._world_size = place_in(group)
        self.held_s = 0.0

    def save(self, step: int, *, parts: Parts, data_position: Any = 0) -> None:
        """Begin to save a run after `step` updates; arguments are those of `distlab.checkpoint.save`.

        Whoever changes parameters otherwise than by a torch optimizer's step() calls `wait` first.

        Raises:
            ValueError: on every rank: as `save`.
            CheckpointError: on every rank: the save before this one failed on any rank, and nothing of it is left; or
                this one cannot begin. Training may go on and save again.
        """
        begin_s = time.perf_counter()
        self.wait()
        everywhere = self._everywhere(step)
        buffers = [one for part in parts.values() if isinstance(part, nn.Module) for one in part.buffers()]
        taken: list[dict[str, Any]] = []

        def begin(contents: dict[str, Any]) -> Path | None:
            taken.append(self._snapshot.begin(contents if self._rank == 0 else {OWN: contents[OWN]}, at_once=buffers))
            return files.begin(self._directory, step) if self._rank == 0 else None

        try:
            _, begun = agreed_contents(everywhere, step, self._keep, parts, data_position, begin=begin)
        except (ValueError, CheckpointError):
            if self._rank == 0 and self._directory.is_dir():
                files.quietly(lambda: files.discard(self._directory))
            raise
        self._writing = _Writing(self, begun[0], step, taken[0])
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self.held_s += time.perf_counter() - begin_s

    def wait(self) -> Path | None:
        """Wait until the last save is on the disk; return it, or None where nothing was saved.

        Raises:
            CheckpointError: on every rank, where it failed on any.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        self._hook.remove()
        everywhere = self._everywhere(writing.step)
        try:
            everywhere(writing.written.result)
            path: Path | None = everywhere(writing.published.result)[0]
            writing.thread.join()
        except CheckpointError:
            writing.stopped.set()
            writing.thread.join()
            if self._rank == 0:
                files.quietly(lambda: files.remove(writing.prepared))
            raise
        return path

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the last save; where training failed, leave what is not complete: other ranks may have ended."""
        if kind is None:
            self.wait()
        elif self._writing is not None:
            self._hook.remove()
            self._writing.stopped.set()
            self._writing.thread.join()

    def _everywhere(self, step: int) -> Callable[[Callable[[], Any]], list[Any]]:
        what = f"save step {step} in {str(self._directory)!r}"
        return partial(together, group=self._group, what=what, failure=CheckpointError)

    def _before_update(self, *_: Any) -> None:
        if self._writing is not None:
            begin_s = time.perf_counter()
            self._writing.copied.wait()
            self.held_s += time.perf_counter() - begin_s

    def _complete(self, writing: _Writing, own: tuple[FileRecord, ...]) -> Path | None:
        """Wait for the notes of all ranks, and give the checkpoint its name; rank 0's thread calls this."""
        records = list(own)
        for rank in range(1, self._world_size):
            note = writing.prepared / _note(rank)
            while not note.exists():
                if writing.stopped.wait(_LOOK_EVERY_S):
                    return None
            records.append(FileRecord(**json.loads(note.read_bytes())))
            note.unlink()
        path = files.publish(writing.prepared, Manifest(writing.step, self._world_size, tuple(records)))
        files.quietly(lambda: files.prune(self._directory, writing.step, self._keep))
        return path


class _Writing:
    """One save that is being written, by a thread that ends with the process.

    Attributes:
        copied: set when the next update may change what is saved.
        stopped: set when the thread shall wait for no other rank any more.
        written: this rank's files.
        published: the checkpoint, on rank 0.
    """

    def __init__(self, saves: AsyncSaves, prepared: Path, step: int, contents: dict[str, Any]) -> None:
        self.prepared, self.step, self._saves, self._contents = prepared, step, saves, contents
        self.stopped, self.copied = threading.Event(), threading.Event()
        self.written: Future[tuple[FileRecord, ...]] = Future()
        self.published: Future[Path | None] = Future()
        self.thread = threading.Thread(target=self._run, name=f"save step {step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        rank = self._saves._rank
        try:
            self._saves._snapshot.finish()
            self.copied.set()
            records = write(self.prepared, self._contents, rank)
            if rank != 0:
                files.write_bytes(self.prepared, f".{_note(rank)}", json.dumps(asdict(records[0])).encode())
                (self.prepared / f".{_note(rank)}").rename(self.prepared / _note(rank))
            self.written.set_result(records)
            self.published.set_result(self._saves._complete(self, records) if rank == 0 else None)
        except BaseException as error:  # raised again where training waits for it
            for result in (self.written, self.published):
                if not result.done():
                    result.set_exception(error)
        finally:
            self.copied.set()


def _note(rank: int) -> str:
    return rank_file(rank).replace(".pt", ".done")
