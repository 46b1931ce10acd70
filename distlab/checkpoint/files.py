"""A checkpoint on disk: a directory that is there whole, or not there.

A job may be killed between any two instructions, and a disk may lose what was not flushed. So a checkpoint is written
in an order that leaves no moment at which a half-written one can be taken for a good one:

1. a new directory, under a name that no reader looks at (`.saving-...`);
2. its files, each flushed to the disk (fsync), its SHA-256 computed on the way;
3. `manifest.json`, which names every file with its size and SHA-256, and is flushed too;
4. the directory is flushed, then renamed to `step-0000000040` (a rename happens whole or not at all), and the parent is
   flushed, so that the new name is on the disk.

Nothing is ever overwritten: a step that is saved again gets a directory of its own, `step-0000000040-1`. A reader takes
the newest that is whole (`newest`), and says what is wrong with the others.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from distlab.checkpoint.manifest import MANIFEST, CheckpointError, FileRecord, Manifest, UnknownVersionError
from distlab.checkpoint.snapshot import compact

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{10})(?:-([1-9]\d*))?")


class HashingFile(io.FileIO):
    """A new file that computes its SHA-256 while it is written; `error` is why the system refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.digest, self.num_bytes = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write as many bytes as the system takes, and return their number."""
        try:
            count = os.write(self.fileno(), data)
        except OSError as error:  # torch.save would hide it behind an error of its own
            self.error = error
            raise
        self.digest.update(memoryview(data)[:count])
        self.num_bytes += count
        return count


def _write_new(path: Path, write: Callable[[IO[bytes]], object]) -> FileRecord:
    """Write a new file, flush it to the disk, and return what a manifest says of it.

    Raises:
        OSError: the disk refused, also where torch.save hid that behind an error of its own.
    """
    with HashingFile(path) as file:
        try:
            buffered = io.BufferedWriter(file, _CHUNK_BYTES)
            write(buffered)
            buffered.flush()
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise
        os.fsync(file.fileno())
    return FileRecord(path.name, file.num_bytes, file.digest.hexdigest())


def write_tensors(directory: Path, name: str, state: object) -> FileRecord:
    """Write a state to a new file of a directory and flush it to the disk.

    Raises:
        OSError: the disk refused.
    """
    return _write_new(directory / name, lambda file: torch.save(compact(state), file))


def write_bytes(directory: Path, name: str, data: bytes) -> None:
    """Write bytes to a new file of a directory and flush it to the disk."""
    _write_new(directory / name, lambda file: file.write(data))


def flush_directory(directory: Path) -> None:
    """Flush a directory: which names are in it is data too. Some file systems cannot, and say so."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def begin(directory: Path, step: int) -> Path:
    """Make the directory in which a checkpoint is prepared, under a name that no reader looks at."""
    if not directory.is_dir():
        directory.mkdir(parents=True)
        flush_directory(directory.parent)
    quietly(lambda: discard(directory))
    prepared = directory / f".saving-{step:010d}"
    os.mkdir(prepared)
    return prepared


def publish(prepared: Path, manifest: Manifest) -> Path:
    """Write the manifest and give the prepared directory its name: with the rename the checkpoint comes to exist."""
    directory = prepared.parent
    write_bytes(prepared, MANIFEST, manifest.to_bytes())
    flush_directory(prepared)
    attempts = [attempt for step, attempt, _ in saved(directory) if step == manifest.step]
    suffix = f"-{max(attempts) + 1}" if attempts else ""
    path = directory / f"step-{manifest.step:010d}{suffix}"
    os.rename(prepared, path)
    flush_directory(directory)
    return path


def saved(directory: Path) -> list[tuple[int, int, Path]]:
    """Return (step, attempt, path) of every checkpoint directory, the newest first: by number, never by file time.

    Raises:
        OSError: it cannot be listed. Where it is not there at all, nothing was saved yet.
    """
    names = os.listdir(directory) if os.path.lexists(directory) else []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    found = [(int(match[1]), int(match[2] or 0), directory / match[0]) for match in matches]
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files were all found to be as they were written."""

    path: Path
    step: int
    world_size: int


def newest(directory: str | Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files are all as they were written; None where nothing was saved yet.

    The newest is the one with the highest step in its name; file times say nothing after a copy. One that is damaged is
    named in a warning and the one before it is taken.

    Raises:
        CheckpointError: there are checkpoints, but each is damaged.
        UnknownVersionError: the newest intact one is of a different version; an older one would lose work unseen.
    """
    damaged = []
    for _, _, path in saved(Path(directory)):
        try:
            manifest = verified(path)
        except UnknownVersionError:
            raise
        except ValueError as error:
            damaged.append(str(error))
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
        else:
            return Checkpoint(path, manifest.step, manifest.world_size)
    if damaged:
        raise CheckpointError(f"no checkpoint in {str(directory)!r} can be used: {'; '.join(damaged)}")
    return None


def verified(path: Path) -> Manifest:
    """Read a checkpoint's manifest and check every file against it; ValueError names what is wrong."""
    manifest = read_manifest(path)
    for record in manifest.files:
        with checked(path, record):
            pass
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; ValueError names what is wrong with it."""
    try:
        with open(path / MANIFEST, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ValueError(f"{path.name}/{MANIFEST} cannot be read ({error.strerror})") from None
    try:
        manifest = Manifest.from_bytes(data)
    except UnknownVersionError as error:
        raise UnknownVersionError(f"{path.name} {error}") from None
    except ValueError as error:
        raise ValueError(f"{path.name}/{MANIFEST} {error}") from None
    if not path.name.startswith(f"step-{manifest.step:010d}"):
        raise ValueError(
            f"{path.name} holds the checkpoint of step {manifest.step}: the directory was renamed; give it its old name"
        )
    return manifest


@contextmanager
def checked(path: Path, record: FileRecord) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint once its size and SHA-256 are those of its record; ValueError names what is wrong."""
    name = f"{path.name}/{record.name}"
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path / record.name, "rb"))
            num_bytes = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256") if num_bytes == record.num_bytes else None
            file.seek(0)
        except OSError as error:  # also where the disk fails in the middle
            raise ValueError(f"{name} cannot be read ({error.strerror})") from None
        if digest is None:
            raise ValueError(f"{name} has {num_bytes} bytes; {record.num_bytes} were written")
        if digest.hexdigest() != record.sha256:
            raise ValueError(f"{name} was changed after it was written (its SHA-256 differs)")
        yield file


def prune(directory: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` of the checkpoints up to a step.

    Later steps stay and do not count: a run that went back to `step` found them damaged. Each directory is renamed
    first: a deletion that is cut off must not leave a checkpoint that is there in part.
    """
    reached = [path for its_step, _, path in saved(directory) if its_step <= step]
    for path in reached[keep:]:
        os.rename(path, directory / f".removing-{path.name}")
    discard(directory)


def discard(directory: Path) -> None:
    """Delete what interrupted saves and deletions left behind."""
    for name in os.listdir(directory):
        if name.startswith((".saving-", ".removing-")):
            remove(directory / name)


def quietly(action: Callable[[], None]) -> None:
    """Clean up; warn where that fails: leftovers cost room, not correctness."""
    try:
        action()
    except OSError as error:
        warnings.warn(f"old checkpoint files could not be removed: {error}", stacklevel=3)


def remove(path: Path) -> None:
    """Delete a directory, or whatever else has its name; nothing where there is none. A link's target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        os.unlink(path)
