"""Two saves, against a killer who knows every moment; and a folder of checkpoints in which some are damaged."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.checkpoint.crashes import Crash, crash_points
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import compare, seeded
from distlab.grading.variation.draw import Draw, Vary

OLD, NEW = 30, 40
Files = Mapping[str, bytes | None]


def a_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder in memory where there is one: a check flushes files a hundred times."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def a_state(step: int, rank: int = 0, size: int = 300) -> dict[str, Tensor]:
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


def newest_step(files: Files, pattern: str) -> int | None:
    """Return the highest N of the names that are checkpoints."""
    return max((int(name[1]) for path in files if (name := re.fullmatch(pattern, path))), default=None)


def found_in(files: Files) -> str:
    """Return what whoever loads finds: "30" or "40", or what is wrong."""
    step = newest_step(files, r"step-(\d+)\.pt")
    if step is None:
        return "no checkpoint at all"
    if f"step-{step}.pt" not in files:
        odd = next(path for path in files if (name := re.fullmatch(r"step-(\d+)\.pt", path)) and int(name[1]) == step)
        return f"no step-{step}.pt, which is the highest number, but {odd}: write the number as it is"
    state = loaded(files[f"step-{step}.pt"])
    size = len(files[f"step-{step}.pt"] or b"")
    if state is None:
        return f"step-{step}.pt, which has {size} bytes and cannot be loaded"
    return (
        str(int(state["step"]))
        if isinstance(state, dict) and "step" in state
        else f"step-{step}.pt of a different kind"
    )


def try_again(fn: Callable[..., Any], crash: Crash, step: int) -> str:
    """Save into what a kill left; return what it raised, or ""."""
    with a_folder() as name:
        crash.restore(Path(name))
        try:
            fn(Path(name), step, a_state(step))
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(f"{name}/", "")
    return ""


def drive_save(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Save step 40 next to step 30, and step 40 once more; look after each call, and save again into what is left."""
    results = []
    with a_folder() as name:
        folder = Path(name)
        (folder / f"step-{OLD}.pt").write_bytes(as_bytes(a_state(OLD)))
        for number, allowed in enumerate(((str(OLD), str(NEW)), (str(NEW),))):
            crashes = crash_points(lambda number=number: fn(folder, NEW, a_state(NEW, number)), folder)
            rows = [(crash.after, found_in(crash.files)) for crash in crashes]
            early = [c.after for c in crashes if f"step-{NEW}.pt" in c.unflushed]
            again = [(crash.after, try_again(fn, crash, NEW)) for crash in crashes]
            left = sorted(crashes[-1].files.keys() - {f"step-{OLD}.pt", f"step-{NEW}.pt"})
            last = (
                loaded(crashes[-1].files.get(f"step-{NEW}.pt")),
                sorted(crashes[-1].files),
                "." in crashes[-1].unflushed,
            )
            results.append(
                {"allowed": allowed, "rows": rows, "early": early, "again": again, "left": left, "last": last}
            )
    return results


def judge_save(evidence: Evidence) -> Iterator[Fault]:
    """Whole at every moment, flushed before it has its name, nothing in the way of the next one."""
    for number, result in enumerate(evidence.results[0]):
        state, names, is_name_lost = result["last"]
        for after, what in result["rows"]:
            if what in result["allowed"]:
                continue
            when = "while step 40 is saved" if number == 0 else "while step 40 is saved once more"
            text = f"killed after `{after}` {when}: whoever loads finds {what}"
            if what.startswith("no step-"):
                yield Fault("name", text)
            if what == str(OLD):
                yield Fault("gone", f"{text}, though 40 was complete: os.replace it, never remove it first")
            if what == "no checkpoint at all":
                yield Fault("gone", f"{text}: leave the checkpoints that are there alone")
            text += "; write under a name that is none of a checkpoint, and os.replace it when it is whole"
            yield Fault("half written", text)
        if f"step-{NEW}.pt" not in names:
            yield Fault("name", f"afterwards the folder has {', '.join(names)}, and no step-{NEW}.pt")
        if f"step-{OLD}.pt" not in names:
            yield Fault("gone", f"step-{OLD}.pt is gone: earlier checkpoints stay, and are the way back")
        if number == 1 and compare(state, a_state(NEW)) is None:
            text = f"step-{NEW} is saved once more, with other numbers, and step-{NEW}.pt has the first ones still"
            yield Fault("not saved again", f"{text}: a resumed run comes to the same step again; write each time")
        if result["early"]:
            text = f"after `{result['early'][0]}` the file has its name, and its bytes are not yet on the disk: a power"
            yield Fault(
                "not flushed", f"{text} cut leaves an empty step-40.pt. os.fsync(file.fileno()) before the name"
            )
        if is_name_lost:
            text = "the new name is not yet on the disk when save returns: a power cut takes it back"
            yield Fault("name not flushed", f"{text}; flush_directory(folder) last")
        for after, error in result["again"]:
            if error:
                text = f"killed after `{after}`; then the next save fails, because of what the killed one left: {error}"
                yield Fault("in the way", f"{text}. Write over it, or remove it first")
        if result["left"]:
            yield Fault(
                "left behind", f"it leaves {', '.join(result['left'])} behind: rename it, do not copy or link it"
            )


def budget_save(evidence: Evidence) -> list[str]:
    """Say at how many moments it was killed."""
    rows = [row for result in evidence.results[0] for row in result["rows"]]
    return [f"killed at each of {len(rows)} moments: the newest checkpoint is whole at all of them"]


def _draw_save(draw: Draw) -> tuple[Any, ...]:
    step = draw.one_of(7, 0, 123456, 40)
    return step, {
        f"w{i}": draw.tensor(*draw.shape(), dtype=draw.dtype(), strided=True) for i in range(draw.one_of(2, 1, 0, 3))
    }


def _use_save(fn: Callable[..., Any], step: int, state: dict[str, Tensor]) -> dict[str, Any]:
    """Save twice, and return what was saved under each name."""
    with a_folder() as name:
        returned = [fn(Path(name), step + more, state) for more in (0, 1)]
        files = {path.name: loaded(path.read_bytes()) for path in sorted(Path(name).iterdir())}
    return {"files": files, "returned": returned}


vary_save = Vary(_draw_save, use=_use_save)

_WRITE, _RENAME = "torch.save(state, file)\nos.fsync(file.fileno())", "os.replace(partial, path)"
_OLD = 'for old in folder.glob("step-*.pt"):'

WRONG_SAVE = (
    Mutant("once is enough", "not saved again", "write each time", 1).edit(
        'path = folder / f"step-{step}.pt"', 'path = folder / f"step-{step}.pt"\nif path.exists():\n    return'
    ),
    Mutant("in place", "half written", "write under a name that is none", 1, 44)
    .edit('open(partial, "wb")', 'open(path, "wb")')
    .without(_RENAME),
    Mutant("copied", "half written", "os.replace it when it is whole", 1, 44)
    .edit(_RENAME, "shutil.copyfile(partial, path)\npartial.unlink()")
    .setup("import shutil"),
    Mutant("named too soon", "half written", "killed after", 1)
    .edit(_WRITE, f"{_RENAME}\n{_WRITE}")
    .edit(f"{_RENAME}\nflush", "flush"),
    Mutant("not flushed", "not flushed", "a power cut leaves an empty step-40.pt", 1).without(
        "os.fsync(file.fileno())"
    ),
    Mutant("name not flushed", "name not flushed", "flush_directory(folder) last", 1).without(
        "flush_directory(folder)"
    ),
    Mutant("flushed first", "name not flushed", "takes it back", 1).edit(
        f"{_RENAME}\nflush_directory(folder)", f"flush_directory(folder)\n{_RENAME}"
    ),
    Mutant("removed first", "gone", "though 40 was complete", 1).edit(
        _RENAME, f"path.unlink(missing_ok=True)\n{_RENAME}"
    ),
    Mutant("makes room", "gone", "leave the checkpoints that are there alone", 1, "full disks").edit(
        "path = folder", f"{_OLD}\n    old.unlink()\npath = folder"
    ),
    Mutant("keeps the last", "gone", "earlier checkpoints stay", 1).edit(
        "flush_directory", f"{_OLD}\n    if old != path:\n        old.unlink()\nflush_directory"
    ),
    Mutant("must be new", "in the way", "FileExistsError", 1).edit('"wb"', '"xb"'),
    Mutant("linked", "left behind", "rename it", 1).edit(
        _RENAME, "path.unlink(missing_ok=True)\nos.link(partial, path)"
    ),
)
