"""The simulator's speed: large pipelines, planned and simulated exactly; any order; a whole step; the slope; torch."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from _blocks import seconds_of
from _rows import Row, absolute, single
from _script import run_script

from distlab.plan import SCHEDULES, ActionTimes, Cluster, Plan, Schedule, make_schedule, one_f_one_b
from simulator import CompiledSchedule, ModelDescription, arrays_of, cluster, gpt_workload, simulate, simulate_schedule
from simulator.gradients import buckets
from simulator.hardware import rank_layout
from simulator.pipeline.schedule_arrays import F
from simulator.step.timed import compile_family

STAGES, MICROBATCHES = 64, 1024
FORWARD_NS, BACKWARD_NS, MESSAGE_NS = 1_000_000, 2_000_000, 30_000
TIMES = ActionTimes(1.0, 1.0, 1.0, 0.03)  # ms
AUTOMATIC = ("zb_1p", "zb_2p")  # searched for the given times
BUILT_IN = (
    *("gpipe", "one_f_one_b", "interleaved", "looped_bfs", "zb_h1", "zb_h2"),
    *("naive", "interleaved_zero_bubble", "zb_v", "v_half", "v_min", "dualpipe_v"),
)
# What calls keep of plans.
KEPT = (compile_family, buckets._buckets, rank_layout._grid, rank_layout._rows, rank_layout._placements)
SLOPE = (10_000, 100_000, 1_000_000, 10_000_000)  # operations
# torch's names of its schedules, for its visualizer; sizes that it can draw in a moment.
TORCH = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble"}
TORCH_RANKS, TORCH_MICROBATCHES = 8, 64


def _times_ms(program: Callable[[], object], repeats: int) -> list[float]:
    program()
    return [1e3 * seconds_of(program) for _ in range(repeats)]


def _plan_and_run(name: str) -> float:
    """Plan 64 stages x 1,024 micro-batches and simulate them; nothing is kept from an earlier call."""
    per_rank = 2 if SCHEDULES[name].placement in ("loop", "v") else 1
    schedule = make_schedule(name, STAGES // per_rank, MICROBATCHES, stages_per_rank=per_rank, times=TIMES)
    return simulate_schedule(schedule, TIMES).duration_s


def _any_order() -> Schedule:
    """Return 1F1B with the first two micro-batches of rank 0 swapped everywhere: an order of no family."""
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
    yield from _families(repeats)
    schedule = _any_order()
    order = arrays_of(schedule)
    duration = np.random.default_rng(0).integers(FORWARD_NS, BACKWARD_NS, len(order.kind))
    times = _times_ms(lambda: CompiledSchedule(arrays_of(schedule)).run(duration, MESSAGE_NS), repeats)
    yield absolute(
        f"any order, {STAGES} x {MICROBATCHES}, random durations, exactly",
        times,
        bar=150.0,
        unit="ms",
        note="planned by no family: its levels are found by the frontier",
    )
    yield from _slope(SLOPE[:3] if quick else SLOPE)
    yield from _beside_torch(min(repeats, 5))
    yield from _steps(repeats)
    yield from _large(repeats)


def _families(repeats: int) -> Iterator[Row]:
    what = f"{STAGES} stages x {MICROBATCHES} micro-batches, planned and simulated exactly"
    for names, bar, note in (
        (BUILT_IN, 60.0, "nothing kept from before"),
        (AUTOMATIC, 1000.0, "searched for F = I = W and messages of 30 us"),
    ):
        for name in names:
            times = _times_ms(lambda name=name: _plan_and_run(name), min(repeats, 20 if bar < 100 else 5))
            yield absolute(f"{SCHEDULES[name].title}, {what}", times, bar=bar, unit="ms", note=note)
    schedule = make_schedule("zb_h1", STAGES, MICROBATCHES)
    times = _times_ms(lambda: _run_with_jitter(schedule), min(repeats, 5))
    yield absolute(
        "ZB-H1 with jitter, simulated exactly", times, bar=150.0, unit="ms", note="each action has its own duration"
    )


def _run_with_jitter(schedule: Schedule) -> int:
    """Run a schedule in which every action has a duration of its own."""
    order = arrays_of(schedule)
    durations = np.random.default_rng(0).integers(FORWARD_NS * 9 // 10, FORWARD_NS * 11 // 10, len(order.kind))
    return int(CompiledSchedule(order).run(durations, MESSAGE_NS).max())


def _slope(sizes: tuple[int, ...]) -> Iterator[Row]:
    """Time per operation when each action has its own duration, from ten thousand operations to ten million."""
    each = []
    for size in sizes:
        microbatches = size // (3 * STAGES)
        schedule = make_schedule("zb_h1", STAGES, microbatches)
        times_ms = _times_ms(lambda each=schedule: _run_with_jitter(each), 3)
        tracemalloc.start()
        _run_with_jitter(make_schedule("zb_h1", STAGES, microbatches))
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        each.append(min(times_ms) * 1e6 / len(schedule))
        note = f"{each[-1]:.0f} ns per operation, at most {peak_mib:.0f} MiB in arrays"
        yield single(f"{len(schedule):,} operations with jitter, simulated", times_ms, "ms", note=note)
    yield absolute(
        f"time per operation, {sizes[-1]:,} against {sizes[0]:,} operations",
        [each[-1] / each[0]],
        bar=2.0,
        unit="times",
        note="linear: no more than twice as long per operation",
    )


def _torch_lays_out(name: str, stages_per_rank: int) -> object:
    """Let torch plan a schedule and lay it out slot by slot; it prints, and stops at its REDUCE_GRAD, left out here."""
    from torch.distributed.pipelining._schedule_visualizer import add_schedule_op_spacing, get_schedule_ops

    with contextlib.redirect_stdout(io.StringIO()):
        ranks = get_schedule_ops(name, TORCH_RANKS, TORCH_MICROBATCHES, stages_per_rank)
        kept = [[each for each in rank if each and each.computation_type.name != "REDUCE_GRAD"] for rank in ranks]
        return add_schedule_op_spacing(kept)


def _beside_torch(repeats: int) -> Iterator[Row]:
    """Plan and lay out the same schedule as torch's own visualizer does; its slots are all equally long."""
    times = ActionTimes(1.0, 1.0, 1.0)
    for name, theirs in TORCH.items():
        per_rank = 1 if SCHEDULES[name].placement == "one" else 2

        def ours(name: str = name, per_rank: int = per_rank) -> float:
            schedule = make_schedule(name, TORCH_RANKS, TORCH_MICROBATCHES, stages_per_rank=per_rank)
            return simulate_schedule(schedule, times).duration_s

        def torchs(theirs: str = theirs, per_rank: int = per_rank) -> object:
            return _torch_lays_out(theirs, per_rank)

        claim = f"{SCHEDULES[name].title}, {TORCH_RANKS} ranks x {TORCH_MICROBATCHES}, over torch's visualizer's time"
        mine = _times_ms(ours, repeats)
        try:
            other = _times_ms(torchs, repeats)
        except RuntimeError as error:  # it does not know all of its own schedules
            yield single(claim, mine, "ms", note=f"ours alone; torch's stops: {error}")
            continue
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        note = f"{np.median(mine):.3g} ms and {np.median(other):.3g} ms"
        yield absolute(claim, ratios, bar=1.0, unit="times", note=note)


def _steps(repeats: int) -> Iterator[Row]:
    """One whole `simulate` call: costs, buckets, timing."""
    workload = gpt_workload(hidden_size=4096, num_layers=32, num_heads=32, sequence_length=2048, vocab_size=50257)
    machine = cluster("dgx-h100", 512)
    plan = Plan(data=8, pipeline=8, num_microbatches=32)
    for what, other in (("data parallel 8", replace(plan, pipeline=1, num_microbatches=1)), ("8 x 8 ranks", plan)):
        times = _times_ms(lambda other=other: simulate(workload, machine, other).duration_s, repeats)
        note = "information: an exact step, not the analytic estimate of a search"
        yield single(f"simulate(), GPT of 32 layers, {what}", times, "ms", note=note)
    trace = simulate(workload, cluster("dgx-h100", 1024), Plan(data=128, pipeline=8, num_microbatches=64))
    took = [seconds_of(lambda: trace.trace)]
    yield absolute("the Trace of 1,024 ranks", took, bar=5.0, unit="s", note=f"{len(trace.trace):,} spans")


def _large(repeats: int) -> Iterator[Row]:
    """GPT-3 175B on many devices: a plan that no cache knows, each of which is simulated as by `distlab simulate`."""
    workload = ModelDescription(model="gpt-3-175b").workload()
    for num_devices, data, microbatches, bar in (
        (1536, 16, 96, 5.0),
        (16384, 256, 64, 1000.0),
        (100352, 784, 64, 5000.0),
    ):
        plan = Plan(data=data, pipeline=num_devices // data // 8, tensor=8, num_microbatches=microbatches)
        machine = cluster("dgx-a100", num_devices)

        def fresh(plan: Plan = plan, machine: Cluster = machine) -> float:
            for kept in KEPT:
                kept.cache_clear()
            return simulate(workload, machine, plan).duration_s

        times = _times_ms(fresh, min(repeats, 10))
        yield absolute(f"a fresh plan of 175B on {num_devices:,} devices, simulated exactly", times, bar=bar, unit="ms")


if __name__ == "__main__":
    run_script(__doc__, rows)
