"""The other way, at its plainest: no restart. Those that are left average once more.

A group never changes (`get_world_size()` says what it said before the death), but calls in it fail, and each rank has
its own gradient yet. So those that are left make a new group. Some may have passed the barrier when one dies, and some
not: `Replicas` sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor


def plain_average(gradient: Tensor, num_samples: int, regroup: Callable[[], None]) -> Tensor:
    """Return the mean gradient over the samples of all that live, however many die meanwhile.

    Shapes: gradient [P] -> [P]
    Cost: two all-reduces, of P elements and of one, and a barrier; all again after each death.

    Args:
        gradient: the mean over this rank's samples.
        num_samples: how many these are.
        regroup: leaves the default group and joins a new one of those that are left.
    """
    while True:
        with suppress(RuntimeError):  # until its end an error holds the group, whose end tells the others
            total, mean = torch.tensor(float(num_samples)), gradient * num_samples
            dist.all_reduce(total)
            dist.all_reduce(mean)
            dist.barrier()  # the vote: nobody goes on who has no result
            return mean / total
        regroup()
