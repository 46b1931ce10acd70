"""RingAllReduce: data parallelism over this package's own ring, so that every message can be followed to the wire.

`DataParallel(module, hook=RingAllReduce())` averages each bucket by the sends and receives of `ring.py`, in place of
torch's all_reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.gradient_hook import GradientBucket
from distlab.collectives.ring import ring_all_reduce


class RingAllReduce:
    """A gradient hook that sums each bucket by `ring_all_reduce`.

    The ring is a loop of sends and receives on the caller's thread. So it runs when data parallelism waits for the
    bucket, after backward: nothing overlaps, unlike torch's all_reduce, which has threads or streams of its own.

    Cost: per bucket of S bytes what `ring_all_reduce` sends: 2 S - S_r - S_(r+1) bytes per rank.
    Error: as `ring_all_reduce`. Gradients are divided by the number of ranks before they are summed, so that a sum of
        float16 gradients does not overflow where their mean does not.
    """

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> _RingToRun:
        """Remember the bucket; its ring runs in `wait`."""
        return _RingToRun(bucket.buffer, group)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a ring remembers nothing between steps."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state.

        Raises:
            ValueError: the state has entries, so a different hook saved it.
        """
        if state_dict:
            raise ValueError(
                f"expected an empty state, got {sorted(state_dict)}: a different hook saved it: build that one"
            )


class _RingToRun(NamedTuple):
    """A bucket whose ring has not run yet."""

    buffer: Tensor
    group: ProcessGroup | None

    def wait(self) -> None:
        """Run the ring: afterwards the buffer holds the mean over ranks."""
        self.buffer.div_(dist.get_world_size(self.group))
        ring_all_reduce(self.buffer, self.group)
