"""A snapshot: copies of all tensors of a state, in host memory that is used again for the next one.

A save that runs beside training must not write what the next update changes. So somebody must copy, and the copy must
be over before the update. Two things make training wait for little of it:

1. Parameters and moments stay as they are from one update to the next. So a thread copies them while the next forward
   and backward run, and only the optimizer's step waits, where the copy is not over yet. Small tensors and buffers,
   which forward changes, are copied at once.
2. New memory costs more than the copy itself (the system hands it out page by page), so a snapshot keeps its buffers,
   and lends them to the writer until the writer is done. Beside a GPU they are pinned.

Who changes a tensor otherwise than by an optimizer's step is found out: torch counts the changes of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.comm import device

SMALL_BYTES = 1 << 16
Path = tuple[object, ...]
_ENDS = (int, float, str, bool, type(None))


class _Later(NamedTuple):
    source: Tensor
    buffer: Tensor
    version: int
    where: Path


class Snapshot:
    """Copies states into memory of its own, as much as their tensors have; the next `begin` overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}
        self._later: list[_Later] = []

    def begin(self, state: Any, *, at_once: Iterable[Tensor] = ()) -> Any:
        """Return a state like this one in host memory; large tensors have their values when `finish` has run.

        Names of one tensor stay names of one.

        Args:
            state: nested dictionaries, lists and tuples.
            at_once: tensors that change before the next update.
        """
        buffers: dict[Path, Tensor] = {}
        known: dict[tuple[Any, ...], Tensor] = {}
        soon = {one.data_ptr() for one in at_once}
        self._later = []

        def copy(value: Tensor, where: Path) -> Tensor:
            memory = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if value.numel() and memory in known:
                return known[memory]
            buffer = self._buffers.get(where)
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = device.host_memory_for(value)
            buffers[where] = known[memory] = buffer
            if value.nbytes < SMALL_BYTES or value.data_ptr() in soon or value.is_inference():
                buffer.copy_(value)
            else:
                self._later.append(_Later(value, buffer, value._version, where))
            return buffer

        copied = with_tensors(state, copy)
        self._buffers = buffers
        return copied

    def finish(self) -> None:
        """Copy what `begin` left; any thread may call this.

        Raises:
            RuntimeError: a tensor was changed meanwhile, so the snapshot is of no single moment.
        """
        places = {one.source.device for one in self._later if device.is_gpu(one.source)}
        for one in self._later:
            one.buffer.copy_(one.source, non_blocking=True)
        for place in places:
            device.synchronize(place)
        changed = [one.where for one in self._later if one.source._version != one.version]
        self._later = []
        if changed:
            what = "".join(f"[{key!r}]" for key in changed[0])
            raise RuntimeError(
                f"{what} was changed while it was copied, and not by an optimizer's step(): wait() before you change it"
            )


def with_tensors(state: Any, change: Callable[[Tensor, Path], Tensor], where: Path = ()) -> Any:
    """Return a state like this one, with other tensors in place of its own; `change` gets each and its place."""
    if isinstance(state, Tensor):
        return change(state.detach(), where)
    if isinstance(state, dict):
        made: Any = type(state)(
            (key, one if type(one) in _ENDS else with_tensors(one, change, (*where, key))) for key, one in state.items()
        )
        if hasattr(state, "_metadata"):  # a module's state has the versions of its layers
            made._metadata = state._metadata
        return made
    if isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        items = [
            one if type(one) in _ENDS else with_tensors(one, change, (*where, index)) for index, one in enumerate(state)
        ]
        return items if isinstance(state, list) else tuple(items)
    return state


def compact(state: Any) -> Any:
    """Return a state whose tensors have memory of no more than their own: torch.save writes all of a view's memory."""
    known: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Tensor, _: Path) -> Tensor:
        if value.untyped_storage().nbytes() == value.nbytes:
            return value
        return known.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), value.clone())

    return with_tensors(state, copy)
