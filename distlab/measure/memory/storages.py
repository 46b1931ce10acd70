"""Every storage that a block of code touches: when it was made, when it was freed, and what it was for.

A storage is the memory behind one or more tensors; views share it. What it is for often shows only later: the result of
a matrix product becomes a gradient when backward hands it to a parameter, an activation when some operator saves it.
So the ledger writes down comings and goings, and the kind of a storage, once known, holds for its whole life.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from simulator.memory.memory import KINDS

CERTAINTY = ("temporary", "activations", "logits", "buffers", "gradients", "optimizer", "master weights", "parameters")
# A storage that is two things counts as the later of these: a bucket whose views are gradients is gradients. "errors"
# are never guessed, only marked.

Ints = NDArray[np.int64]


class _Storage(NamedTuple):
    """A storage that is alive, and its bytes when it was last seen."""

    there: weakref.ref[torch.UntypedStorage]
    num_bytes: int


class StorageLedger:
    """Storages on one kind of device, by kind and over time.

    Attributes:
        now_bytes: of all known storages.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.now_bytes = 0
        self._numbers: dict[int, int] = {}  # of storages alive: address to number in the ledger
        self._alive: dict[int, _Storage] = {}  # by number
        self._kind: dict[int, int] = {}  # by number, of all in the history
        self._marked: set[int] = set()
        self._gone: deque[tuple[int, int]] = deque()  # numbers and times; filled on any thread, emptied on ours
        self._events = (array("q"), array("q"), array("q"))  # time, number, change of bytes
        self._next = 0

    def look(self, tensors: Iterable[Tensor]) -> int:
        """Note new storages and what happened to the others; return the bytes of the new ones."""
        came = self.catch_up()
        for tensor in tensors:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._numbers:
                    came += self._enter(storage)
        return came

    def catch_up(self) -> int:
        """Enter what was freed, and storages that were resized in place; return the bytes that came."""
        while self._gone:
            number, when = self._gone.popleft()
            self._note(number, -self._alive.pop(number).num_bytes, when)
        came = 0
        for number, (there, num_bytes) in self._alive.items():
            storage = there()
            if storage is not None and storage.nbytes() != num_bytes:
                change = storage.nbytes() - num_bytes
                self._alive[number] = _Storage(there, num_bytes + change)
                self._note(number, change, time.monotonic_ns())
                came += max(0, change)
        return came

    def set_kind(self, tensor: Tensor | None, kind: str, *, marked: bool = False) -> None:
        """Say what a tensor's storage is for. Between guesses the more certain one stays; a mark is final."""
        if tensor is None or not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._enter(storage)
        number = self._numbers[storage._cdata]
        old, new = self._kind[number], _INDEX[kind]
        if not marked and (number in self._marked or _CERTAINTY[new] < _CERTAINTY[old]):
            return
        if marked:
            self._marked.add(number)
        self._kind[number] = new

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind now."""
        sums = dict.fromkeys(KINDS, 0)
        for number, storage in self._alive.items():
            sums[KINDS[self._kind[number]]] += storage.num_bytes
        return sums

    def restart(self) -> None:
        """Forget the past: the history begins with what is alive now."""
        self.catch_up()
        self._events = (array("q"), array("q"), array("q"))
        self._kind = {number: self._kind[number] for number in self._alive}
        self._marked &= set(self._alive)
        self.now_bytes, now = 0, time.monotonic_ns()
        for number, storage in self._alive.items():
            self._note(number, storage.num_bytes, now)

    def history(self) -> tuple[Ints, Ints]:
        """Return each event's time and the bytes of each kind from then on.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        self.catch_up()
        times, numbers, changes = (np.array(column, np.int64) for column in self._events)
        rows = np.zeros((len(times), len(KINDS)), np.int64)
        rows[np.arange(len(times)), [self._kind[number] for number in numbers.tolist()]] = changes
        return np.maximum.accumulate(times), rows.cumsum(axis=0)

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type and tensor.layout is torch.strided

    def _enter(self, storage: torch.UntypedStorage) -> int:
        number, self._next = self._next, self._next + 1
        address, num_bytes = storage._cdata, storage.nbytes()
        self._numbers[address] = number
        self._alive[number] = _Storage(weakref.ref(storage, partial(self._freed, address, number)), num_bytes)
        self._kind[number] = _INDEX["temporary"]
        self._note(number, num_bytes, time.monotonic_ns())
        return num_bytes

    def _freed(self, address: int, number: int, _: object) -> None:
        # Runs wherever the last reference is dropped, on any thread and in the middle of anything: it only leaves word.
        if self._numbers.get(address) == number:
            del self._numbers[address]  # the address may be used again at once
        self._gone.append((number, time.monotonic_ns()))

    def _note(self, number: int, change: int, when: int) -> None:
        for column, value in zip(self._events, (when, number, change), strict=True):
            column.append(value)
        self.now_bytes += change


_INDEX = {kind: index for index, kind in enumerate(KINDS)}
_CERTAINTY = {_INDEX[kind]: rank for rank, kind in enumerate((*CERTAINTY, "errors"))}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
