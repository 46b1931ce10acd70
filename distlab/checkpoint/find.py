"""Find the newest checkpoint that is whole, and say what is wrong with the others."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distlab.checkpoint.files import saved
from distlab.checkpoint.manifest import MANIFEST, CheckpointError, FileRecord, Manifest, UnknownVersionError


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
