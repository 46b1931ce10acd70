"""The memory in which the ranks of a group meet: one nameless file, mapped by all.

The group's first rank makes it (memfd: it has no name in any folder) and tells the others where it stands under
`/proc`. Once all have mapped it, nobody holds it open: it is gone with the last of them, however they end.

    headers     one page per rank: its step, its state, its bell, who it is
    roll        of even and of odd steps: how many all ranks together have posted, and what each calls; how many ranks
                have gone
    slots       two per rank: what it shows to the others in even and in odd steps
    lanes       one for each ordered pair of ranks: messages from the one to the other

Only pages that are used take memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from distlab.shared_memory import futex

PAGE = 4096
STEP, STATE, BELL, REASON = 0, 64, 128, 256  # places in a header
_NUM_GONE, _MARKS, _MARK_BYTES = 8, 64, 8  # places in the roll, behind the two counts
PRESENT, LEFT, FAILED = 1, 2, 3
REASON_BYTES = 1024
LOOK_S = 0.05  # how often a rank that waits looks whether the others still live
MAX_SLOT_BYTES, MIN_SLOT_BYTES = 4 << 20, 256 << 10
MAX_SLOTS_BYTES = 128 << 20  # of all ranks together, as far as the least of a slot allows
RECORD_BYTES = 512  # at the head of a slot: what its rank calls
NUM_PIECES = 8  # of a lane
MAX_LANE_BYTES = 2 << 20
MAX_LANES_BYTES = 64 << 20
MIN_PIECE_BYTES = 16 << 10
TOO_LITTLE = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EFBIG)
LANE_HEAD_BYTES = 5 * PAGE  # counters and letters


@dataclass(frozen=True)
class ArenaLayout:
    """Where things stand in the arena of a group."""

    size: int
    piece_bytes: int = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slot_bytes = max(MIN_SLOT_BYTES, min(MAX_SLOT_BYTES, MAX_SLOTS_BYTES // (2 * self.size) // PAGE * PAGE))
        object.__setattr__(self, "slot_bytes", slot_bytes)
        share = min(MAX_LANE_BYTES, MAX_LANES_BYTES // self.size**2) // NUM_PIECES
        object.__setattr__(self, "piece_bytes", max(MIN_PIECE_BYTES, share // PAGE * PAGE))

    def header(self, rank: int) -> int:
        """Where a rank's header begins."""
        return rank * PAGE

    @property
    def roll(self) -> int:
        """Where the roll begins, with the counts first."""
        return self.size * PAGE

    def count(self, parity: int) -> int:
        """Where the number of steps stands that all ranks together have posted."""
        return self.roll + 4 * parity

    def marks(self, parity: int) -> int:
        """Where the marks of all ranks' calls stand, one after the other."""
        return self.roll + _MARKS + parity * _MARK_BYTES * self.size

    def slot(self, rank: int, parity: int) -> int:
        """Where a rank's slot begins, with its record first."""
        pages_before = self.size + -(-(self.marks(2) - self.roll) // PAGE)
        return (pages_before + (2 * rank + parity) * (1 + self.slot_bytes // PAGE)) * PAGE

    def data(self, rank: int, parity: int) -> int:
        """Where the data of a rank's slot begins."""
        return self.slot(rank, parity) + PAGE

    def lane(self, source: int, destination: int) -> int:
        """Where the lane from one rank to another begins."""
        return self.slot(self.size, 0) + (source * self.size + destination) * self._lane_bytes

    @property
    def _lane_bytes(self) -> int:
        return LANE_HEAD_BYTES + NUM_PIECES * self.piece_bytes

    @property
    def num_bytes(self) -> int:
        """The arena's length."""
        return self.lane(self.size, 0)


class Arena:
    """The mapped memory of one group, as one of its ranks sees it."""

    def __init__(self, file: int, rank: int, size: int, pids: list[tuple[int, str]]) -> None:
        self.rank, self.size, self.pids = rank, size, pids
        self.layout = ArenaLayout(size)
        self.memory = map_file(file, self.layout.num_bytes)
        self.base = ctypes.addressof(self.memory)
        self.owner = os.getpid()
        self._views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self._states = [futex.word_at(self.header(r) + STATE) for r in range(size)]
        self._num_gone = futex.word_at(self.base + self.layout.roll + _NUM_GONE)

    def header(self, rank: int) -> int:
        """Address of a rank's header."""
        return self.base + self.layout.header(rank)

    def view(self, dtype: torch.dtype, rank: int, parity: int) -> torch.Tensor:
        """The data of a slot as a tensor."""
        key = (dtype, rank, parity)
        if key not in self._views:
            count, start = self.layout.slot_bytes // dtype.itemsize, self.layout.data(rank, parity)
            self._views[key] = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)
        return self._views[key]

    def state(self, rank: int) -> int:
        """How a rank stands to the group: PRESENT, LEFT or FAILED; 0 while it has not come."""
        return self._states[rank].value

    @property
    def is_anyone_gone(self) -> bool:
        """Whether a rank has left or failed."""
        return self._num_gone.value > 0

    def change_state(self, state: int, reason: str = "") -> None:
        """Say how this rank stands to the group, and let everyone look who waits for it."""
        mine = self.header(self.rank)
        text = reason.encode()[: REASON_BYTES - 8]
        ctypes.memmove(mine + REASON, len(text).to_bytes(4, "little") + text, 4 + len(text))
        self._states[self.rank].value = state
        if state > PRESENT:
            futex.count(ctypes.addressof(self._num_gone))
        futex.wake(mine + STEP)
        for parity in (0, 1):
            futex.wake(self.base + self.layout.count(parity))
        for rank in range(self.size):
            futex.add(self.header(rank) + BELL)

    def reason(self, rank: int) -> str:
        """Why a rank failed, in its own words."""
        head = self.header(rank) + REASON
        length = int.from_bytes(ctypes.string_at(head, 4), "little")
        return ctypes.string_at(head + 4, min(length, REASON_BYTES)).decode(errors="replace")

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is gone."""
        pid, started = self.pids[rank]
        return start_of(pid) != started


def map_file(file: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Map a file for as long as the result is used. Python's own mmap would keep the file open, too.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    base = libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory: ctypes.Array[ctypes.c_char] = _weakly_held(num_bytes).from_address(base)
    weakref.finalize(memory, libc.munmap, base, num_bytes).atexit = False
    return memory


def _weakly_held(num_bytes: int) -> Any:
    """Return a type of arrays that, unlike ctypes' own, can be watched until nobody uses them."""
    return type("Memory", (ctypes.c_char * num_bytes,), {})


def start_of(pid: int) -> str:
    """Return when a process began, in the kernel's own count; "" once it has ended."""
    try:  # ranks that wait ask often, and pathlib takes ten times as long
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(file, PAGE).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except OSError:
        return ""
    return "" if fields[0] in b"ZX" else fields[19].decode()


def look_s(size: int) -> float:
    """Return how often a rank that waits looks; all ranks of a large group together no more often than eight would."""
    return LOOK_S * max(1.0, size / 8)
