"""Every schedule by name: what it is called, how its stages lie on the ranks, whether it splits the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from distlab.plan.schedules.automatic import UNIT_TIMES, automatic, zb_1p, zb_2p
from distlab.plan.schedules.basic import gpipe, naive, one_f_one_b
from distlab.plan.schedules.grammar import ActionTimes, Schedule
from distlab.plan.schedules.turns import interleaved, interleaved_zero_bubble, looped_bfs, zb_h1, zb_h2
from distlab.plan.schedules.v_shaped import dualpipe_v, v_half, v_min, zb_v

Placement = Literal["one", "loop", "v"]


class Family(NamedTuple):
    """A kind of schedule.

    Attributes:
        name: what plans, programs and the command line call it: the name of its function.
        title: what people and pictures call it.
        make: its function, from numbers of ranks and of micro-batches (and what else it takes) to a Schedule.
        placement: stages on ranks: "one" stage per rank; in a "loop", stage s on rank s mod p; as a "v", stages s and
            2p - 1 - s on rank s.
        splits_backward: whether it has I and W.
    """

    name: str
    title: str
    make: Callable[..., Schedule]
    placement: Placement
    splits_backward: bool

    def stages_per_rank(self, wanted: int | None = None) -> int:
        """Return how many stages of a model each rank runs; `wanted` chooses where there is a choice, else it is 2.

        Raises:
            ValueError: this schedule has no such form.
        """
        if self.placement == "loop":
            return 2 if wanted is None else wanted
        needed = 2 if self.placement == "v" else 1
        if wanted not in (None, needed):
            loops = (name for name, family in SCHEDULES.items() if family.placement == "loop")
            raise ValueError(
                f"{self.name} needs {needed} stage{'s' * (needed > 1)} per rank, got stages_per_rank={wanted}; pass "
                f"stages_per_rank={needed}, or choose one of {', '.join(loops)}"
            )
        return needed

    def home(self, num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
        """Return the rank of each stage."""
        stages = range(num_ranks * stages_per_rank)
        if self.placement == "v":
            return tuple(min(stage, stages[-1] - stage) for stage in stages)
        return tuple(stage % num_ranks for stage in stages)


_FAMILIES = (
    Family("naive", "naive model parallelism", naive, "one", False),
    Family("gpipe", "GPipe", gpipe, "one", False),
    Family("one_f_one_b", "1F1B", one_f_one_b, "one", False),
    Family("interleaved", "interleaved 1F1B", interleaved, "loop", False),
    Family("looped_bfs", "looped BFS", looped_bfs, "loop", False),
    Family("zb_h1", "ZB-H1", zb_h1, "one", True),
    Family("zb_h2", "ZB-H2", zb_h2, "one", True),
    Family("zb_1p", "ZB-1p", zb_1p, "one", True),
    Family("zb_2p", "ZB-2p", zb_2p, "one", True),
    Family("automatic", "automatic zero bubble", automatic, "one", True),
    Family("interleaved_zero_bubble", "interleaved zero bubble", interleaved_zero_bubble, "loop", True),
    Family("zb_v", "ZB-V", zb_v, "v", True),
    Family("v_half", "V-Half", v_half, "v", True),
    Family("v_min", "V-Min", v_min, "v", True),
    Family("dualpipe_v", "DualPipeV", dualpipe_v, "v", True),
)
SCHEDULES = {family.name: family for family in _FAMILIES}
TIMED = ("zb_1p", "zb_2p", "automatic")  # those made for the times of their actions


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int | None = None,
    times: ActionTimes | None = None,
    memory_limit: float | None = None,
    held_after_input_gradient: float = 1.0,
) -> Schedule:
    """Plan a schedule by its name in SCHEDULES.

    Args:
        name: which one.
        num_ranks: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        stages_per_rank: where stages lie in a loop, how many each rank has (2 if not told); elsewhere what the schedule
            needs, if anything.
        times: what "zb_1p", "zb_2p" and "automatic" plan for; F = I = W with free communication if not told.
        memory_limit: of "automatic": micro-batches that a rank may hold; as many as 1F1B if not told.
        held_after_input_gradient: of "zb_2p": the part of a micro-batch's activations that stays from I to W.

    Raises:
        ValueError: an unknown name, a count below 1, or stages per rank that the schedule has no form for.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(SCHEDULES)}")
    stages = family.stages_per_rank(stages_per_rank)
    if family.placement == "loop":
        return family.make(num_ranks, num_microbatches, stages_per_rank=stages)
    options: dict[str, object] = {}
    if name in TIMED:
        options["times"] = UNIT_TIMES if times is None else times
    if name == "automatic":
        options["memory_limit"] = memory_limit
    if name == "zb_2p":
        options["held_after_input_gradient"] = held_after_input_gradient
    return family.make(num_ranks, num_microbatches, **options)
