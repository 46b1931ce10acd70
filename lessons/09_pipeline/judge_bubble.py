"""Name what is wrong with a closed form of the bubble."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

from distlab_lesson_09 import cases

from distlab.grading import Evidence, Fault
from distlab.grading.values import describe


def judge_bubble(evidence: Evidence) -> Iterator[Fault]:
    """Idle over total, with stages that get smaller when a rank has several."""
    for (p, m, v), got in zip(cases.BUBBLE_CASES, evidence.results[0], strict=True):
        asked = f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}, {v} stage{'s' * (v > 1)} a rank"
        if isinstance(got, bool) or not isinstance(got, Real):
            yield Fault("returned", f"{asked}: expected a number, got {describe(got)}")
            return
        number, want = float(got), (p - 1) / (v * m + p - 1)
        if abs(number - want) <= 1e-9:
            continue
        text = f"{asked}: expected {want:.4f}, got {number:.4f}"
        for code, (wrong, words) in wrong_forms(p, m, v).items():
            if abs(number - wrong) <= 1e-9:
                yield Fault(code, f"{text}: {words}")
                return
        yield Fault("values", text)
        return


def wrong_forms(p: int, m: int, v: int) -> dict[str, tuple[float, str]]:
    """Return what other formulas give, and what to say of each."""
    want, grows = (p - 1) / (v * m + p - 1), "idle time does not grow with stages a rank, it shrinks"
    return {
        "idle over busy": ((p - 1) / (v * m), "that is idle time over busy time; divide by the sum of both"),
        "busy": (1 - want, "that is the part which is busy"),
        "stages a rank": ((p - 1) / (m + p - 1), "several stages a rank divide the idle time: a stage is smaller"),
        "old total": ((p - 1) / v / (m + p - 1), "less idle time makes the total shorter too: divide by the new total"),
        "off by one": (p / (v * m + p), "p ranks are p - 1 hand-overs away from each other"),
        "stages as ranks": ((v * p - 1) / (m + v * p - 1), grows),
        "stages as ranks too": ((v * p - 1) / (v * m + v * p - 1), grows),
        "naive": (1 - 1 / p, "that is one micro-batch; with more, ranks work at the same time"),
        "per cent": (100 * want, "that is per cent; return a part of 1"),
    }


def budget_bubble(evidence: Evidence) -> list[str]:
    """Say how many cases were asked."""
    return [f"{len(cases.BUBBLE_CASES)} cases; 4 ranks and 1 micro-batch idle {float(evidence.results[0][0]):.0%}"]
