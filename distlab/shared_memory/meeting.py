"""How the ranks of a group meet: step by step, each showing what it calls.

In a step a rank writes into one of its two slots, by turns, and then posts: its step grows by one. It reads what the
others wrote in their step of the same number, once they have posted it. It begins to write the next step when all have
posted the last one. So no rank is more than one step ahead, and a slot is written again only after all have read it.

With each step a rank shows a record of its call: operation, dtype, shape, root, reduction. A number that stands for it
is entered on a roll; who reads compares it with its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distlab.shared_memory import futex
from distlab.shared_memory.arena import FAILED, PRESENT, RECORD_BYTES, STEP, Arena, look_s
from distlab.shared_memory.join import join
from distlab.shared_memory.mismatch import not_the_same

GRACE_S = 0.3  # after a mismatch, the time for the others to arrive, so that the message can name them all
_HEAD = 8
_MAX_KNOWN = 4096
_ALL = -1  # in place of a rank
MANY = 8  # ranks; of more one may wait for all and speak for them, and who waits for all sleeps until the last has come


class CallRecord:
    """What a call says of itself: a text, its bytes as they stand in a slot, and a number that stands for it."""

    __slots__ = ("data", "mark", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        whole = text.encode()
        shown = whole[: RECORD_BYTES - _HEAD]
        self.data = len(shown).to_bytes(_HEAD, "little") + shown
        self.mark = int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little")


def record_at(address: int) -> str:
    """Return the text of a record in shared memory."""
    length = int.from_bytes(ctypes.string_at(address, _HEAD), "little")
    return ctypes.string_at(address + _HEAD, min(length, RECORD_BYTES - _HEAD)).decode(errors="replace")


def shapes_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtype and shape of each tensor, such as "float32[2, 3]"."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


class RecordTable:
    """RecordTable of calls made before, so that the second call of a kind need not be described."""

    def __init__(self) -> None:
        self._known: dict[object, CallRecord] = {}

    def of(self, key: object, text: Callable[[], str]) -> CallRecord:
        """Return the record of a call; `text` describes it where the key is new."""
        record = self._known.get(key)
        if record is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            record = self._known[key] = CallRecord(text())
        return record


class Meeting:
    """One rank's part in the meetings of its group. Only one thread at a time may use it."""

    def __init__(self, arena: Arena, members: list[int], timeout_s: float) -> None:
        self.arena, self.members, self.timeout_s = arena, members, timeout_s
        self.rank, self.size = arena.rank, arena.size
        self.me = members[arena.rank]
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.is_many = self.size > MANY
        self.step = 0
        self.parity = 0  # of the step that was posted last: where to read
        self.failure = ""
        self.tied: Meeting | None = None  # of some of these ranks, which fails and is left with this one
        self.record = CallRecord("")
        self._posted = self.record  # the record shown with the last step
        self._all_came = True
        layout, base, both = arena.layout, arena.base, (0, 1)
        self._steps = [arena.header(rank) + STEP for rank in range(self.size)]
        self._words = [futex.word_at(address) for address in self._steps]
        self._counts = [base + layout.count(parity) for parity in both]
        self._counted = [futex.word_at(address) for address in self._counts]
        self._slots = [[base + layout.slot(rank, parity) for parity in both] for rank in range(self.size)]
        self._data = [[base + layout.data(rank, parity) for parity in both] for rank in range(self.size)]
        self._marks = [(ctypes.c_uint64 * self.size).from_address(base + layout.marks(parity)) for parity in both]
        self._look = futex.timeout_at(look_s(self.size))

    def begin(self, record: CallRecord) -> None:
        """Begin a call.

        Raises:
            RuntimeError: an earlier call of this group failed, or this process was forked from a rank.
        """
        self.require_usable(record.text)
        self.record = record

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
        self._marks[parity][self.rank] = record.mark
        self.step, self.parity, self._posted = self.step + 1, parity, record
        self._all_came = self.size == 1
        futex.add(self._steps[self.rank])
        if self.is_many:
            futex.count(self._counts[parity])
            if not self._is_behind(_ALL, self.step):
                futex.wake(self._counts[parity])  # this rank is the last one

    def read(self, rank: int) -> int:
        """Wait until a rank has posted this step too; return where its data stand.

        Raises:
            ValueError: it makes another call.
            RuntimeError: it has ended, left or failed, or does not come in time.
        """
        if not self._all_came:
            self._await(rank, self.step)
            if self._differs(rank):
                self._refuse()
        return self._data[rank][self.parity]

    def hear(self, leader: int) -> int:
        """Wait for the next step of a rank that waits for all in this one; return where its data stand.

        This rank posts that step too, with nothing to show. After it, it need not wait for the others: what it has
        shown, the leader alone was to read.

        Raises:
            ValueError: the ranks do not make the same call.
            RuntimeError: the leader has ended, left or failed, or a rank does not come in time.
        """
        self._await(leader, self.step + 1)
        self.post()
        place = self.read(leader)
        self._all_came = True
        return place

    def read_each(self) -> Iterator[tuple[int, int]]:
        """Yield the other ranks and where their data stand: of few ranks each as soon as it has come."""
        if self.is_many:
            self.read_all()
        for rank in self.others:
            yield rank, self.read(rank)

    def read_all(self) -> list[int]:
        """Wait for all; return where each rank's data stand, one's own too."""
        step, mark, marks, words = self.step, self._posted.mark, self._marks[self.parity], self._words
        if self.is_many:
            self._await(_ALL, step)
            if bytes(marks) != mark.to_bytes(8, sys.byteorder) * self.size:
                self._refuse()
        for rank in () if self.is_many else self.others:  # as `read`, which takes twice as long for one of several
            if (words[rank].value - step) & 0x80000000:
                self._await(rank, step)
            if marks[rank] != mark:
                self._refuse()
        self._all_came = True
        return [places[self.parity] for places in self._data]

    def _await(self, rank: int, step: int) -> None:
        """Sleep until a rank, or _ALL, have posted a step."""
        address, word, deadline, looks = self._steps[rank], self._words[rank], 0.0, 0
        if rank == _ALL:
            address, word = self._counts[step & 1], self._counted[step & 1]
        while True:
            seen = word.value
            if not self._is_behind(rank, step):
                break
            futex.wait(address, seen, self._look)
            if word.value != seen:  # else: do they still live? To read that of one takes 25 us
                continue
            if any(not self._is_behind(other, self.step) and self._differs(other) for other in self.others):
                self._refuse()
            late = [other for other in self.others if rank in (other, _ALL) and self._is_behind(other, step)]
            if not late:
                continue
            now = time.monotonic()
            deadline, looks = deadline or now + self.timeout_s, looks + 1
            gone = next((one for one in late if self.arena.state(one) > PRESENT), late[looks % len(late)])
            reason = self.failure or why_gone(self.arena, gone, self.members)
            if now > deadline:
                for_whom = next((one for one in (*late, *self.others) if self._is_behind(one, self.step)), late[0])
                whom, call = self.members[for_whom], self._posted.text  # the leader waits for others
                reason = f"timed out waiting {self.timeout_s * 1000:.0f} ms for rank {whom} to make its call of {call}"
            if reason and self._is_behind(rank, step):
                raise RuntimeError(f"rank {self.me}: {self._posted.text}: {reason}")

    def _refuse(self) -> None:
        """Name what every rank calls in this step.

        Raises:
            ValueError: always.
        """
        limit = time.monotonic() + GRACE_S
        calls: dict[int, object] = {}
        for rank in range(self.size):
            while self._is_behind(rank, self.step) and self.arena.state(rank) == PRESENT and time.monotonic() < limit:
                futex.wait(self._steps[rank], self._words[rank].value, self._look)
            is_here = not self._is_behind(rank, self.step)
            calls[self.members[rank]] = record_at(self._slots[rank][self.parity]) if is_here else None
        raise ValueError(not_the_same(self.members, calls))

    def _differs(self, rank: int) -> bool:
        return self._marks[self.parity][rank] != self._posted.mark

    def _is_behind(self, rank: int, step: int) -> bool:
        """Whether a rank, or any (_ALL), has yet to post a step; words go on from their largest value to the least."""
        if rank == _ALL:  # even and odd steps count apart: one rank may post the next step before all post this one
            return bool((self._counted[step & 1].value - (step + 1) // 2 * self.size) & 0x80000000)
        return bool((self._words[rank].value - step) & 0x80000000)

    def fail(self, error: BaseException) -> None:
        """Remember that a call failed, and let the others know, who may wait for this rank."""
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            self.arena.change_state(FAILED, self.failure)
        if self.tied is not None:
            self.tied.fail(error)

    def leave(self, state: int) -> None:
        """Say that this rank makes no calls any more."""
        if not self.failure:
            self.failure = "this rank has left it (destroy_process_group)"
            if self.arena.owner == os.getpid():
                self.arena.change_state(state)
        if self.tied is not None:
            self.tied.leave(state)


def meet(store: Any, rank: int, members: list[int], timeout_s: float, **how: Any) -> Meeting:
    """Make or map the memory of a group and meet there; every member calls this, with the arguments of `join`.

    Raises:
        CannotShare: on every rank.
        RuntimeError: one does not come in time, or has ended.
    """
    return Meeting(join(store, rank, members, timeout_s, **how), members, timeout_s)


def why_gone(arena: Arena, rank: int, members: list[int]) -> str:
    """Return why a rank will never come, or "" where it may; begins as gloo's message does."""
    state = arena.state(rank)
    if state > PRESENT:
        reason = arena.reason(rank)
        what = f"failed before ({reason})" if reason else "has left the group"
        return f"connection closed by peer: rank {members[rank]} {what}"
    if arena.has_ended(rank):
        return f"connection closed by peer: rank {members[rank]} (process {arena.pids[rank][0]}) has ended"
    return ""
