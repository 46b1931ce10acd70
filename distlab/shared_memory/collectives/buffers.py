"""Buffers in memory that all ranks of a group map: a collective of one reads the values where they lie.

A tensor elsewhere is copied into the arena and the result out of it. Of a buffer, or of its beginning, each rank reads
what it needs in all ranks' buffers: an all-reduce and a reduce-scatter make about half of the copies, an all-gather one
in place of two.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distlab.shared_memory.arena import PAGE, map_file
from distlab.shared_memory.collectives.reductions import Reduction
from distlab.shared_memory.meeting import Meeting

_OTHER = -1  # the number of what is not a buffer
_IN_CACHE_BYTES = 256 << 10  # of a result, before it is written to where it belongs


class _Known(NamedTuple):
    number: int
    memory: weakref.ref[Any]
    num_bytes: int


class Buffers:
    """The buffers of one group, as one of its ranks sees them.

    Attributes:
        count: how many were asked for; equal on all ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.count = meeting, 0
        self._known: dict[int, _Known] = {}  # by address; the tensors themselves hold the memory

    def make(self, num_bytes: int) -> torch.Tensor:
        """Return this rank's buffer, of zeros.

        Raises:
            OSError: the system has no room for it.
        """
        meeting, stride = self.meeting, _stride(num_bytes)
        self.count += 1
        file = _OTHER
        if meeting.rank == 0:
            file = os.memfd_create("distlab", os.MFD_CLOEXEC)
            os.ftruncate(file, meeting.size * stride)
        _show(meeting, file)
        path = f"/proc/{meeting.arena.pids[0][0]}/fd/{_word_at(meeting.read(0))}"
        opened = file if meeting.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        memory = map_file(opened, meeting.size * stride)
        _show(meeting, _OTHER)
        meeting.read_all()  # all have it
        os.close(opened)
        mine = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=meeting.rank * stride)
        self._known = {address: known for address, known in self._known.items() if known.memory() is not None}
        self._known[mine.data_ptr()] = _Known(self.count, weakref.ref(memory), num_bytes)
        return mine

    def of_all(self, address: int, num_bytes: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Tell the others whether these bytes begin a buffer; return all ranks' if each passes the same, else nothing.

        All ranks pass as many bytes.
        """
        meeting = self.meeting
        known = self._known.get(address)
        memory = known.memory() if known is not None and known.num_bytes >= num_bytes else None
        number = known.number if known is not None and memory is not None else _OTHER
        _show(meeting, number)
        if {_word_at(shown) for shown in meeting.read_all()} != {number} or known is None or memory is None:
            return []
        count, stride = num_bytes // dtype.itemsize, _stride(known.num_bytes)
        starts = [rank * stride for rank in range(meeting.size)]
        return [torch.frombuffer(memory, dtype=dtype, count=count, offset=start) for start in starts]


def combine(
    flats: Sequence[torch.Tensor], first: int, count: int, reduction: Reduction, targets: Sequence[int]
) -> None:
    """Combine `count` elements of all ranks' buffers, from `first` on, and write them to some addresses.

    Nobody else may write these elements now. The targets may be their own places.
    """
    itemsize = flats[0].element_size()
    step = _IN_CACHE_BYTES // itemsize
    combined = torch.empty(min(step, count), dtype=flats[0].dtype, device="cpu")
    for start in range(0, count, step):
        length, begin = min(step, count - start), first + start
        reduction.of([flat[begin : begin + length] for flat in flats], combined[:length])
        for target in targets:
            ctypes.memmove(target + start * itemsize, combined.data_ptr(), length * itemsize)


def _stride(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _show(meeting: Meeting, number: int) -> None:
    ctypes.c_int64.from_address(meeting.open()).value = number
    meeting.post()


def _word_at(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
