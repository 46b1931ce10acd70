"""The manifest: the last file of a checkpoint, and the list against which all others are checked.

A flipped bit in a saved tensor loads without any complaint, as a different number. So the manifest has a SHA-256 of
every file, and one of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

FORMAT = "distlab checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
SHARED = "shared.pt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or none that was written can be read."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The last file of a checkpoint: what is in it, so that anything missing or changed shows.

    Attributes:
        step: updates that had been made.
        world_size: ranks that saved it.
        files: every other file of the checkpoint.
    """

    step: int
    world_size: int
    files: tuple[FileRecord, ...]

    def to_bytes(self) -> bytes:
        """Write as JSON, with the SHA-256 of its own content."""
        return _with_digest({"format": FORMAT, "version": VERSION} | asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            UnknownVersionError: an intact manifest of a different version.
            ValueError: anything else, down to a single changed bit; the text says what.
        """
        try:
            facts = json.loads(data)
            named = f"the format {facts.get('format')!r}"
            intact = _with_digest({name: value for name, value in facts.items() if name != "sha256"}) == data
        except (ValueError, AttributeError, RecursionError):
            facts, named, intact = {}, f"{len(data)} bytes of something else", False
        if facts.get("format") != FORMAT:
            raise ValueError(f"is not a manifest of the format {FORMAT!r}, got {named}; use a different checkpoint")
        if not intact:
            raise ValueError("was changed after it was written (its own SHA-256 differs); use a different checkpoint")
        if facts.get("version") != VERSION:
            raise UnknownVersionError(
                f"has version {facts.get('version')!r}; this distlab reads version {VERSION}: load it with the distlab "
                "that saved it"
            )
        try:
            files = tuple(FileRecord(**record) for record in facts["files"])
            manifest = cls(facts["step"], facts["world_size"], files)
        except (KeyError, TypeError) as error:
            raise ValueError(f"lacks a field of version {VERSION} ({error!r}); use a different checkpoint") from None
        # Only names that we write: a manifest must not make a reader open files outside its directory.
        names = [file.name for file in files]
        if names != [SHARED, *map(rank_file, range(len(files) - 1))] or len(files) != manifest.world_size + 1:
            raise ValueError(
                f"lists other files than expected: {SHARED} and one for each of {manifest.world_size} ranks, got "
                f"{', '.join(names)}; use a different checkpoint"
            )
        return manifest


class UnknownVersionError(ValueError):
    """The checkpoint is intact, but of a version that this code does not know."""


def _with_digest(facts: Mapping[str, object]) -> bytes:
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return (json.dumps({**facts, "sha256": digest}, indent=1) + "\n").encode()


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes for itself."""
    return f"rank-{rank}.pt"
