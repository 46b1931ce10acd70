"""A snapshot: copies of all tensors of a state, in host memory that is used again for the next one.

A save that runs during training must not write what the next update changes. So the state is copied, and the copy must
be over before the update. Two things keep the wait short:

1. Parameters and moments stay as they are from one update to the next. So a thread copies them while the next forward
   and backward run, and only the optimizer's step waits, where the copy is not over yet. Small tensors and buffers,
   which forward changes, are copied at once.
2. New memory costs more than the copy itself: the system hands it out page by page. So a snapshot keeps its buffers,
   and lends them to the writer until the writer is done. Where there is a GPU they are pinned.

Changes by anything but an optimizer's step are found out: torch counts the changes of each tensor. It does not count
those through `.data` or through a numpy array of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distlab.comm import device

SMALL_BYTES = 1 << 16


class Snapshot:
    """Copies states into memory of its own, as much as their tensors have; the next `begin` overwrites it.

    Attributes:
        buffers: the memory, in the order in which a state has its tensors.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._later: list[tuple[Tensor, Tensor, int]] = []  # source, its buffer, its version
        self._ready: dict[torch.device, Any] = {}

    def begin(self, state: Any, *, at_once: Iterable[Tensor] = ()) -> Any:
        """Return a state like this one in host memory; large tensors have their values when `finish` has run.

        Names of one tensor stay names of one.

        Args:
            state: nested dictionaries, lists and tuples.
            at_once: tensors that change before the next update.
        """
        old, self.buffers, self._later = self.buffers, [], []
        known: dict[tuple[Any, ...], Tensor] = {}
        soon, places = {one.data_ptr() for one in at_once}, set()

        def copy(value: Tensor) -> Tensor:
            value = value.detach() if value.requires_grad else value
            places.add(value.device)
            memory = memory_of(value)
            if memory in known:
                return known[memory]
            index = len(self.buffers)
            buffer = old[index] if index < len(old) else None
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = device.host_memory_for(value)
            self.buffers.append(buffer)
            known[memory] = buffer
            if value.nbytes < SMALL_BYTES or value.data_ptr() in soon or value.is_inference():
                buffer.copy_(value, non_blocking=True)  # a GPU's stream copies before it goes on; the host goes on
            else:
                self._later.append((value, buffer, value._version))
            return buffer

        # New lists and dictionaries, too: the part that gave them may change its own later.
        copied = pytree.tree_map_only(Tensor, copy, state)
        self._ready = {place: device.event(place) for place in places}
        return copied

    def finish(self) -> None:
        """Copy what `begin` left; any thread may call this.

        Raises:
            RuntimeError: a tensor was changed meanwhile, so the snapshot is of no single moment.
        """
        for place, ready in self._ready.items():
            device.wait_in_stream(ready, place)
        for source, buffer, _ in self._later:
            buffer.copy_(source, non_blocking=True)
        for copied in [device.event(place) for place in self._ready]:
            device.wait_for_event(copied)
        changed = [source for source, _, version in self._later if source._version != version]
        self._later = []
        if changed:
            what = f"a tensor {list(changed[0].shape)} of {changed[0].dtype}"
            raise RuntimeError(
                f"{what} was changed while it was copied, and not by an optimizer's step(): wait() before you change it"
            )


def compact(state: Any) -> Any:
    """Copy each view of a larger storage: torch.save would write the whole storage."""
    known: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Tensor) -> Tensor:
        is_whole = value.untyped_storage().nbytes() == value.nbytes
        return value if is_whole else known.setdefault(memory_of(value), value.detach().clone())

    return pytree.tree_map_only(Tensor, copy, state)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor have in common, and two tensors have not."""
    where = tensor.data_ptr() if tensor.numel() else id(tensor)
    return where, tensor.dtype, tensor.shape, tensor.stride()
