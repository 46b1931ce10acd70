"""gpu.json: what was found, kept from run to run, so that a second run goes on where the first one ended."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gpu.facts import Facts
from gpu.job import PARTS, Part
from gpu.run import ROOT, Outcome

SCHEMA = 1
FILE = "gpu.json"


@dataclass
class Results:
    """Everything that gpu.json holds.

    Attributes:
        folder: where it stands.
        key: device and versions; results of others are not mixed with these.
        facts: the machine and its software.
        parts: what became of each part that was run, by name.
        not_run: why each of the other parts was not run, by name.
        notes: what holds for all that was measured.
    """

    folder: Path
    key: dict[str, object]
    facts: dict[str, object] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, part: Part, outcome: Outcome) -> None:
        """Keep what became of a part."""
        self.parts[part.name] = asdict(outcome) | {"code": code_digest()}
        self.not_run.pop(part.name, None)

    def is_done(self, part: Part) -> bool:
        """Whether a part ended well, in this run or an earlier one."""
        return bool(self.parts.get(part.name, {}).get("status") == "done")

    def save(self) -> Path:
        """Write gpu.json: a new file takes the old one's place at once, so that none is ever half written."""
        content = {"schema": SCHEMA} | {name: value for name, value in vars(self).items() if name != "folder"}
        path = self.folder / FILE
        new = path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)
        return path

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Return every row with the name of its part, in the order of the parts."""
        return [(name, entry["row"]) for name in self.ordered() for entry in self._findings(name) if "row" in entry]

    def said(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Return every note or picture with the name of its part."""
        return [(name, entry) for name in self.ordered() for entry in self._findings(name) if kind in entry]

    def _findings(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.parts[name]["findings"]
        return found

    def ordered(self) -> list[str]:
        """Return the names of the parts that were run, those of most worth first."""
        order = [part.name for part in PARTS]
        return sorted(self.parts, key=lambda name: order.index(name) if name in order else len(order))


def resume(folder: Path, facts: Facts, device: str) -> tuple[Results, str]:
    """Return what an earlier run left in the folder, or nothing, and one line that says which.

    Raises:
        ValueError: the folder's gpu.json is a different program's.
    """
    key = facts.key(device)
    new = Results(folder, key, asdict(facts))
    path = folder / FILE
    if not path.exists():
        return new, ""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        old_key, parts, not_run = kept["key"], kept["parts"], kept["not_run"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--out {folder}: {path} is not what this command writes; pass a different folder") from None
    if kept["schema"] != SCHEMA or old_key != key:
        return new, f"Starting anew: {path} was measured with {_difference(old_key, key)}."
    new.parts, new.not_run = parts, not_run
    done = [name for name in new.ordered() if parts[name]["status"] == "done"]
    rest = [name for name in new.ordered() if name not in done]
    again = f"; these did not end well and are tried again: {', '.join(rest)}" if rest else ""
    return new, f"Going on from {path}: {len(done)} parts are done ({', '.join(done) or 'none'}){again}."


def _difference(old: dict[str, object], new: dict[str, object]) -> str:
    apart = [f"{name} {old.get(name)!r} (now {new[name]!r})" for name in new if old.get(name) != new[name]]
    return ", ".join(apart) or "a different version of this command"


@cache
def code_digest() -> str:
    """Return a short digest of the library and of the parts, to tell results of different code apart."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _sources() -> Iterable[Path]:
    folders = [ROOT / "distlab", ROOT / "simulator", ROOT / "benchmarks"]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]
