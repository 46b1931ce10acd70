"""Units that are gathered, used and freed: what they compute with, and memory at the peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.diagnosis.memory import peak_bytes
from distlab.course.grading.diagnosis.traffic import in_megabytes, most_sent
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence

WIDTH, NUM_UNITS, SAMPLES = 48, 4, 2  # a unit has WIDTH x WIDTH parameters
UNIT = WIDTH * WIDTH
UNIT_BYTES, MODEL_BYTES = 8 * UNIT, 8 * UNIT * NUM_UNITS  # float64
PEAK_RUNS, SLEEP_S = 3, 0.004


@dataclass(frozen=True, eq=False)
class Measured:
    """Times and bytes of a run: they differ from run to run, so a comparison takes any two as equal.

    Attributes:
        run_ns: when the call with notes began and ended.
        computes_ns: when each unit began and ended to compute in it.
        peak: bytes at the peak of the other calls.
    """

    run_ns: tuple[int, int]
    computes_ns: list[tuple[int, int]]
    peak: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Measured)


def weights_of(unit: int) -> Tensor:
    """Return a unit's whole row of parameters."""
    return seeded(-1, UNIT, purpose=f"unit {unit}") / WIDTH**0.5


def shards_of(rank: int, n: int) -> list[Tensor]:
    """Return a rank's shard of each unit."""
    return [weights_of(unit).chunk(n)[rank].clone() for unit in range(NUM_UNITS)]


def forward_of(whole: Tensor, x: Tensor) -> Tensor:
    """Run a unit."""
    return torch.tanh(x @ whole.view(WIDTH, WIDTH))


def inputs_of(rank: int) -> list[Tensor]:
    """Return what each unit of a rank reads, and last what the last one gives."""
    found = [seeded(rank, SAMPLES, WIDTH, purpose="x")]
    for unit in range(NUM_UNITS):
        found.append(forward_of(weights_of(unit), found[-1]))
    return found


def _row_in_words(whole: Tensor, unit: int) -> str:
    """Say what a unit is given as its row."""
    if whole.numel() != UNIT:
        return f"{whole.numel()} of its {UNIT} elements"
    names = [f"the row of unit {other}" for other in range(NUM_UNITS)]
    names[unit] = "its whole row"
    known = (name for other, name in enumerate(names) if torch.equal(whole, weights_of(other)))
    right = int((whole == weights_of(unit)).sum())
    return next(known, f"a row of which {right} of {UNIT} elements are right")


def _settle(whole: Tensor) -> None:
    """Wait until the group's thread, which has filled a row, has freed it: it may do so a moment after the call."""
    end_s = time.monotonic() + 0.05
    while _is_held(whole) and time.monotonic() < end_s:
        time.sleep(0.0005)


def _is_held(whole: Tensor) -> bool:
    """Whether torch holds a row beside the one Python object; its memory as a view, or the tensor in a call."""
    return torch._C._storage_Use_Count(whole.untyped_storage()._cdata) > 2 or whole._use_count() > 1


def run_units(
    fn: Callable[..., Any], shards: list[Tensor], *args: Any, compute: Callable[..., Any], gives: str
) -> dict[str, Any]:
    """Run units once with a compute that takes notes, and then for the least peak of memory of three runs.

    What a function holds itself, it holds in each of the three. Units compute with the right row, whatever they get, so
    that one mistake has one trace. `gives` names what fn returns.
    """
    again, spare = [shard.clone() for shard in shards], weights_of(0)
    order, spans, rows = list[str](), list[tuple[int, int]](), dict.fromkeys(range(NUM_UNITS), "nothing")

    def noted(unit: int, whole: Tensor, *others: Tensor) -> Any:
        rows[unit] = _row_in_words(whole, unit)
        start_ns = time.monotonic_ns()
        time.sleep(SLEEP_S)  # long enough that a gather which was started before runs at the same time
        result = compute(unit, weights_of(unit), *others)
        order.append(str(unit))
        spans.append((start_ns, time.monotonic_ns()))
        return result

    def settled(unit: int, whole: Tensor, *others: Tensor) -> Any:
        _settle(whole)
        return compute(unit, whole if whole.numel() == UNIT else spare, *others)

    begin_ns = time.monotonic_ns()
    got = fn(shards, *args, noted)
    run_ns = (begin_ns, time.monotonic_ns())
    peak = min(peak_bytes(fn, [*again], *args, settled)[1] for _ in range(PEAK_RUNS))
    return {
        "the units that compute": ", ".join(order),
        **{f"unit {unit} computes with": row for unit, row in rows.items()},
        gives: got,
        "measured": Measured(run_ns, spans, peak),
    }


def measured(evidence: Evidence) -> list[Measured]:
    """Return what was measured on each rank."""
    return [result[""]["result"]["measured"] for result in evidence.results]


def budget_of_units(evidence: Evidence) -> list[str]:
    """Say what was sent and what was held at the peak."""
    peak, sent = max(one.peak for one in measured(evidence)), most_sent(evidence) / (1 + PEAK_RUNS)
    sizes = f"the model has {in_megabytes(MODEL_BYTES)}, a unit {in_megabytes(UNIT_BYTES)}"
    return [
        f"sent {in_megabytes(sent)} per rank; {sizes}",
        f"held {in_megabytes(peak)} more than the shards at the peak",
    ]
