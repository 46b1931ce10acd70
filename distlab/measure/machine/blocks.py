"""Programs that take turns: on a shared machine a slow moment must hit all programs that are compared, not one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MIN_BLOCKS = 20


def interleave(programs: Sequence[Callable[[], float]], blocks: int = MIN_BLOCKS) -> list[list[float]]:
    """Run the programs in turn, every second block in reverse order; each call returns its own time in seconds."""
    times: list[list[float]] = [[] for _ in programs]
    for block in range(blocks):
        order = range(len(programs)) if block % 2 == 0 else reversed(range(len(programs)))
        for index in order:
            times[index].append(programs[index]())
    return times
