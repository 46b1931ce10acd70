"""The collectives, each as steps of a meeting; what is larger than a slot goes in pieces.

Values are combined by torch's own arithmetic, always in the order of ranks, so that all ranks get equal bits.
All take flat, dense tensors. Copies go by address, so that no version counter and no autograd sees them; arithmetic
reads the caller's memory and writes into the arena alone.

A tensor is copied into the arena and the result out of it. A buffer lies in memory that all ranks of the group map: of
it, or of its beginning, each rank reads what it needs in all ranks' buffers. So an all-reduce and a reduce-scatter make
about half of the copies, an all-gather one in place of two.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.comm.shared_memory.arena import PAGE, map_file
from distlab.comm.shared_memory.dense import unseen
from distlab.comm.shared_memory.meeting import Meeting

SMALL_BYTES = 16 << 10  # of all ranks together: each reads all, which saves a meeting
ALIGN = 64
_OTHER = -1  # the number of what is not a buffer
_IN_CACHE_BYTES = 256 << 10  # of a result, before it is written to where it belongs
copy = ctypes.memmove


class ReduceOperation(NamedTuple):
    """A ReduceOp.

    Attributes:
        name: its plain name, such as "sum".
        combine: the function of two values.
        divides: whether the result is divided by the number of ranks.
    """

    name: str
    combine: Callable[..., torch.Tensor]
    divides: bool = False

    def of(self, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine one value of each rank into `out`, which may be none of them."""
        combine = self.combine
        if len(values) == 1:
            out.copy_(values[0])
        else:
            combine(values[0], values[1], out=out)
        for value in values[2:]:
            combine(out, value, out=out)
        if self.divides:  # whole numbers lose what is behind the point, as in C++
            has_point = out.is_floating_point() or out.is_complex()
            out.div_(len(values), rounding_mode=None if has_point else "trunc")


COMBINE: dict[str, Callable[..., torch.Tensor]]
COMBINE = {"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
COMBINE |= {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_BY_OP = {
    int(getattr(dist.ReduceOp, name)): ReduceOperation(name.lower(), function, divides=name == "AVG")
    for name, function in COMBINE.items()
}


def reduction_of(op: Any, dtype: torch.dtype, who: str) -> ReduceOperation:
    """Return how to combine values of a dtype.

    Raises:
        ValueError: the operation is unknown, or torch has none for the dtype, such as bits of real numbers.
    """
    found = _BY_OP.get(int(op))
    if found is None:
        raise ValueError(f"{who}: got {op}; pass ReduceOp.{', '.join(COMBINE)}")
    if reason := _why_not(found, dtype):
        raise ValueError(
            f"{who}: torch has no ReduceOp.{found.name.upper()} of {dtype} on the CPU ({reason}); convert the tensor "
            "first"
        )
    return found


@functools.cache
def _why_not(reduction: ReduceOperation, dtype: torch.dtype) -> str:
    """Return why torch's arithmetic refuses values of a dtype, or ""."""
    with unseen():
        try:
            one, other, out = (torch.zeros(1, device="cpu").to(dtype) for _ in range(3))
            reduction.of([one, other], out)
        except RuntimeError as error:  # torch's NotImplementedError is one
            return str(error).splitlines()[0]
    return ""


def pieces(total: int, step: int) -> list[tuple[int, int]]:
    """Cut `total` into pieces of at most `step`, as (start, length); an empty whole is one empty piece."""
    return [(start, min(step, total - start)) for start in range(0, total, step)] or [(0, 0)]


class Collectives:
    """The collectives of one rank in one group; whoever calls has begun the meeting's call."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.rank, self.size, self.others = meeting, meeting.rank, meeting.size, meeting.others
        self.buffers = Buffers(meeting)
        self._slot_bytes = meeting.arena.layout.slot_bytes
        self._share_bytes = self._slot_bytes // self.size // ALIGN * ALIGN  # of a slot, for one rank

    def barrier(self) -> None:
        """Wait until all are here."""
        self.meeting.open()
        self.meeting.post()
        self.meeting.read_all()

    def all_reduce(self, flat: torch.Tensor, reduction: ReduceOperation, root: int = -1) -> None:
        """Combine the tensors of all ranks; with a root, it alone gets the result.

        Each rank combines its own share of a piece, straight out of the others' slots.
        """
        meeting, me, itemsize = self.meeting, self.rank, flat.element_size()
        num_bytes, base = flat.nbytes, flat.data_ptr()
        if num_bytes * self.size <= SMALL_BYTES:
            self._small(flat, reduction, root)
            return
        if root == -1 and self.buffers.count and (flats := self.buffers.of_all(base, num_bytes, flat.dtype)):
            self._in_place(flats, reduction)
            return
        share = self._share_bytes // itemsize
        parts: list[tuple[int, int]] = []
        before: list[tuple[int, int]] = []
        for start, length in pieces(flat.numel(), share * self.size):
            each = min(share, -(-length // self.size))
            parts = [(start + r * each, max(0, min(each, length - r * each))) for r in range(self.size)]
            slot = meeting.open()
            for rank in self.others:
                copy(slot + rank * share * itemsize, base + parts[rank][0] * itemsize, parts[rank][1] * itemsize)
            meeting.post()
            if before:
                self._collect(base, before, itemsize, root)
            self._combine(flat, parts[me], reduction, share)
            if root in (-1, me):
                own = meeting.open() + me * share * itemsize  # for the next step
                copy(base + parts[me][0] * itemsize, own, parts[me][1] * itemsize)
            before = parts
        meeting.open()
        meeting.post()
        self._collect(base, before, itemsize, root)

    def _in_place(self, flats: Sequence[torch.Tensor], reduction: ReduceOperation) -> None:
        """Combine this rank's share of all ranks' buffers and write it to all; no other rank uses it meanwhile."""
        each, itemsize = -(-flats[0].numel() // self.size), flats[0].element_size()
        first = self.rank * each
        count = max(0, min(each, flats[0].numel() - first))
        combine(flats, first, count, reduction, [flat.data_ptr() + first * itemsize for flat in flats])
        self.barrier()

    def _combine(self, mine: torch.Tensor, part: tuple[int, int], reduction: ReduceOperation, share: int) -> None:
        """Combine this rank's part of all ranks' data into its place of its next slot."""
        meeting, me, view, (start, length) = self.meeting, self.rank, self.meeting.arena.view, part
        meeting.open()
        if not length:
            return
        parity, at, end = meeting.parity, me * share, me * share + length
        values = [view(mine.dtype, rank, parity)[at:end] for rank in range(self.size)]
        values[me] = mine[start : start + length]
        reduction.of(values, view(mine.dtype, me, 1 - parity)[at:end])

    def _collect(self, base: int, parts: Sequence[tuple[int, int]], itemsize: int, root: int) -> None:
        """Copy out the results of the others' shares."""
        if root not in (-1, self.rank):
            return
        for rank, shown in self.meeting.read_each():
            start, length = parts[rank]
            source = shown + rank * (self._share_bytes // itemsize) * itemsize
            copy(base + start * itemsize, source, length * itemsize)

    def _small(self, flat: torch.Tensor, reduction: ReduceOperation, root: int) -> None:
        """Show all to all; everyone who needs the result combines it, in the order of ranks."""
        meeting, num_bytes = self.meeting, flat.nbytes
        copy(meeting.open(), flat.data_ptr(), num_bytes)
        meeting.post()
        if root not in (-1, self.rank):
            return
        meeting.read_all()
        if num_bytes:
            length, parity, view = flat.numel(), meeting.parity, meeting.arena.view
            values = [view(flat.dtype, rank, parity)[:length] for rank in range(self.size)]
            target = view(flat.dtype, self.rank, 1 - parity)[:length]
            reduction.of(values, target)
            copy(flat.data_ptr(), target.data_ptr(), num_bytes)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: ReduceOperation) -> None:
        """Combine the ranks' input of this rank's number into `output`; all are flat and of one length."""
        meeting, itemsize = self.meeting, output.element_size()
        each, base = output.nbytes, inputs[0].data_ptr()
        if self.buffers.count and each * self.size > SMALL_BYTES:
            is_block = all(part.data_ptr() == base + rank * each for rank, part in enumerate(inputs))
            if flats := self.buffers.of_all(base if is_block else 0, each * self.size, output.dtype):
                combine(flats, self.rank * output.numel(), output.numel(), reduction, [output.data_ptr()])
                self.barrier()
                return
        share = self._share_bytes // itemsize
        for start, length in pieces(output.numel(), share):
            slot = meeting.open()
            for rank in self.others:
                copy(slot + rank * share * itemsize, inputs[rank].data_ptr() + start * itemsize, length * itemsize)
            meeting.post()
            self._combine(inputs[self.rank], (start, length), reduction, share)
            own = meeting.open() + self.rank * share * itemsize
            copy(output.data_ptr() + start * itemsize, own, length * itemsize)

    def all_gather(self, places: Sequence[int], source: torch.Tensor) -> None:
        """Copy every rank's tensor to this rank's address of its number; a rank that passes no addresses takes none."""
        meeting, mine, num_bytes = self.meeting, source.data_ptr(), source.nbytes
        is_large = num_bytes * self.size > SMALL_BYTES
        if is_large and self.buffers.count and (flats := self.buffers.of_all(mine, num_bytes, torch.uint8)):
            for step in range(1, len(places) + 1):  # not all ranks at once from the same one
                rank = (self.rank + step) % self.size
                copy(places[rank], flats[rank].data_ptr(), num_bytes)
            self.barrier()
            return
        for start, length in pieces(num_bytes, self._slot_bytes):
            copy(meeting.open(), mine + start, length)
            meeting.post()
            if places:
                copy(places[self.rank] + start, mine + start, length)
                for rank, shown in meeting.read_each():
                    copy(places[rank] + start, shown, length)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all; the root goes on once it has shown it."""
        meeting, address = self.meeting, flat.data_ptr()
        for start, length in pieces(flat.nbytes, self._slot_bytes):
            slot = meeting.open()
            if root == self.rank:
                copy(slot, address + start, length)
            meeting.post()
            if root != self.rank:
                copy(address + start, meeting.read(root), length)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> None:
        """Copy to each rank the root's source of its number."""
        meeting, share = self.meeting, self._share_bytes
        mine, places = output.data_ptr(), [source.data_ptr() for source in sources]
        for start, length in pieces(output.nbytes, share):
            slot = meeting.open()
            if root == self.rank:
                for rank in self.others:
                    copy(slot + rank * share, places[rank] + start, length)
                copy(mine + start, places[root] + start, length)
            meeting.post()
            if root != self.rank:
                copy(mine + start, meeting.read(root) + self.rank * share, length)

    def all_to_all(self, takes: Sequence[tuple[int, int]], gives: Sequence[tuple[int, int]]) -> None:
        """Give the s-th block to rank s, and take the s-th from it; each is (address, bytes).

        Raises:
            ValueError: two ranks do not agree on how much one sends to the other; on every rank, with all numbers.
        """
        meeting, me, share = self.meeting, self.rank, self._share_bytes
        most = self._agree_on_sizes([length for _, length in (*gives, *takes)])
        copy(takes[me][0], *gives[me])
        for start, _ in pieces(most, share):
            slot = meeting.open()
            for rank in self.others:
                address, length = gives[rank]
                copy(slot + rank * share, address + start, max(0, min(share, length - start)))
            meeting.post()
            for rank, shown in meeting.read_each():
                address, length = takes[rank]
                copy(address + start, shown + me * share, max(0, min(share, length - start)))

    def _agree_on_sizes(self, sizes: list[int]) -> int:
        """Check that each rank gives as many bytes as its peer expects; return the largest number.

        Raises:
            ValueError: two ranks do not agree.
        """
        meeting, size, members = self.meeting, self.size, self.meeting.members
        table = ctypes.c_int64 * len(sizes)  # what this rank gives to each, and what it expects of each
        copy(meeting.open(), table(*sizes), 8 * len(sizes))
        meeting.post()
        shown = [list(table.from_address(address)) for address in meeting.read_all()]
        for source in range(size):
            for destination in range(size):
                sent, taken = shown[source][destination], shown[destination][size + source]
                if sent != taken:
                    raise ValueError(
                        f"rank {meeting.me}: all_to_all: rank {members[source]} gives {sent} bytes to rank "
                        f"{members[destination]}, which expects {taken}; let input and output split sizes match"
                    )
        most: int = max(max(row[:size]) for row in shown)
        return most


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
    flats: Sequence[torch.Tensor], first: int, count: int, reduction: ReduceOperation, targets: Sequence[int]
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
            copy(target + start * itemsize, combined.data_ptr(), length * itemsize)


def _stride(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _show(meeting: Meeting, number: int) -> None:
    ctypes.c_int64.from_address(meeting.open()).value = number
    meeting.post()


def _word_at(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
