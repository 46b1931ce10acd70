"""What judges share: look at every rank's result, and yield what is wrong.

Only the first fault that a judge yields is told, and nothing after it is computed. So a judge yields the most telling
fault first, and needs no `return` behind a `yield`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distlab.course.grading.exercise import Evidence, Fault


def found(*looked: Fault | None) -> Iterator[Fault]:
    """Yield the faults among what was found."""
    yield from (fault for fault in looked if fault is not None)


def each_rank(
    evidence: Evidence | Sequence[Any], look: Callable[[int, Any], Fault | Iterator[Fault] | None]
) -> Iterator[Fault]:
    """Yield what is wrong rank by rank.

    Args:
        evidence: a run, or a result of each rank.
        look: takes a rank and its result; returns a fault or None, or yields faults.
    """
    for rank, result in enumerate(evidence.results if isinstance(evidence, Evidence) else evidence):
        answer = look(rank, result)
        if isinstance(answer, Fault):
            yield answer
        elif answer is not None:
            yield from answer
