"""Many schedules, many sizes: the figures behind the pictures of bubble, micro-batches and memory."""

from __future__ import annotations

from collections.abc import Sequence

from distlab.plan import SCHEDULES, ActionTimes, make_schedule
from simulator.viz.schedules.run import ScheduleRun, run_schedule

EQUAL = ActionTimes(1.0, 1.0, 1.0)
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHOWN = ("naive", "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v")
NAMES = tuple(SCHEDULES)
COPIES = " (two copies of the model)"  # which the peak of activations does not show
PIPELINED = tuple(name for name in NAMES[1:] if SCHEDULES[name].placement != "copies")  # what one model can run


def play(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 2,
    times: ActionTimes = EQUAL,
    memory_limit: float | None = None,
) -> ScheduleRun:
    """Plan and run a schedule; the times are of a rank's whole share of the model, cut evenly among its stages.

    Raises:
        ValueError: the name is not known, or there is no such schedule of this size.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(NAMES)}")
    stages = family.stages_per_rank(stages_per_rank if family.placement == "loop" else None)
    if stages > 1:
        forward, inputs, weights = (_share(part, stages) for part in times[:3])
        times = ActionTimes(forward, inputs, weights, times.communication)
    plan = make_schedule(
        name, num_ranks, num_microbatches, stages_per_rank=stages, times=times, memory_limit=memory_limit
    )
    return run_schedule(family.title + (COPIES if family.placement == "copies" else ""), plan, times)


def sweep_microbatches(
    num_ranks: int = 4,
    schedules: Sequence[str] = SHOWN,
    microbatches: Sequence[int] = MICROBATCHES,
    *,
    times: ActionTimes = EQUAL,
) -> dict[str, list[ScheduleRun]]:
    """Run each schedule with each number of micro-batches; the runs by name, leaving out sizes that it cannot have.

    Raises:
        ValueError: there is no schedule or no number, or a schedule has none of the sizes.
    """
    if not schedules or not microbatches:
        raise ValueError("there is nothing to sweep; pass at least one schedule and one number of micro-batches")
    found: dict[str, list[ScheduleRun]] = {}
    for name in schedules:
        problem: ValueError | None = None
        for count in microbatches:
            try:
                run = play(name, num_ranks, count, times=times)
            except ValueError as error:
                problem = error
            else:
                found.setdefault(name, []).append(run)
        if name not in found:
            raise ValueError(f"{name} runs with none of these numbers of micro-batches; the last error: {problem}")
    return found


def sweep_memory(
    num_ranks: int = 4,
    num_microbatches: int = 16,
    schedules: Sequence[str] = PIPELINED,
    *,
    limits: Sequence[float] = (),
) -> tuple[dict[str, ScheduleRun], list[ScheduleRun]]:
    """Run each schedule, and the automatic one within each memory limit (by default 1 to 2 p micro-batches).

    Raises:
        ValueError: no schedule has this size.
    """
    found: dict[str, ScheduleRun] = {}
    for name in schedules:
        if name == "automatic":
            continue
        try:
            found[name] = play(name, num_ranks, num_microbatches)
        except ValueError as error:
            problem = error
    if not found:
        raise ValueError(f"no schedule has this size: {problem}" if schedules else "there is no schedule; pass one")
    steps = limits or range(max(1, num_ranks // 2), 2 * num_ranks + 1)
    curve = [play("automatic", num_ranks, num_microbatches, memory_limit=float(limit)) for limit in steps]
    return found, curve


def _share(part: float | Sequence[float], stages: int) -> float | list[float]:
    """Cut a rank's time among its stages; times given a stage stay as they are."""
    return part / stages if isinstance(part, int | float) else list(part)
