"""Do on one rank what comes out the same on every rank: ranks that share cores would only wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.comm.agree import group_device

Result = TypeVar("Result")


def on_first_rank(make: Callable[[], Result], group: ProcessGroup | None = None) -> Result:
    """Call `make` on the group's first rank alone, and return what it made on all; every rank calls this.

    Cost: one broadcast of the pickled result, after one of its length.

    Raises:
        Exception: on every rank, what `make` raised on the first.
    """
    made: list[object] = [None]
    if dist.get_rank(group) == 0:
        try:
            made[0] = make()
        except Exception as error:  # the others wait for this rank, and have to hear of it
            made[0] = error
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(made, src=first, group=group, device=group_device(group))
    if isinstance(made[0], Exception):
        raise made[0]
    return cast(Result, made[0])
