"""Two saves, against a killer who knows every moment; and a folder of checkpoints in which some are damaged."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from distlab.checkpoint.crashes import Crash, crash_points
from distlab.course.grading.cases import Cases, Free
from distlab.course.grading.diagnosis.values import compare, seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

OLD, NEW = 30, 40
Files = Mapping[str, bytes | None]


def a_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder in memory where there is one: a check flushes files a hundred times."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def a_state(step: int, rank: int = 0, size: int = 300) -> dict[str, Any]:
    """Return a small state that is a different one at each step and on each rank."""
    return {"weight": seeded(rank, size, purpose=f"step {step}"), "step": torch.tensor(step)}


def as_bytes(state: Any) -> bytes:
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def loaded(data: bytes | None) -> Any:
    """Return the state in a file, or None where it cannot be loaded."""
    try:
        return torch.load(io.BytesIO(data or b""), weights_only=True)
    except Exception:  # torch tells a broken file in many ways
        return None


def found_in(files: Files) -> str:
    """Return what whoever loads finds: the checkpoint of the highest number."""
    numbers = {path: int(name[1]) for path in files if (name := re.fullmatch(r"step-(\d+)\.pt", path))}
    if not numbers:
        return "no checkpoint at all"
    newest = max(numbers, key=lambda path: numbers[path])
    state = loaded(files[newest])
    if state is None:
        return f"a {newest} that cannot be loaded"
    is_its = newest == f"step-{numbers[newest]}.pt" and isinstance(state, dict) and "step" in state
    return f"step {int(state['step'])}" if is_its else f"a {newest}, whose name or state is none of a checkpoint"


def try_again(fn: Callable[..., Any], crash: Crash) -> str:
    """Save into what a kill left; say whether it works, or what it raised."""
    with a_folder() as name:
        crash.restore(Path(name))
        try:
            fn(Path(name), NEW, a_state(NEW))
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(f"{name}/", "")
    return "it works"


def _use_kills(fn: Callable[..., Any], times: int) -> dict[str, Any]:
    """Save step 40 next to step 30, once or twice; look after each call, and save into what is left."""
    with a_folder() as name:
        folder, state = Path(name), a_state(NEW, times) | {"rate": 0.1, "epoch": times}
        (folder / f"step-{OLD}.pt").write_bytes(as_bytes(a_state(OLD)))
        if times == 2:
            fn(folder, NEW, a_state(NEW))
        crashes = crash_points(lambda: fn(folder, NEW, state), folder)
        allowed = [f"step {OLD}", f"step {NEW}"][times - 1 :]
        end, found = crashes[-1].files, [found_in(crash.files) for crash in crashes]
        held = "what is saved" if compare(loaded(end.get(f"step-{NEW}.pt")), state) is None else "something else"
        tried = (try_again(fn, crash) for crash in {tuple(sorted(one.files)): one for one in crashes}.values())
        return {
            "whoever loads after a kill finds": next(
                (one for one in found if one not in allowed), " or ".join(allowed)
            ),
            "the checkpoints afterwards": sorted(path for path in end if path.startswith("step-")),
            f"step-{NEW}.pt holds": held,
            "bytes are on the disk before they have their name": not any(
                f"step-{NEW}.pt" in crash.unflushed for crash in crashes
            ),
            "the name is on the disk when save returns": "." not in crashes[-1].unflushed,
            "a save after a kill": next((one for one in tried if one != "it works"), "it works"),
            "what it leaves beside them": sorted(path for path in end if not path.startswith("step-")),
            "moments": Free(len(crashes)),
        }


drive_save = Cases({"while step 40 is saved": (1,), "while step 40 is saved once more": (2,)}, _use_kills)


def budget_save(evidence: Evidence) -> list[str]:
    """Say at how many moments it was killed."""
    count = sum(made["result"]["moments"].value for made in evidence.results[0].values())
    return [f"killed at each of {count} moments: the newest checkpoint is whole at all of them"]


def _draw_save(draw: Draw) -> tuple[Any, ...]:
    step = draw.one_of(7, 0, 123456, 40)
    return step, {"epoch": draw.integer(0, 9), "rates": [draw.number(0, 1)]} | {
        f"w{i}": draw.tensor(*draw.shape(), dtype=draw.dtype(), strided=True) for i in range(draw.one_of(2, 1, 0, 3))
    }


def _use_save(fn: Callable[..., Any], step: int, state: dict[str, Any]) -> dict[str, Any]:
    """Save twice, and return what was saved under each name."""
    with a_folder() as name:
        returned = [fn(Path(name), step + more, state) for more in (0, 1)]
        files = {path.name: loaded(path.read_bytes()) for path in sorted(Path(name).iterdir())}
    return {"files": files, "returned": returned}


vary_save = Vary(_draw_save, use=_use_save)

_WRITE, _RENAME = "torch.save(state, file)\nos.fsync(file.fileno())", "os.replace(partial, path)"
_OLD = 'for old in folder.glob("step-*.pt"):'
_HALF = "write under a name that is none of a checkpoint, and os.replace it when it is whole"
_TAKEN_BACK = "a power cut takes the new name back: flush_directory(folder) last"

WRONG_SAVE = (
    Mutant("once is enough", "not saved again", "a resumed run comes to the same step again: write each time", 1).edit(
        'path = folder / f"step-{step}.pt"', 'path = folder / f"step-{step}.pt"\nif path.exists():\n    return'
    ),
    Mutant("in place", "half written", _HALF, 1, 44).edit('open(partial, "wb")', 'open(path, "wb")').without(_RENAME),
    Mutant("by name, in place", "half written", _HALF, 1, 44).body("torch.save(state, folder / f'step-{step}.pt')"),
    Mutant("copied", "half written", _HALF, 1, 44)
    .edit(_RENAME, "shutil.copyfile(partial, path)\npartial.unlink()")
    .setup("import shutil"),
    Mutant("named too soon", "half written", _HALF, 1)
    .edit(_WRITE, f"{_RENAME}\n{_WRITE}")
    .edit(f"{_RENAME}\nflush", "flush"),
    Mutant(
        "not flushed",
        "not flushed",
        "a power cut leaves an empty file under the checkpoint's name: os.fsync(file.fileno()) before the name",
        1,
    ).without("os.fsync(file.fileno())"),
    Mutant("name not flushed", "name not flushed", _TAKEN_BACK, 1).without("flush_directory(folder)"),
    Mutant("flushed first", "name not flushed", _TAKEN_BACK, 1).edit(
        f"{_RENAME}\nflush_directory(folder)", f"flush_directory(folder)\n{_RENAME}"
    ),
    Mutant("removed first", "gone", "step 40 was complete: os.replace it, never remove it first", 1).edit(
        _RENAME, f"path.unlink(missing_ok=True)\n{_RENAME}"
    ),
    Mutant(
        "makes room", "gone", "leave the checkpoints that are there alone: a kill leaves none", 1, "full disks"
    ).edit("path = folder", f"{_OLD}\n    old.unlink()\npath = folder"),
    Mutant("keeps the last", "gone", "earlier checkpoints stay, and are the way back", 1).edit(
        "flush_directory", f"{_OLD}\n    if old != path:\n        old.unlink()\nflush_directory"
    ),
    Mutant("must be new", "in the way", "a killed save left a file: write over it, or remove it first", 1).edit(
        '"wb"', '"xb"'
    ),
    Mutant("linked", "left behind", "it leaves its own file behind, and removes step 40 first: os.replace it", 1).edit(
        _RENAME, "path.unlink(missing_ok=True)\nos.link(partial, path)"
    ),
)
