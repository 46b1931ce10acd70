"""The parts of `validate` that ask which rank runs what: one rank per stage, or one for each copy of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distlab.plan.schedules.check.fault import ScheduleError
from distlab.plan.schedules.grammar import F, Schedule


def check_ranks_of_stages(schedule: Schedule, copies: int) -> None:
    """Check that all actions of a stage are on one rank, or on as many as there are copies of the model."""
    width = schedule.num_ranks
    places, first = np.unique(schedule.stage.astype(np.int64) * width + schedule.rank, return_index=True)
    stage, rank = places // width, places % width
    many = np.flatnonzero(np.bincount(np.unique(stage, return_inverse=True)[1]) > copies)
    if not many.size:
        return
    mine = np.flatnonzero(stage == np.unique(stage)[many[0]])
    mine = mine[np.argsort(first[mine])]  # the ranks of the stage, in the order in which the schedule names them
    row, homes = int(first[mine[copies]]), rank[mine[:copies]].tolist()
    if copies == 1:
        expected, got = "on one rank", f"some on rank {homes[0]} and some on rank {schedule.rank[row]}"
    else:
        expected, got = f"on {copies} ranks, one for each copy", f"some on rank {schedule.rank[row]} too"
    raise ScheduleError(
        schedule,
        row,
        expected=f"all actions of stage {schedule.stage[row]} {expected}",
        got=got,
        advice=f"move this action to rank {' or '.join(map(str, homes))}",
    )


def check_copies(schedule: Schedule, copies: int) -> None:
    """Check that every micro-batch stays in one copy of the model, forward and backward.

    The schedule must run every forward pass once.
    """
    width, rank = schedule.num_microbatches, schedule.rank
    key = schedule.stage.astype(np.int64) * width + schedule.microbatch
    way = np.empty(schedule.num_stages * width, np.int64)
    forward = schedule.kind == F
    way[key[forward]] = rank[forward]
    strays = np.flatnonzero(way[key] != rank)
    if strays.size:
        row = int(strays[0])
        home, what = int(way[key[row]]), "its forward pass ran"
    else:
        found = _leaves_its_copy(way.reshape(-1, width), copies)
        if found is None:
            return
        stage, microbatch, home = found
        row = int(np.flatnonzero(forward & (schedule.stage == stage) & (schedule.microbatch == microbatch))[0])
        what = "the rest of its copy is"
    raise ScheduleError(
        schedule,
        row,
        expected=f"it on rank {home}, where {what}",
        got=f"it on rank {rank[row]}",
        advice=f"move it to rank {home}: a micro-batch goes through one copy of the model",
    )


def _leaves_its_copy(way: NDArray[np.int64], copies: int) -> tuple[int, int, int] | None:
    """Find a micro-batch that goes a way of its own: where, which, and the rank it should be on.

    Args:
        way: rank of each stage and micro-batch.
        copies: ways that there may be; those that most micro-batches go are right.
    """
    ways, first, counts = np.unique(way, axis=1, return_index=True, return_counts=True)
    if len(first) <= copies:
        return None
    order = np.argsort(-counts, kind="stable")
    odd, known = order[copies:], ways[:, order[:copies]]
    column = odd[np.argmin(first[odd])]
    leaves = (known != ways[:, [column]]).argmax(axis=0)  # the stage at which it leaves each of the known ways
    like = int(leaves.argmax())
    stage = int(leaves[like])
    return stage, int(first[column]), int(known[stage, like])
