"""The groups that torch asks for, in jobs that named this backend and in those where it is the ranks' own choice."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distlab.shared_memory.group import SharedGroup, shared_group
from distlab.shared_memory.join import CannotShare
from distlab.shared_memory.meeting import Meeting, meet


def meet_if_possible(store: Any, rank: int, world_size: int, timeout_s: float, reason: str = "") -> Meeting | None:
    """Meet all ranks in shared memory; None on all of them where they cannot, and gloo is to be taken.

    Args:
        store: through which the ranks find each other.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: how long a call may wait for another rank.
        reason: why this rank does not want to; one that has a reason is enough.
    """
    part = dist.PrefixStore("shared memory", store)  # type: ignore[attr-defined]
    try:
        meeting = meet(part, rank, list(range(world_size)), timeout_s, insists=False, reason=reason)
    except CannotShare:
        return None
    meeting.is_choice = True
    return meeting


def make(options: Any, met: Meeting | None) -> Any:
    """Make a group; torch calls this. `met` is given where the ranks have met already: the caller named no backend.

    In such a job a group that cannot have memory of its own (the process is out of addresses) uses gloo.

    Raises:
        CannotShare: on every rank, where the user named this backend.
    """
    if met is not None:
        return shared_group(met)
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = dist.group.WORLD
    try:
        return shared_group(meet(options.store, options.group_rank, members, options.timeout.total_seconds()))
    except CannotShare:
        if not (isinstance(world, SharedGroup) and world._meeting.is_choice):
            raise
        store = dist.PrefixStore("gloo", options.store)  # type: ignore[attr-defined]
        return dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
