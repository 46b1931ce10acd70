"""HostGradient: a shard's gradient on its way from the GPU to the host's memory, while backward goes on.

The copy runs in a stream of its own, into pinned memory that is made once. The host waits for it where the step ends,
not where the copy begins. Without a GPU the copy is over at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distlab.comm.device import CopyStream, event, host_memory_for, wait_for_event


class HostGradient:
    """Copies of one shard's gradients, one at a time.

    Cost: pinned host memory of the shard's size; twice that where passes accumulate without `zero_grad()`.
    """

    def __init__(self, to_host: CopyStream) -> None:
        self._to_host = to_host
        self._memory: list[Tensor] = []
        self._arriving: Tensor | None = None
        self._arrived: Any = None

    def start(self, total: Tensor, kept: Tensor | None) -> None:
        """Begin to copy a gradient; `kept` is the one that the host holds, which must stay as it is.

        Shapes: total [L], kept [L]
        """
        landing = self._memory_apart_from(total, kept)
        with self._to_host.after_current():
            landing.copy_(total, non_blocking=True)
            self._arrived = event(self._to_host.place)
        self._to_host.keep(total)
        self._arriving = landing

    def finish(self) -> Tensor | None:
        """Let the host wait for the copy, and return it; None where none was begun."""
        if self._arriving is None:
            return None
        wait_for_event(self._arrived)
        arrived, self._arriving = self._arriving, None
        return arrived

    def _memory_apart_from(self, total: Tensor, kept: Tensor | None) -> Tensor:
        for memory in self._memory:
            if kept is None or memory.data_ptr() != kept.data_ptr():
                return memory
        self._memory.append(host_memory_for(total))
        return self._memory[-1]
