"""A snapshot: copies of all tensors of a state, in host memory that is used again for the next one.

A save that runs beside training must not write what the next update changes. So training waits for a copy, and for no
more. New memory costs as much as the copy itself (the system hands it out page by page), so a snapshot keeps its
buffers, and lends them to the writer until the writer is done. Beside a GPU they are pinned: the copy goes at the speed
of the bus.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.comm import device


class Snapshot:
    """Copies states into memory of its own; the next `take` overwrites it.

    Cost: one copy of all tensors, and host memory for as much.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, state: Any) -> Any:
        """Return a state like this one, whose tensors nobody else writes.

        Names of one tensor stay names of one.
        """
        made: dict[tuple[Any, ...], Tensor] = {}
        places: set[torch.device] = set()
        copied = self._copy(state, (), made, places)
        for place in places:
            device.synchronize(place)
        self._buffers = made
        return copied

    def _copy(self, value: Any, path: tuple[Any, ...], made: dict[tuple[Any, ...], Tensor], places: set[Any]) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, made, places)
        if isinstance(value, dict):
            return type(value)((key, self._copy(one, (*path, key), made, places)) for key, one in value.items())
        if isinstance(value, list | tuple):
            copies = [self._copy(one, (*path, index), made, places) for index, one in enumerate(value)]
            return copies if isinstance(value, list) else tuple(copies)
        return value

    def _copy_tensor(
        self, value: Tensor, path: tuple[Any, ...], made: dict[tuple[Any, ...], Tensor], places: set[Any]
    ) -> Tensor:
        memory = ("memory", value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and memory in made:
            return made[memory]
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (value.shape, value.dtype, value.stride()):
            buffer = device.host_memory_for(value)
        buffer.copy_(value, non_blocking=device.is_gpu(value))
        if device.is_gpu(value):
            places.add(value.device)
        made[path] = made[memory] = buffer
        return buffer
