"""The collectives, each as steps of a meeting; what is larger than a slot goes in pieces.

All take dense tensors. Copies go by address, so that no version counter and no autograd sees them; arithmetic reads
the caller's memory and writes into the arena alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from distlab.shared_memory.collectives.buffers import Buffers, combine
from distlab.shared_memory.collectives.dense import bytes_of
from distlab.shared_memory.collectives.reductions import Reduction
from distlab.shared_memory.meeting import MANY, Meeting

SMALL_BYTES = 16 << 10  # of all ranks together: each reads all, which saves a meeting
LED_BYTES = 64 << 10  # of each of many ranks: one combines them for all
ALIGN = 64
copy = ctypes.memmove


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
        self._views: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}

    def barrier(self) -> None:
        """Wait until all are here."""
        self.meeting.open()
        self.meeting.post()
        self.meeting.read_all()

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, root: int = -1) -> None:
        """Combine the flat tensors of all ranks; with a root, it alone gets the result.

        Each rank combines its own share of a piece, straight out of the others' slots.
        """
        meeting, me, itemsize = self.meeting, self.rank, flat.element_size()
        num_bytes, base = bytes_of(flat), flat.data_ptr()
        is_led = root == -1 and self.size > MANY and num_bytes <= LED_BYTES
        if is_led or num_bytes * self.size <= SMALL_BYTES:
            self._small(flat, reduction, root, is_led=is_led)
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
                copy(base + parts[me][0] * itemsize, self._own(share, itemsize), parts[me][1] * itemsize)
            before = parts
        meeting.open()
        meeting.post()
        self._collect(base, before, itemsize, root)

    def _in_place(self, flats: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Combine this rank's share of all ranks' buffers and write it to all; no other rank uses it meanwhile."""
        each, itemsize = -(-flats[0].numel() // self.size), flats[0].element_size()
        first = self.rank * each
        count = max(0, min(each, flats[0].numel() - first))
        combine(flats, first, count, reduction, [flat.data_ptr() + first * itemsize for flat in flats])
        self.barrier()

    def _own(self, share: int, itemsize: int) -> int:
        """Where this rank leaves the result of its share, for the next step."""
        return self.meeting.open() + self.rank * share * itemsize

    def _combine(self, mine: torch.Tensor, part: tuple[int, int], reduction: Reduction, share: int) -> None:
        """Combine this rank's part of all ranks' data into its place of its next slot."""
        meeting, me, (start, length) = self.meeting, self.rank, part
        meeting.open()
        if not length:
            return
        parity, at = meeting.parity, me * share
        shown = self._shares(mine.dtype, parity, share)
        if length < share:
            shown = [view[:length] for view in shown]
        values = [mine[start : start + length] if rank == me else shown[rank] for rank in range(self.size)]
        target = meeting.arena.view(mine.dtype, me, 1 - parity)
        reduction.of(values, target[at : at + length])

    def _shares(self, dtype: torch.dtype, parity: int, share: int) -> list[torch.Tensor]:
        """Every rank's slot where the data for this rank stand."""
        key = (dtype, parity, share)
        if key not in self._views:
            view, at = self.meeting.arena.view, self.rank * share
            self._views[key] = [view(dtype, rank, parity)[at : at + share] for rank in range(self.size)]
        return self._views[key]

    def _collect(self, base: int, parts: Sequence[tuple[int, int]], itemsize: int, root: int) -> None:
        """Copy out the results of the others' shares."""
        if root not in (-1, self.rank):
            return
        for rank, shown in self.meeting.read_each():
            start, length = parts[rank]
            source = shown + rank * (self._share_bytes // itemsize) * itemsize
            copy(base + start * itemsize, source, length * itemsize)

    def _small(self, flat: torch.Tensor, reduction: Reduction, root: int, *, is_led: bool) -> None:
        """Show all to all; everyone who needs the result combines it, in the order of ranks.

        Many ranks are led: the first combines for all, n reads in place of n * n.
        """
        meeting, num_bytes = self.meeting, bytes_of(flat)
        copy(meeting.open(), flat.data_ptr(), num_bytes)
        meeting.post()
        if is_led and self.rank:
            copy(flat.data_ptr(), meeting.hear(0), num_bytes)
            return
        if root not in (-1, self.rank):
            return
        meeting.read_all()
        if num_bytes:
            length, parity, dtype = flat.numel(), meeting.parity, flat.dtype
            view = meeting.arena.view
            values = [view(dtype, rank, parity)[:length] for rank in range(self.size)]
            target = view(dtype, self.rank, 1 - parity)[:length]
            reduction.of(values, target)
            copy(flat.data_ptr(), target.data_ptr(), num_bytes)
        if is_led:
            meeting.post()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Combine the ranks' input of this rank's number into `output`; all are flat and of one length."""
        meeting, itemsize = self.meeting, output.element_size()
        each, base = bytes_of(output), inputs[0].data_ptr()
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
            copy(output.data_ptr() + start * itemsize, self._own(share, itemsize), length * itemsize)

    def all_gather(self, outputs: Sequence[int], source: int, num_bytes: int) -> None:
        """Copy every rank's bytes to the addresses `outputs`."""
        meeting = self.meeting
        is_large = num_bytes * self.size > SMALL_BYTES
        if is_large and self.buffers.count and (flats := self.buffers.of_all(source, num_bytes, torch.uint8)):
            for step in range(1, self.size + 1):  # not all ranks at once from the same one
                rank = (self.rank + step) % self.size
                copy(outputs[rank], flats[rank].data_ptr(), num_bytes)
            self.barrier()
            return
        for start, length in pieces(num_bytes, self._slot_bytes):
            copy(meeting.open(), source + start, length)
            meeting.post()
            copy(outputs[self.rank] + start, source + start, length)
            for rank, shown in meeting.read_each():
                copy(outputs[rank] + start, shown, length)

    def broadcast(self, address: int, num_bytes: int, root: int) -> None:
        """Copy the root's bytes to all; the root goes on once it has shown them."""
        meeting = self.meeting
        for start, length in pieces(num_bytes, self._slot_bytes):
            slot = meeting.open()
            if root == self.rank:
                copy(slot, address + start, length)
            meeting.post()
            if root != self.rank:
                copy(address + start, meeting.read(root), length)

    def gather(self, outputs: Sequence[int], source: int, num_bytes: int, root: int) -> None:
        """Copy every rank's bytes to the root's addresses `outputs`."""
        meeting = self.meeting
        for start, length in pieces(num_bytes, self._slot_bytes):
            slot = meeting.open()
            if root != self.rank:
                copy(slot, source + start, length)
            meeting.post()
            if root == self.rank:
                copy(outputs[root] + start, source + start, length)
                for rank, shown in meeting.read_each():
                    copy(outputs[rank] + start, shown, length)

    def scatter(self, output: int, sources: Sequence[int], num_bytes: int, root: int) -> None:
        """Copy to each rank the bytes at the root's address of its number."""
        meeting, share = self.meeting, self._share_bytes
        for start, length in pieces(num_bytes, share):
            slot = meeting.open()
            if root == self.rank:
                for rank in self.others:
                    copy(slot + rank * share, sources[rank] + start, length)
                copy(output + start, sources[root] + start, length)
            meeting.post()
            if root != self.rank:
                copy(output + start, meeting.read(root) + self.rank * share, length)

    def all_to_all(self, outputs: Sequence[tuple[int, int]], inputs: Sequence[tuple[int, int]]) -> None:
        """Copy input s to rank s, and what rank s has for this one to output s; each is (address, bytes).

        Raises:
            ValueError: two ranks do not agree on how much one sends to the other; on every rank, with all numbers.
        """
        meeting, me, share = self.meeting, self.rank, self._share_bytes
        most = self.agree_on_sizes(outputs, inputs)
        copy(outputs[me][0], inputs[me][0], inputs[me][1])
        for start, _ in pieces(most, share):
            slot = meeting.open()
            for rank in self.others:
                address, length = inputs[rank]
                copy(slot + rank * share, address + start, max(0, min(share, length - start)))
            meeting.post()
            for rank, shown in meeting.read_each():
                address, length = outputs[rank]
                copy(address + start, shown + me * share, max(0, min(share, length - start)))

    def agree_on_sizes(self, outputs: Sequence[tuple[int, int]], inputs: Sequence[tuple[int, int]]) -> int:
        """Check that each rank sends as many bytes as its peer expects; return the largest number.

        Raises:
            ValueError: two ranks do not agree.
        """
        meeting = self.meeting
        counts = [length for _, length in inputs] + [length for _, length in outputs]
        table = (ctypes.c_int64 * len(counts))(*counts)
        copy(meeting.open(), table, 8 * len(counts))
        meeting.post()
        shown = [list((ctypes.c_int64 * len(counts)).from_address(address)) for address in meeting.read_all()]
        self._agree(shown)
        most: int = max(max(row[: self.size]) for row in shown)
        return most

    def _agree(self, shown: Sequence[Sequence[int]]) -> None:
        members, size = self.meeting.members, self.size
        for source in range(size):
            for destination in range(size):
                sent, taken = shown[source][destination], shown[destination][size + source]
                if sent != taken:
                    raise ValueError(
                        f"rank {self.meeting.me}: all_to_all: rank {members[source]} gives {sent} bytes to rank "
                        f"{members[destination]}, which expects {taken}; let input and output split sizes match"
                    )
