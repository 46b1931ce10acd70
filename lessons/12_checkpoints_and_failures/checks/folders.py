"""A folder of checkpoints in which some are damaged, and shards that another number of ranks reads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from distlab_lesson_12.checks.disk import a_folder
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import describe, seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

CASES: dict[str, tuple[tuple[str, str], ...]] = {  # damage to some checkpoints: (kind, path)
    "nothing is damaged": (),
    "no checkpoint is there": (("gone", "step-100"), ("gone", "step-90"), ("gone", "step-8")),
    "one bit is flipped": (("flip", "step-100/rank-1.pt"),),
    "a file is cut off": (("cut", "step-100/rank-0.pt"),),
    "a file is missing": (("gone", "step-100/rank-1.pt"),),
    "two shards are swapped": (("swap", "step-100"),),
    "a manifest is cut off": (("cut", "step-100/manifest.json"),),
    "a manifest is missing": (("gone", "step-100/manifest.json"),),
    "step-8 was copied over step-100, so its manifest says step 8": (("copy", "step-100"),),
    "two are damaged": (("flip", "step-100/rank-0.pt"), ("digit", "step-90")),  # the last one of a digest
    "an older one is damaged than the newest, which is whole": (("flip", "step-8/rank-0.pt"),),
    "all are damaged": tuple(("flip", f"step-{n}/rank-0.pt") for n in (100, 90, 8)),
}


def write(folder: Path, step: int, num_files: int = 2, seed: int = 0) -> None:
    """Write a checkpoint of a few bytes with its manifest."""
    path = folder / f"step-{step}"
    path.mkdir()
    files = {f"rank-{rank}.pt": random.Random(f"{seed} {step} {rank}").randbytes(60) for rank in range(num_files)}
    for name, data in files.items():
        (path / name).write_bytes(data)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": digests}))


def spoil(folder: Path, kind: str, name: str) -> None:
    """Do one kind of damage."""
    path = folder / name
    if kind == "gone":
        for one in [path] if path.is_file() else [*path.iterdir()]:
            one.unlink()
        if path.is_dir():
            path.rmdir()
    elif kind == "swap":
        one, other = path / "rank-0.pt", path / "rank-1.pt"
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "digit":
        text = (path / "manifest.json").read_text().removesuffix('"}}')
        (path / "manifest.json").write_text(f'{text[:-1]}{"10"[text[-1] == "1"]}"}}}}')
    elif kind == "copy":
        for one in (folder / "step-8").iterdir():
            (path / one.name).write_bytes(one.read_bytes())
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-9] if kind == "cut" else bytes([data[0] ^ 4]) + data[1:])


def asked(
    fn: Callable[..., Any], steps: tuple[int, ...], damage: tuple[tuple[str, str], ...], seed: int = 0
) -> dict[str, Any]:
    """Write checkpoints, damage some, and return what fn finds, with names for paths."""
    with a_folder() as name:
        folder = Path(name)
        for age, step in enumerate(steps):
            write(folder, step, seed=seed)
            os.utime(folder / f"step-{step}", (10**9 - age, 10**9 - age))  # as after a copy: times say nothing
        for other in (".step-120", "step-110.partial"):
            (folder / other).mkdir()
        (folder / "latest").write_text("step-90")
        for one in damage:
            spoil(folder, *one)
        there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        found = fn(folder)
        gone = sorted({*there} ^ {str(path.relative_to(folder)) for path in folder.rglob("*")})
        if gone:
            return _told(f"changes the folder ({gone[0]})")
        if not isinstance(found, tuple | list) or len(found) != 2:
            return _told(f"returns {describe(found)}")
        if found[0] is not None and Path(found[0]).parent != folder:
            return _told(f"returns, for a path, {describe(found[0])}".replace(f"{name}/", ""))
        return _told("returns a path or None, and names", str(found[0] and Path(found[0]).name), found[1])


def _told(what: str, good: str = "None", damaged: Sequence[Any] = ()) -> dict[str, Any]:
    return {"what it does": what, "the newest that is whole": good, "what is damaged": [str(one) for one in damaged]}


def _use_newest(fn: Callable[..., Any], damage: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Ask for the newest good checkpoint of a folder; where fn raises, keep what it raised."""
    try:
        return asked(fn, (8, 90, 100), damage)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = re.sub(r"[^'\" ]*/(?=\.?(step|latest))|\[Errno \d+\] ", "", str(error))  # a path from the folder on
        return _told(f"raises {type(error).__name__}: {text}"[:78])  # longer ones are not shown


drive_newest = Cases({words: (damage,) for words, damage in CASES.items()}, _use_newest)


def budget_newest(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(CASES)} folders: what is damaged is named, and the newest whole one is taken"]


def _draw_newest(draw: Draw) -> tuple[Any, ...]:
    steps = tuple(sorted({draw.integer(1, 2000) for _ in range(draw.one_of(4, 1, 2))} | {8, 3000}))
    kinds = [draw.one_of("flip", "cut", "gone") for _ in steps]
    damage = [(kind, f"step-{step}/rank-{draw.integer(0, 1)}.pt") for kind, step in zip(kinds, steps, strict=True)]
    return steps, tuple(damage[draw.integer(0, len(steps)) :]), draw.integer(0, 10**6)


vary_newest = Vary(_draw_newest, use=asked, num_calls=10)


def saved_shards(size: int, num_saved: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Return what the ranks saved of a row, whose filling is NaN, or 99 where the dtype has none."""
    length = -(-size // num_saved)
    row = torch.full((length * num_saved,), torch.nan if dtype.is_floating_point else 99, dtype=dtype)
    row[:size] = (8 * seeded(seed, size, purpose="row")).to(dtype)
    return list(row.split(length)) if length else [row] * num_saved


def _use_load(
    fn: Callable[..., Any], size: int, num_saved: int, num_now: int, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    """Let every new rank load its shard; return the shards, and how much of what was saved each rank read."""
    shards, length = saved_shards(size, num_saved, dtype, seed), -(-size // num_now)
    found: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for rank in range(num_now):
        new = torch.full((length,), 77, dtype=dtype)
        seen: list[int] = []

        def read(saved: int, start: int, stop: int, seen: list[int] = seen) -> Tensor:
            if not (0 <= saved < num_saved and 0 <= start <= stop <= len(shards[saved])):
                raise ValueError(
                    f"read({saved}, {start}, {stop}): each of {num_saved} ranks saved {-(-size // num_saved)} elements,"
                    " and start and stop count from the beginning of its shard"
                )
            seen.append(int(stop) - int(start))
            return shards[saved][start:stop].clone()

        fn(new, size, num_saved, rank, read)
        found[f"rank {rank}'s shard"] = new
        counts[f"number of elements that rank {rank} reads"] = sum(seen)
        counts[f"number of rank {rank}'s reads of nothing"] = seen.count(0)
    return found | counts


SIZES = ((24, 4, 4), (24, 4, 2), (24, 2, 4), (24, 4, 3), (23, 3, 4), (10, 4, 8), (10, 6, 4), (7, 8, 3))


drive_load = Cases(
    {
        f"{size} elements, saved by {old} ranks, loaded by {new}": (size, old, new, torch.float64, 0)
        for size, old, new in SIZES
    },
    _use_load,
)


def budget_load(evidence: Evidence) -> list[str]:
    """Say what was read."""
    made = [run["result"] for run in evidence.results[0].values()]
    amount = sum(count for one in made for name, count in one.items() if name.startswith("number of elements"))
    return [f"{amount} elements read for {sum(size for size, _, _ in SIZES)}: each once"]


def _draw_load(draw: Draw) -> tuple[Any, ...]:
    dtype = draw.dtype("float32", "float64", "bfloat16", "int64")
    return (
        draw.one_of(draw.integer(20, 200), draw.integer(1, 9)),
        draw.integer(1, 9),
        draw.integer(1, 9),
        dtype,
        draw.integer(0, 99),
    )


vary_load = Vary(_draw_load, use=_use_load, num_calls=16)

_LOOP = "for saved in range(num_saved):"
_READ = "shard[start - low : stop - low] = read(saved, start - saved * old, stop - saved * old)"
_PART = "read the part of a saved shard that lies in the new one"
WRONG_LOAD = (
    Mutant("whole shards", "too much read", f"it reads whole shards; {_PART}, if any", 1).edit(
        "read(saved, start - saved * old, stop - saved * old)",
        "read(saved, 0, old)[start - saved * old : stop - saved * old]",
    ),
    Mutant("all shards", "all read", f"each rank reads all that was saved; {_PART}, if any", 1)
    .edit(_LOOP, f"whole = torch.cat([read(saved, 0, old) for saved in range(num_saved)])\n{_LOOP}")
    .edit("read(saved, start - saved * old, stop - saved * old)", "whole[start:stop]"),
    Mutant("empty parts", "nothing read", f"it reads 0 elements of a shard; {_PART}, if any", 1).edit(
        "if start < stop:", "if start <= stop:"
    ),
    Mutant("places of the row", "raised", "ranks saved 6 elements", 1).edit(
        "start - saved * old, stop - saved * old", "start, stop"
    ),
    Mutant(
        "own shard", "one shard", "it reads one saved shard alone; others may have a part of the new one", 1, 45
    ).edit(_LOOP, "for saved in [min(rank, num_saved - 1)]:"),
    Mutant("rounded down", "rounded down", "saved shards are rounded up: -(-size // num_saved) elements each", 1).edit(
        "-(-size // num_saved)", "size // num_saved"
    ),
    Mutant(
        "the filling too", "filling", "it reads filling: a saved shard may be longer than what is left of the row", 1
    ).edit("min((rank + 1) * length, size)", "(rank + 1) * length"),
    Mutant(
        "not zeroed", "not zeroed", "what was in the shard stands behind the row's end; shard.zero_() first", 1
    ).without("shard.zero_()"),
    Mutant("another tensor", "not filled", "the shard is as it was; fill it in place, shard[...] = read(...)", 1).edit(
        "shard.zero_()", "shard = torch.zeros_like(shard)"
    ),
    Mutant(
        "from the left", "from the left", "each part goes to its place, start - rank x length, not to the left", 1
    ).edit(_READ, _READ.replace("start - low : stop - low", ": stop - start")),
    Mutant(
        "from the start", "from the start", "it reads a saved shard from its start: begin at start - saved * old", 1
    ).edit("read(saved, start - saved * old, stop - saved * old)", "read(saved, 0, stop - start)"),
    Mutant("two", "two", "it reads two saved shards; more of them may have a part of the new one", 1).edit(
        "range(num_saved)", "range(low // old, min(low // old + 2, num_saved))"
    ),
)
