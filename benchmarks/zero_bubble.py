"""The automatic zero-bubble search: bubble rates beside the published ones, and the time that a search takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from distlab.measure import Row, absolute, format_rows
from distlab.plan import SCHEDULES, automatic
from simulator import simulate_schedule
from simulator.pipeline.simulate_schedule import ActionTimes
from simulator.published_bubbles import BUBBLE_TABLE, BubbleCell, bubble_rate

BY_HAND = ("one_f_one_b", "zb_h1", "zb_h2")
ALLOWED = 0.0001


def rows(quick: bool = False) -> Iterator[Row]:
    for cell in BUBBLE_TABLE[:: 5 if quick else 1]:
        for name, published in cell.rates.items():
            yield _rate(cell, name, published)
    repeats = 1 if quick else 10
    for limit in (64, 128):
        times = [_search_s(limit) for _ in range(repeats)]
        claim = f"automatic zero bubble for 64 stages x 1,024 micro-batches within {limit}"
        yield absolute(claim, times, bar=1.0, unit="s", note="196,608 actions; the steady state is tiled")


def _rate(cell: BubbleCell, name: str, published: float) -> Row:
    size = (cell.ranks, cell.microbatches)
    if name in BY_HAND:
        schedule, bar = SCHEDULES[name].make(*size), "equal to 4 decimals"
    else:
        held, limit = (1.0, cell.ranks) if name == "zb_1p" else (cell.held_after_input_gradient, 2 * cell.ranks)
        schedule = automatic(*size, cell.times, limit, held_after_input_gradient=held)
        bar = f"<= published + {ALLOWED}"
    ours = bubble_rate(simulate_schedule(schedule, cell.times))
    holds = abs(ours - published) <= 0.00005 + 1e-9 if name in BY_HAND else ours <= published + ALLOWED
    claim = f"bubble rate of {SCHEDULES[name].title}, {cell.model}, {cell.ranks} x {cell.microbatches}"
    note = "peer: arXiv:2401.10241 table 5; cost: the longest rank's own first start to last end"
    return Row(claim, ours, published, None, (ours, ours), "", bar, holds, note)


def _search_s(limit: float) -> float:
    start = time.perf_counter()
    automatic(64, 1024, ActionTimes(1.0, 1.0, 1.0, 0.05), limit)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(format_rows(list(rows())))
