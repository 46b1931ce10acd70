"""Files in, a profile out: traces of torch.profiler or of this project, of one rank or many.

Files of several ranks may have a clock each. The calls that the ranks made together bring them on one: no rank leaves a
collective before the last one has come, so each ends after the other has started. That gives two bounds for the
difference of two clocks, one from each rank's end. The bounds of all collectives leave an interval. Ranks leave a
collective at nearly the same time, so the median difference of ends counts where it lies in the interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distlab.comm.agree import ranks_in_words
from distlab.profile.kineto import events_of, is_kineto, read_rank
from distlab.profile.profile import Calls, Profile, calls_of
from distlab.profile.sections import windows_of
from distlab.trace import Trace, load_folder, read_chrome
from distlab.trace.chrome import load_events
from distlab.trace.span import TOGETHER

PREDICTED = "predicted"
SAME_NS = 1_000_000  # clocks this near are one clock, where the calls allow it
MOST_NAMED = 8  # of ranks without a trace, by number; of more ranks only how many they are
_RANK = re.compile(r"rank[\W_]*(\d+)", re.IGNORECASE)


class TracedRun(NamedTuple):
    """What a file says about its run.

    Attributes:
        world_size: how many ranks there were; 0: not said.
        host: where the file was written; "": not said.
        is_aligned: whether its ranks are on one clock.
    """

    world_size: int = 0
    host: str = ""
    is_aligned: bool = False


class Files(NamedTuple):
    """What files held: what was measured, and what was predicted for it, if a file says."""

    measured: Profile
    predicted: Profile | None


def read_files(paths: Sequence[str | Path]) -> Files:
    """Read the traces of a run: files of some ranks each, or folders of such files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file cannot be understood, two files are of one rank, or clocks cannot be aligned.
    """
    files = [file for path in paths for file in _files_in(Path(path))]
    if not files:
        raise ValueError("there is no trace to read; give the files, or the folder, in which the ranks saved theirs")
    parts: dict[int, tuple[Trace, Path]] = {}
    predicted, runs = None, []
    for path in files:
        traces, run = _read(path, free=len(parts))
        runs.append(run)
        told = traces.pop(PREDICTED, None)
        predicted = told if told is not None and len(told) else predicted
        trace = next(iter(traces.values()), Trace.from_spans([]))
        for rank in trace.ranks:
            if rank in parts:
                raise ValueError(
                    f"{parts[rank][1]} and {path} are both of rank {rank}; give one trace per rank, or name "
                    "the files rank0.json and rank1.json where two ranks have one process number"
                )
            parts[rank] = trace.select(trace.rank == rank), path
    if not parts:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise ValueError(f"{files[0]}{more} holds no spans of any rank; profile at least one step")
    joined = Trace.concatenate(parts[rank][0] for rank in sorted(parts))
    offsets: dict[int, Offset] = {}
    if len(files) > 1 or not runs[0].is_aligned:
        joined, offsets = align(joined, one_host=len({run.host for run in runs}) == 1 and runs[0].host != "")
    expected = max(run.world_size for run in runs)
    profile = Profile.of(joined, tuple(_notes(tuple(sorted(parts)), expected, offsets)))
    return Files(profile, None if predicted is None else Profile.of(predicted))


def _files_in(path: Path) -> list[Path]:
    """Return a file as it is, and of a folder the traces in it; a folder with clocks is one trace."""
    if not path.is_dir() or any(path.glob("rank*.trace.json.gz")):
        return [path]
    return sorted({*path.glob("*.json"), *path.glob("*.json.gz")})


def _read(path: Path, *, free: int) -> tuple[dict[str, Trace], TracedRun]:
    """Return the traces of a file by name, and what it says about its run; `free` is a rank that it may take."""
    if path.is_dir():
        return {"measured": load_folder(path)}, TracedRun(is_aligned=True)
    document, events = load_events(path)
    if not is_kineto(document, events):
        return read_chrome(path), TracedRun(is_aligned=True)
    told = document.get("distributedInfo") if isinstance(document, dict) else None
    told = told if isinstance(told, dict) else {}
    rank, world_size = told.get("rank"), told.get("world_size")
    if type(rank) is not int or rank < 0:
        named = _RANK.search(path.name)
        rank = int(named[1]) if named else free
    run = TracedRun(world_size if type(world_size) is int else 0, str(document.get("host_name", "")) if told else "")
    try:
        return {"measured": read_rank(events_of(document, events), rank, run.world_size)}, run
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _notes(ranks: tuple[int, ...], world_size: int, offsets: dict[int, Offset]) -> Iterator[str]:
    if missing := {*range(world_size)} - {*ranks}:
        who = ranks_in_words(missing) if len(missing) <= MOST_NAMED else f"{len(missing):,} ranks"
        verb = "has" if len(missing) == 1 else "have"
        yield f"{who} of {world_size:,} {verb} no trace here and {verb} not been looked at"
    if len(ranks) == 1:
        yield f"this is rank {ranks[0]} alone: whether it waits for bytes or for other ranks cannot be told"
    for rank, offset in offsets.items():
        who = f"rank {rank}'s clock"
        if not offset.num_calls:
            yield f"{who} is taken to be rank {ranks[0]}'s: they share no collective on which to align it"
        elif offset.add_ns:
            ahead = "ahead of" if offset.add_ns < 0 else "behind"
            yield (
                f"{who} was {abs(offset.add_ns) / 1e9:.6g} s {ahead} rank {ranks[0]}'s; it was aligned on "
                f"{offset.num_calls} collectives, to {offset.error_ns / 1e6:.3g} ms"
            )


class Offset(NamedTuple):
    """What to add to a rank's times, how many calls say so, and how far it can be off; all in nanoseconds."""

    add_ns: int
    num_calls: int
    error_ns: int


def align(trace: Trace, *, one_host: bool = False) -> tuple[Trace, dict[int, Offset]]:
    """Move every rank's times to the clock of the first rank, where they are not on it already.

    Args:
        trace: all ranks, each on its own clock.
        one_host: the ranks share a clock, unless their calls rule that out.

    Raises:
        ValueError: ranks share no collective and no time; or their collectives contradict each other, so that no
            constant difference of clocks explains them.
    """
    first, *others = trace.ranks
    calls = calls_of(trace, windows_of(trace))
    together = calls.take(calls.spans.is_word("kind", *TOGETHER) & (calls.number >= 0))
    offsets = {rank: _offset(trace, together, first, rank, one_host=one_host) for rank in others}
    moved = [trace.select(trace.rank == first)]
    moved += [trace.select(trace.rank == rank).shifted(offset.add_ns) for rank, offset in offsets.items()]
    return Trace.concatenate(moved), offsets


def _offset(trace: Trace, calls: Calls, first: int, rank: int, *, one_host: bool) -> Offset:
    both = (calls.take(calls.spans.rank == one) for one in (first, rank))
    columns = ((one.number.tolist(), one.spans.start_ns, one.spans.end_ns) for one in both)
    mine, theirs = ({number: times for number, *times in zip(*each, strict=True)} for each in columns)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return _without_calls(trace, first, rank)
    start, end = np.array([mine[number] for number in common]).T
    its_start, its_end = np.array([theirs[number] for number in common]).T
    low, high = int((start - its_end).max()), int((end - its_start).min())
    if low > high:
        # a few calls may have been matched wrongly, or their ends been seen late: the middle half has to agree
        low, high = int(np.percentile(start - its_end, 75)), int(np.percentile(end - its_start, 25))
    if low > high:
        raise ValueError(
            f"the clocks of rank {first} and rank {rank} cannot be aligned: their {len(common)} common collectives "
            f"contradict each other by {(low - high) / 1e6:.3g} ms; are these traces of the same run, and of the same "
            "steps?"
        )
    apart, (least, most) = int(np.median(end - its_end)), np.percentile(end - its_end, (10, 90)).tolist()
    if low <= 0 <= high and (one_host or abs(apart) < SAME_NS or least <= 0 <= most):
        return Offset(0, len(common), 0)
    add = min(max(apart, low), high)
    return Offset(add, len(common), max(high - add, add - low))


def _without_calls(trace: Trace, first: int, rank: int) -> Offset:
    """Take the clocks as one where the ranks' times overlap."""
    spans = [trace.select(trace.rank == one) for one in (first, rank)]
    starts, ends = [int(one.start_ns.min()) for one in spans], [int(one.end_ns.max()) for one in spans]
    if max(starts) >= min(ends):
        apart_s = (max(starts) - min(ends)) / 1e9
        raise ValueError(
            f"rank {rank}'s trace has a different clock than rank {first}'s (they are {apart_s:.3g} s apart), and no "
            "collective to align them on; give traces of the same steps of one run, with their collectives"
        )
    return Offset(0, 0, 0)
