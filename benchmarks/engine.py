"""The simulator's speed: a large pipeline, planned and simulated exactly; any order of it; a whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from distlab.measure.ratio import Row, absolute, format_rows
from distlab.plan import Plan, Schedule, gpipe, one_f_one_b
from simulator import CompiledOrder, cluster, gpt_workload, order_of, simulate
from simulator.pipeline import F

STAGES, MICROBATCHES = 64, 1024
FORWARD_NS, BACKWARD_NS, MESSAGE_NS = 1_000_000, 2_000_000, 30_000


def _times_ms(program: Callable[[], object], repeats: int) -> list[float]:
    program()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        program()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _plan_and_run(make: Callable[[int, int], Schedule]) -> int:
    order = order_of(make(STAGES, MICROBATCHES))
    duration = np.where(order.kind == F, FORWARD_NS, BACKWARD_NS)
    return int(CompiledOrder(order).run(duration, MESSAGE_NS).max())


def _any_order() -> Schedule:
    """Return 1F1B with the first two micro-batches of rank 0 swapped everywhere: no closed form knows it."""
    schedule = one_f_one_b(STAGES, MICROBATCHES)
    swapped = np.where(schedule.microbatch < 2, 1 - schedule.microbatch, schedule.microbatch)
    rank, kind = schedule.rank, schedule.kind
    last = np.flatnonzero((rank == 0) & (kind == F))[-2:]
    order = np.arange(len(schedule))
    order[last] = order[last[::-1]]
    return Schedule.from_columns(
        stage=schedule.stage[order],
        kind=schedule.kind[order],
        microbatch=swapped[order],
        lengths=np.diff(schedule.offsets),
    )


def rows(quick: bool = False) -> Iterator[Row]:
    repeats = 3 if quick else 30
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        claim = f"{name}, {STAGES} stages x {MICROBATCHES} micro-batches, planned and simulated exactly"
        times = _times_ms(lambda make=make: _plan_and_run(make), repeats)
        yield absolute(claim, times, bar=10.0, unit="ms", note="131,072 actions; equal stages, messages of 30 us")
    schedule = _any_order()
    order = order_of(schedule)
    duration = np.random.default_rng(0).integers(FORWARD_NS, BACKWARD_NS, len(order.kind))
    times = _times_ms(lambda: CompiledOrder(order_of(schedule)).run(duration, MESSAGE_NS), repeats)
    yield absolute(
        f"any order, {STAGES} x {MICROBATCHES}, random durations, exactly",
        times,
        bar=150.0,
        unit="ms",
        note="levels by the frontier, no steady state to skip",
    )
    yield from _steps(repeats)


def _steps(repeats: int) -> Iterator[Row]:
    """One whole `simulate` call: costs, buckets, timing. It is no analytic estimate; shown beside the bar for one."""
    workload = gpt_workload(hidden_size=4096, num_layers=32, num_heads=32, sequence_length=2048, vocab_size=50257)
    machine = cluster("dgx-h100", 512)
    plan = Plan(data=8, pipeline=8, num_microbatches=32)
    for what, other in (("data parallel 8", replace(plan, pipeline=1, num_microbatches=1)), ("8 x 8 ranks", plan)):
        times = _times_ms(lambda other=other: simulate(workload, machine, other).duration_s, repeats)
        row = absolute(f"simulate(), GPT of 32 layers, {what}", times, bar=10.0, unit="ms")
        yield replace(
            row, bar="-", holds=None, note="information: an exact step, not the analytic estimate of a search"
        )
    trace = simulate(workload, cluster("dgx-h100", 1024), Plan(data=128, pipeline=8, num_microbatches=64))
    start = time.perf_counter()
    spans = len(trace.trace)
    yield absolute(
        "the Trace of 1,024 ranks",
        [time.perf_counter() - start],
        bar=5.0,
        unit="s",
        note=f"{spans:,} spans",
    )


def main() -> None:
    print(format_rows(list(rows())))


if __name__ == "__main__":
    main()
