"""How the ranks of a group meet: step by step, each showing what it calls.

In a step a rank writes into one of its two slots, by turns, and then posts: its step grows by one. It reads what the
others wrote in their step of the same number, once they have posted it. It begins to write the next step when all have
posted the last one. So no rank is more than one step ahead, and a slot is written again only after all have read it.

With each step a rank shows a record of its call: operation, dtype, shape, root, reduction. A number stands for it; who
reads compares it with its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from distlab.comm.agree import not_the_same
from distlab.comm.shared_memory import futex
from distlab.comm.shared_memory.arena import FAILED, LEFT, PRESENT, RECORD_BYTES, STEP, join, text_at

GRACE_S = 0.3  # after a mismatch, the time for the others to arrive, so that the message can name them all
_MARK_BYTES, _HEAD = 8, 16  # of a record: the number that stands for it; that and the length of its text


class CallRecord:
    """What a call says of itself: a text, its bytes as they stand in a slot, and a number that stands for it."""

    __slots__ = ("data", "mark", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        whole = text.encode()
        shown, mark = whole[: RECORD_BYTES - _HEAD], hashlib.blake2b(whole, digest_size=_MARK_BYTES).digest()
        self.data = mark + len(shown).to_bytes(8, "little") + shown
        self.mark = int.from_bytes(mark, "little")


@functools.lru_cache(4096)
def record_of(op: str, root: int, reduction: str, *shown: tuple[Sequence[int], torch.dtype]) -> CallRecord:
    """Return the record of a call: its name, the root's global rank or -1, the reduction or "", shapes and dtypes."""
    shapes = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in shown)
    words = [f"{op} {shapes}" if shapes else op]
    words += [f"root {root}"] if root >= 0 else []
    words += [reduction] if reduction not in ("", "sum") else []
    return CallRecord(", ".join(words))


class GroupCall(NamedTuple):
    """A collective.

    Attributes:
        op: its name, which begins with the plain one.
        tensors: whose shapes and dtypes the ranks must agree on.
        root: the root's number in the group; -1: there is none.
        reduction: plain name of the ReduceOp.
        gives: of an all_to_all, which may be uneven: bytes that this rank gives to each.
    """

    op: str
    tensors: Sequence[torch.Tensor] = ()
    root: int = -1
    reduction: str = ""
    gives: Sequence[int] = ()

    def record(self, members: Sequence[int]) -> CallRecord:
        """Return what the ranks compare, with global ranks."""
        root = members[self.root] if self.root >= 0 else -1
        return record_of(self.op, root, self.reduction, *[(t.shape, t.dtype) for t in self.tensors])

    def handed(self, size: int) -> int | Sequence[int]:
        """Return the bytes that a rank hands to the call in a group of so many; of an all_to_all, to each of them."""
        num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        return self.gives or (num_bytes * size if self.op.startswith("reduce_scatter") else num_bytes)


class Meeting:
    """One rank's part in the meetings of its group. Only one thread at a time may use it.

    It makes or maps the memory of the group: every member makes one, with the arguments of `join`.

    Raises:
        CannotShare: on every rank.
        RuntimeError: one does not come in time, or has ended.
    """

    def __init__(self, store: Any, rank: int, members: list[int], timeout_s: float) -> None:
        arena = join(store, rank, members, timeout_s)
        self.arena, self.members, self.timeout_s = arena, members, timeout_s
        self.rank, self.size = arena.rank, arena.size
        self.me = members[arena.rank]
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.step = 0
        self.parity = 0  # of the step that was posted last: where to read
        self.failure = ""
        self.record, self._opts = CallRecord(""), cast("Any", None)
        self._posted = self.record  # the record shown with the last step
        self._all_came = True
        layout, base, ranks, both = arena.layout, arena.base, range(self.size), (0, 1)
        self._steps = [arena.header(rank) + STEP for rank in ranks]
        self._words = [futex.word_at(address) for address in self._steps]
        self._slots = [[base + layout.slot(rank, parity) for parity in both] for rank in ranks]
        self._marks = [[ctypes.c_uint64.from_address(slot) for slot in slots] for slots in self._slots]
        self._data = [[base + layout.data(rank, parity) for parity in both] for rank in ranks]

    def begin(self, record: CallRecord, opts: Any = None) -> None:
        """Begin a call; `opts` may have a timeout of its own, as torch gives them.

        Raises:
            RuntimeError: an earlier call of this group failed, or this process was forked from a rank.
        """
        self.require_usable(record.text)
        self.record, self._opts = record, opts

    def _limit_s(self) -> float:
        """How long this call may wait: as it says itself, else as its group does. To read that takes a microsecond."""
        own: timedelta | None = getattr(self._opts, "timeout", None)
        return own.total_seconds() if own is not None and own > timedelta() else self.timeout_s

    def require_usable(self, call: str) -> None:
        """Refuse calls on a group that has failed or been left, and in a process forked from a rank.

        Raises:
            RuntimeError: naming the reason.
        """
        if self.failure:
            raise RuntimeError(f"rank {self.me}: {call}: the group cannot be used any more: {self.failure}")
        if self.arena.owner != os.getpid():
            raise RuntimeError(
                f"rank {self.me}: {call} in a process that was forked from the rank; only the rank itself may call: "
                "start the process before init_process_group, or let it talk to the rank through a queue"
            )

    def open(self) -> int:
        """Wait until all have posted the last step; return where this rank writes the next one."""
        if not self._all_came:
            self.read_all()
        return self._data[self.rank][1 - self.parity]

    def post(self) -> None:
        """Show what was written since `open`, and the call's record with it."""
        record, parity = self.record, 1 - self.parity
        ctypes.memmove(self._slots[self.rank][parity], record.data, len(record.data))
        self.step, self.parity, self._posted = self.step + 1, parity, record
        self._all_came = self.size == 1
        futex.add(self._steps[self.rank])

    def read(self, rank: int) -> int:
        """Wait until a rank has posted this step too; return where its data stand.

        Raises:
            ValueError: it makes a different call.
            RuntimeError: it has ended, left or failed, or does not come in time.
        """
        if (self._words[rank].value - self.step) & 0x80000000:
            self._await(rank)
        if self._marks[rank][self.parity].value != self._posted.mark:
            self._refuse()
        return self._data[rank][self.parity]

    def read_each(self) -> Iterator[tuple[int, int]]:
        """Yield the other ranks and where their data stand, each as soon as it has come."""
        for rank in self.others:
            yield rank, self.read(rank)

    def read_all(self) -> list[int]:
        """Wait for all; return where each rank's data stand, one's own too."""
        for rank in self.others:
            self.read(rank)
        self._all_came = True
        return [places[self.parity] for places in self._data]

    def _await(self, rank: int) -> None:
        """Sleep until a rank has posted this step."""
        address, word, deadline = self._steps[rank], self._words[rank], 0.0
        while True:
            seen = word.value
            if not self._is_behind(rank):
                break
            futex.wait(address, seen)
            if word.value != seen:  # else: does it still live? To read that takes 25 us
                continue
            here = [self._marks[other][self.parity].value for other in self.others if not self._is_behind(other)]
            if any(mark != self._posted.mark for mark in here):
                self._refuse()
            now = time.monotonic()
            deadline = deadline or now + self._limit_s() - futex.LOOK_S
            reason = self.failure or self.arena.why_gone(rank, self.members)
            if now > deadline:
                whom, call = self.members[rank], self._posted.text
                reason = f"Timed out waiting {self._limit_s() * 1000:.0f} ms for rank {whom} to make its call of {call}"
            if reason and self._is_behind(rank):
                raise RuntimeError(f"rank {self.me}: {self._posted.text}: {reason}")

    def _refuse(self) -> None:
        """Name what every rank calls in this step.

        Raises:
            ValueError: always.
        """
        limit = time.monotonic() + GRACE_S
        calls: dict[int, object] = {}
        for rank in range(self.size):
            while self._is_behind(rank) and self.arena.state(rank) == PRESENT and time.monotonic() < limit:
                futex.wait(self._steps[rank], self._words[rank].value)
            is_here = not self._is_behind(rank)
            text = self._slots[rank][self.parity] + _MARK_BYTES
            calls[self.members[rank]] = text_at(text, RECORD_BYTES - _HEAD) if is_here else None
        raise ValueError(not_the_same(self.members, calls))

    def _is_behind(self, rank: int) -> bool:
        """Whether a rank has yet to post this step; words go on from their largest value to the least."""
        return bool((self._words[rank].value - self.step) & 0x80000000)

    def fail(self, error: BaseException) -> None:
        """Remember that a call failed, and let the others know, who may wait for this rank."""
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            self.arena.change_state(FAILED, self.failure)

    def leave(self) -> None:
        """Say that this rank makes no calls any more."""
        if not self.failure:
            self.failure = "this rank has left it (destroy_process_group)"
            if self.arena.owner == os.getpid():
                self.arena.change_state(LEFT)
