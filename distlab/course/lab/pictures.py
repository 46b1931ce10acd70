"""What --trace leaves: each rank's trace, all of them merged for Chrome and Perfetto, and a picture of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.trace import Trace, load_folder, rank_file, write_chrome

WAIT_S = 30.0


@dataclass(frozen=True)
class StepWindow:
    """The time that the picture shows.

    Attributes:
        ranks_ns: start and end of each rank's step, on its own clock.
        predicted: what a simulator said that this step would be, or None.
        title: the takeaway; "" lets the picture find its own.
    """

    ranks_ns: Sequence[tuple[int, int]]
    predicted: Trace | None
    title: str


def write_pictures(folder: Path, num_ranks: int, window: StepWindow | None) -> Iterator[str]:
    """Merge the ranks' traces once they are saved, draw them, and yield a line for each file.

    Rank 0 calls it after the group has ended. Ranks of other machines save on those machines: then their files have to
    be brought together first.
    """
    missing = _wait_for_files(folder, num_ranks)
    if missing:
        yield f"{folder} holds no trace of ranks {missing}: copy theirs here, then use distlab.trace.load_folder"
        return
    merged = load_folder(folder)
    predicted = None if window is None else window.predicted
    traces = {"measured": merged} | ({} if predicted is None else {"predicted": predicted})
    yield f"Saved {write_chrome(folder / 'timeline.json', **traces)}: open it at ui.perfetto.dev or chrome://tracing"
    shown = merged if window is None else cut(merged, window.ranks_ns)
    if not len(shown):
        yield "No call was recorded in the chosen step, so there is no picture."
        return
    from simulator.viz import draw_timeline

    picture = folder / "timeline.png"
    drawn = draw_timeline(shown, predicted, title=None if window is None else window.title or None)
    drawn.figure.savefig(picture, dpi=150)
    yield f"Saved {picture}"


def cut(trace: Trace, ranks_ns: Sequence[tuple[int, int]]) -> Trace:
    """Keep each rank's spans between its start and its end, except the lane "wait": calls show it already."""
    parts = []
    for rank, (start_ns, end_ns) in enumerate(ranks_ns):
        inside = (trace.rank == rank) & (trace.start_ns >= start_ns) & (trace.end_ns <= end_ns)
        parts.append(trace.select(inside & ~trace.is_word("lane", "wait")))
    return Trace.concatenate(parts)


def _wait_for_files(folder: Path, num_ranks: int) -> list[int]:
    """Wait until every rank has saved its trace; return those that have not."""
    deadline = time.monotonic() + WAIT_S
    while True:
        missing = [rank for rank in range(num_ranks) if not rank_file(folder, rank).is_file()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)
