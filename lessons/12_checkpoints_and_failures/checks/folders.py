"""A folder of checkpoints in which some are damaged, and shards that another number of ranks reads."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distlab_lesson_12.checks.disk import a_folder
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import compare, describe, seeded
from distlab.grading.variation.draw import Draw, Vary


class Case(NamedTuple):
    """Damage to some checkpoints, and what must be found."""

    words: str
    damage: tuple[tuple[str, str], ...]  # (kind, path)
    good: str | None
    damaged: tuple[str, ...]


CASES = (
    Case("nothing is damaged", (), "step-100", ()),
    Case("no checkpoint is there", (("gone", "step-100"), ("gone", "step-90"), ("gone", "step-8")), None, ()),
    Case("one bit is flipped", (("flip", "step-100/rank-1.pt"),), "step-90", ("step-100/rank-1.pt",)),
    Case("a file is cut off", (("cut", "step-100/rank-0.pt"),), "step-90", ("step-100/rank-0.pt",)),
    Case("a file is missing", (("gone", "step-100/rank-1.pt"),), "step-90", ("step-100/rank-1.pt",)),
    Case("two shards are swapped", (("swap", "step-100"),), "step-90", ("step-100/rank-0.pt", "step-100/rank-1.pt")),
    Case("a manifest is cut off", (("cut", "step-100/manifest.json"),), "step-90", ("step-100/manifest.json",)),
    Case("a manifest is missing", (("gone", "step-100/manifest.json"),), "step-90", ("step-100/manifest.json",)),
    Case(
        "step-8 was copied over step-100, so its manifest says step 8",
        (("copy", "step-100"),),
        "step-90",
        ("step-100/manifest.json",),
    ),
    Case(
        "two are damaged",
        (("flip", "step-100/rank-0.pt"), ("digit", "step-90")),  # the last one of a digest
        "step-8",
        ("step-100/rank-0.pt", "step-90/rank-1.pt"),
    ),
    Case("an older one is damaged than the newest, which is whole", (("flip", "step-8/rank-0.pt"),), "step-100", ()),
    Case(
        "all are damaged",
        tuple(("flip", f"step-{n}/rank-0.pt") for n in (100, 90, 8)),
        None,
        tuple(f"step-{n}/rank-0.pt" for n in (100, 90, 8)),
    ),
)


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


def asked(fn: Callable[..., Any], steps: tuple[int, ...], damage: tuple[tuple[str, str], ...], seed: int = 0) -> Any:
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
            return f"it changes the folder ({gone[0]}): who looks for a checkpoint removes none, and makes none"
        if not isinstance(found, tuple | list) or len(found) != 2:
            return f"expected (path or None, list of names), got {describe(found)}"
        if found[0] is not None and Path(found[0]).parent != folder:
            return f"expected the checkpoint's path, got {describe(found[0])}".replace(f"{name}/", "")
        return (None if found[0] is None else Path(found[0]).name), [str(one) for one in found[1]]


def drive_newest(fn: Callable[..., Any]) -> list[Any]:
    """Ask for the newest good checkpoint of each folder; where it raises, keep what it raised."""
    results = []
    for case in CASES:
        try:
            results.append(asked(fn, (8, 90, 100), case.damage))
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = re.sub(r"[^'\" ]*/(?=\.?(step|latest))", "", str(error))  # a path from the folder of checkpoints on
            results.append(f"it raised {type(error).__name__}: {text}"[:200])
    return results


def judge_newest(evidence: Evidence) -> Iterator[Fault]:
    """The newest whole one by its number, and every damaged file by its name."""
    for case, got in zip(CASES, evidence.results[0], strict=True):
        if isinstance(got, str):
            code = "raised" if got.startswith("it raised") else "returned"
            advice = "; name what is damaged, and take an older one" if code == "raised" else ""
            yield Fault(code, f"{case.words}: {got}{advice}")
        good, damaged = got
        if good is None and not case.damage:
            text = (
                f"step-8, step-90 and step-100 are all whole, and it takes none ({', '.join(damaged) or 'no file'} is"
            )
            yield Fault("false alarm", f"{text} called damaged): compare with the SHA-256 of the file's bytes, in hex")
        if good != case.good and not case.damage:
            text = f"of step-8, step-90 and step-100 it takes {good}"
            yield Fault("not the newest", f"{text}: the highest number counts, not the text's order, not a file's time")
        if good is not None and case.good is not None and int(good[5:] or 0) > int(case.good[5:]):
            yield Fault("not seen", f"{case.words} ({', '.join(case.damaged)}), and it takes {good}; take {case.good}")
        if good is not None and case.good is None:
            yield Fault("not seen", f"{case.words}, and it takes {good}; expected None: no checkpoint is whole")
        if good != case.good:
            yield Fault("gave up", f"{case.words}, and it returns {good}; {case.good} is whole")
        if sorted(damaged) != sorted(case.damaged):
            text = f"{case.words}: damaged are {', '.join(case.damaged) or 'none'}; got {', '.join(damaged) or 'none'}"
            newer = "" if good is None else f" in checkpoints that are newer than {good}"
            yield Fault("names", f"{text}. Name each damaged file{newer}, and no other")
        if damaged != list(case.damaged):
            yield Fault("order", f"{case.words}: the newest checkpoint's first, {list(case.damaged)}; got {damaged}")


def budget_newest(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"{len(CASES)} folders: what is damaged is named, and the newest whole one is taken"]


def _draw_newest(draw: Draw) -> tuple[Any, ...]:
    steps = tuple(sorted({draw.integer(1, 2000) for _ in range(draw.one_of(4, 1, 2))} | {8, 3000}))
    kinds = [draw.one_of("flip", "cut", "gone") for _ in steps]
    damage = [(kind, f"step-{step}/rank-{draw.integer(0, 1)}.pt") for kind, step in zip(kinds, steps, strict=True)]
    return steps, tuple(damage[draw.integer(0, len(steps)) :]), draw.integer(0, 10**6)


NEWEST = Vary(_draw_newest, use=asked, num_calls=10)


def saved_shards(size: int, num_saved: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Return what the ranks saved of a row, whose filling is NaN, or 99 where the dtype has none."""
    length = -(-size // num_saved)
    row = torch.full((length * num_saved,), torch.nan if dtype.is_floating_point else 99, dtype=dtype)
    row[:size] = (8 * seeded(seed, size, purpose="row")).to(dtype)
    return list(row.split(length)) if length else [row] * num_saved


def resharded(fn: Callable[..., Any], size: int, num_saved: int, num_now: int, dtype: torch.dtype, seed: int) -> Any:
    """Let every new rank load its shard; return the shards, and for each rank what it read."""
    shards, reads, length = saved_shards(size, num_saved, dtype, seed), [], -(-size // num_now)
    found = []
    for rank in range(num_now):
        new = torch.full((length,), 77, dtype=dtype)
        seen: list[list[int]] = []

        def read(saved: int, start: int, stop: int, seen: list[list[int]] = seen) -> Tensor:
            if not (0 <= saved < num_saved and 0 <= start <= stop <= len(shards[saved])):
                raise ValueError(
                    f"read({saved}, {start}, {stop}): each of {num_saved} ranks saved {-(-size // num_saved)} elements,"
                    " and start and stop count from the beginning of its shard"
                )
            seen.append([int(saved), int(start), int(stop)])
            return shards[saved][start:stop].clone()

        fn(new, size, num_saved, rank, read)
        found.append(new)
        reads.append(sorted(seen))
    return {"shards": found, "reads": reads}


SIZES = ((24, 4, 4), (24, 4, 2), (24, 2, 4), (24, 4, 3), (23, 3, 4), (10, 4, 8), (10, 6, 4), (7, 8, 3))


def drive_load(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Load rows of several lengths, saved by some ranks, on others."""
    return [resharded(fn, *sizes, torch.float64, 0) for sizes in SIZES]


def judge_load(evidence: Evidence) -> Iterator[Fault]:
    """Every element in its place, zeros behind the end, and nothing read in vain."""
    for (size, num_saved, num_now), result in zip(SIZES, evidence.results[0], strict=True):
        length = -(-size // num_now)
        row = torch.cat([*saved_shards(size, num_saved)])[:size]
        row = torch.cat([row, row.new_zeros(length * num_now - size)])
        for rank, (got, reads) in enumerate(zip(result["shards"], result["reads"], strict=True)):
            want = row[rank * length : (rank + 1) * length]
            what = f"{size} elements, saved by {num_saved} ranks, loaded by {num_now}: rank {rank}"
            if bool((got == 77).all()) and length:
                yield Fault("not filled", f"{what}'s shard is as it was: fill it in place, shard[...] = read(...)")
            tail = max(0, min(length, (rank + 1) * length - size))
            if tail and not torch.equal(got[length - tail :], want[length - tail :]):
                text = f"{what} has {got[-1]:.3g} behind the end of the row, expected {tail} zeros there"
                yield Fault("filling", f"{text}; shard.zero_() first, and read no further than the row's end")
            fault = compare(got, want, f"{what}'s shard")
            if fault is not None:
                yield Fault(fault.code, f"{fault.message} (it read (rank, start, stop): {reads})")
            amount, needed = sum(stop - start for _, start, stop in reads), length - tail
            if amount > needed or any(start == stop for _, start, stop in reads):
                text = f"{what} needs {needed} elements and read {amount}, in {len(reads)} reads: {reads}"
                yield Fault("too much read", f"{text}. Read the part of a saved shard that lies in the new one, if any")


def budget_load(evidence: Evidence) -> list[str]:
    """Say what was read."""
    amount = sum(stop - start for run in evidence.results[0] for reads in run["reads"] for _, start, stop in reads)
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


def _use_load(fn: Callable[..., Any], *given: Any) -> dict[str, Any]:
    found = resharded(fn, *given)
    return found | {"reads": [sum(stop - start for _, start, stop in reads) for reads in found["reads"]]}


LOAD = Vary(_draw_load, use=_use_load, num_calls=16)

_LOOP = "for saved in range(num_saved):"
_READ = "shard[start - low : stop - low] = read(saved, start - saved * old, stop - saved * old)"
WRONG_LOADS = (
    Mutant("whole shards", "too much read", "the part of a saved shard", 1).edit(
        "read(saved, start - saved * old, stop - saved * old)",
        "read(saved, 0, old)[start - saved * old : stop - saved * old]",
    ),
    Mutant("all shards", "too much read", "the part of a saved shard", 1)
    .edit(_LOOP, f"whole = torch.cat([read(saved, 0, old) for saved in range(num_saved)])\n{_LOOP}")
    .edit("read(saved, start - saved * old, stop - saved * old)", "whole[start:stop]"),
    Mutant("empty parts", "too much read", "if any", 1).edit("if start < stop:", "if start <= stop:"),
    Mutant("places of the row", "raised", "ranks saved 6 elements", 1).edit(
        "start - saved * old, stop - saved * old", "start, stop"
    ),
    Mutant("own shard", "values", "it read", 1, 45).edit(_LOOP, "for saved in [min(rank, num_saved - 1)]:"),
    Mutant("rounded down", "values", "it read", 1).edit("-(-size // num_saved)", "size // num_saved"),
    Mutant("the filling too", "filling", "no further than the row's end", 1).edit(
        "min((rank + 1) * length, size)", "(rank + 1) * length"
    ),
    Mutant("not zeroed", "filling", "expected", 1).without("shard.zero_()"),
    Mutant("another tensor", "not filled", "fill it in place", 1).edit(
        "shard.zero_()", "shard = torch.zeros_like(shard)"
    ),
    Mutant("from the left", "values", "it read", 1).edit(
        _READ, _READ.replace("start - low : stop - low", ": stop - start")
    ),
)
