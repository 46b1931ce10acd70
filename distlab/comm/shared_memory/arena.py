"""The memory in which the ranks of a group meet: one nameless file, mapped by all.

The group's first rank makes it (memfd: it has no name in any folder) and tells the others through the store where it
stands under `/proc`. Once all have mapped it, nobody holds it open: it is gone with the last of them, however they end.
Where one of them cannot map it, all are told the same line, and all go the same way.

    headers     one page per rank: its step, its state, its bell, why it failed
    slots       two per rank: what it shows to the others in even and in odd steps
    rings       one for each ordered pair of ranks: messages from the one to the other

Only pages that are used take memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distlab.comm.shared_memory import futex

PAGE = 4096
STEP, STATE, BELL, GONE, REASON = 0, 64, 128, 192, 256  # places in a header
PRESENT, LEFT, FAILED = 1, 2, 3
REASON_BYTES = 1024
MAX_SLOT_BYTES, MIN_SLOT_BYTES = 4 << 20, 256 << 10
MAX_SLOTS_BYTES = 128 << 20  # of all ranks together, as far as the least of a slot allows
RECORD_BYTES = 512  # at the head of a slot: what its rank calls
MAX_RING_BYTES, MIN_PIECE_BYTES = 2 << 20, 64 << 10  # a ring has at least two pieces, and whole ones
MAX_RINGS_BYTES = 64 << 20  # of all rings together, as far as the least of a ring allows


class ArenaLayout:
    """Where things stand in the arena of a group of so many ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slot_bytes = max(MIN_SLOT_BYTES, min(MAX_SLOT_BYTES, MAX_SLOTS_BYTES // (2 * size) // PAGE * PAGE))
        self.ring_bytes = max(2, min(MAX_RING_BYTES, MAX_RINGS_BYTES // size**2) // MIN_PIECE_BYTES) * MIN_PIECE_BYTES

    def header(self, rank: int) -> int:
        """Where a rank's header begins."""
        return rank * PAGE

    def slot(self, rank: int, parity: int) -> int:
        """Where a rank's slot begins, with its record first."""
        return self.size * PAGE + (2 * rank + parity) * (PAGE + self.slot_bytes)

    def data(self, rank: int, parity: int) -> int:
        """Where the data of a rank's slot begins."""
        return self.slot(rank, parity) + PAGE

    def ring(self, source: int, destination: int) -> int:
        """Where the ring from one rank to a different one begins, with a page for its two counts first."""
        return self.slot(self.size, 0) + (source * self.size + destination) * (PAGE + self.ring_bytes)

    @property
    def num_bytes(self) -> int:
        """The arena's length."""
        return self.ring(self.size, 0)


class Arena:
    """The mapped memory of one group, as one of its ranks sees it; the word `gone` is 1 once a rank left or failed."""

    def __init__(self, file: int, rank: int, size: int, pids: list[tuple[int, str]]) -> None:
        self.rank, self.size, self.pids = rank, size, pids
        self.layout = ArenaLayout(size)
        self.memory = map_file(file, self.layout.num_bytes)
        self.base = ctypes.addressof(self.memory)
        self.owner = os.getpid()
        self._views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self._states = [futex.word_at(self.header(r) + STATE) for r in range(size)]
        self.gone = futex.word_at(self.header(0) + GONE)

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

    def change_state(self, state: int, reason: str = "") -> None:
        """Say how this rank stands to the group, and let everyone look who waits for it."""
        mine = self.header(self.rank)
        text = reason.encode()[: REASON_BYTES - 8]
        ctypes.memmove(mine + REASON, len(text).to_bytes(8, "little") + text, 8 + len(text))
        self._states[self.rank].value = state
        if state > PRESENT:
            self.gone.value = 1
        futex.wake(mine + STEP)
        for rank in range(self.size):
            futex.add(self.header(rank) + BELL)

    def why_gone(self, rank: int, members: list[int]) -> str:
        """Return why a rank will never come, or "" where it may; begins as gloo's message does."""
        if self.state(rank) > PRESENT:
            reason = text_at(self.header(rank) + REASON, REASON_BYTES - 8)
            what = f"failed before ({reason})" if reason else "has left the group"
        elif start_of(self.pids[rank][0]) != self.pids[rank][1]:
            what = f"(process {self.pids[rank][0]}) has ended"
        else:
            return ""
        return f"connection closed by peer: rank {members[rank]} {what}"


def text_at(address: int, most_bytes: int) -> str:
    """Return a text in shared memory, before which its length stands in 8 bytes."""
    length = int.from_bytes(ctypes.string_at(address, 8), "little")
    return ctypes.string_at(address + 8, min(length, most_bytes)).decode(errors="replace")


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
    watched: Any = type("Memory", (ctypes.c_char * num_bytes,), {})  # ctypes' own arrays cannot be watched
    memory: ctypes.Array[ctypes.c_char] = watched.from_address(base)
    weakref.finalize(memory, libc.munmap, base, num_bytes).atexit = False
    return memory


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


class CannotShare(RuntimeError):
    """The ranks cannot share memory: every rank of the group is told the same line."""


def join(store: Any, rank: int, members: list[int], timeout_s: float) -> Arena:
    """Make the arena of a group, or map it; every member calls this.

    Args:
        store: through which the members find each other.
        rank: this process's number among the members.
        members: global rank of each.
        timeout_s: how long to wait for each other rank.

    Raises:
        CannotShare: on every rank.
        RuntimeError: one does not come in time, or has ended.
    """
    store.set(f"place{rank}", json.dumps([futex.why_not_here(), _here(), os.getpid(), start_of(os.getpid())]))
    made = _make(store, members, timeout_s) if rank == 0 else -1
    try:
        told = _told(store, "arena", rank, members, 0, timeout_s)
        if isinstance(told, str):
            raise CannotShare(told)
        place = os.open(f"/proc/{told['pids'][0][0]}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
        with os.fdopen(place, "rb", buffering=0) as file:
            arena = Arena(file.fileno(), rank, len(members), [tuple(pid) for pid in told["pids"]])
        arena.change_state(PRESENT)
        _await_all(arena, store, members, timeout_s)
        return arena
    except OSError as error:
        text = _cannot_map(members[rank], len(members), error)
        store.set("refused", text)
        raise CannotShare(text) from error
    finally:
        if made >= 0:
            os.close(made)


def _make(store: Any, members: list[int], timeout_s: float) -> int:
    """Make the memory and tell all where it stands, or why they cannot share it; return its file, or -1."""
    size, file, text = len(members), -1, ""
    places = [_told(store, f"place{rank}", 0, members, rank, timeout_s) for rank in range(size)]
    pids = [(pid, start) for _, _, pid, start in places]
    for (reason, here, _, _), member in zip(places, members, strict=True):
        if reason or here != places[0][1]:
            reason = reason or f"it runs on {here}, and rank {members[0]} on {places[0][1]}"
            text = f"backend 'shared' does not work for rank {member}: {reason}; pass backend='gloo'"
    try:
        if not text:
            file = os.memfd_create("distlab", os.MFD_CLOEXEC)
            os.ftruncate(file, ArenaLayout(size).num_bytes)
    except OSError as error:
        text = _cannot_map(members[0], size, error)
    store.set("arena", json.dumps(text or {"file": file, "pids": pids}))
    return file


def _here() -> str:
    """Return this host and container, in words that are equal where processes can reach each other."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{platform.node()} (kernel {boot}, container {os.readlink('/proc/self/ns/pid')})"
    return ""


def _told(store: Any, key: str, rank: int, members: list[int], other: int, timeout_s: float) -> Any:
    """Return what a different rank has said through the store.

    Raises:
        RuntimeError: it says nothing in time.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {members[rank]}: timed out waiting {timeout_s * 1000:.0f} ms for rank {members[other]} to make the "
            f"group of ranks {members}; every rank must make all groups, in the same order"
        ) from error
    return json.loads(store.get(key))


def _cannot_map(rank: int, size: int, error: OSError) -> str:
    num_bytes = ArenaLayout(size).num_bytes
    return (
        f"backend 'shared': rank {rank} on {platform.node()} cannot map {num_bytes >> 20} MiB of addresses, of which "
        f"{size} ranks use what their calls need: {error.strerror}; run all as one user in one container of one host, "
        "raise the limits (ulimit -v, ulimit -f), or pass backend='gloo'"
    )


def _await_all(arena: Arena, store: Any, members: list[int], timeout_s: float) -> None:
    """Wait until all ranks have said that they are present.

    Raises:
        CannotShare: one may not map the memory.
        RuntimeError: one has ended or does not come in time.
    """
    deadline, me, mine = time.monotonic() + timeout_s, members[arena.rank], arena.header(arena.rank) + BELL
    bell = futex.word_at(mine)
    for rank in range(arena.size):
        seen = bell.value
        while not arena.state(rank):
            futex.wait(mine, seen)
            seen, reason = bell.value, arena.why_gone(rank, members)
            if store.check(["refused"]):
                raise CannotShare(store.get("refused").decode())
            if time.monotonic() > deadline:
                reason = f"timed out waiting {timeout_s * 1000:.0f} ms for rank {members[rank]} to join the group"
            if reason and not arena.state(rank):
                raise RuntimeError(f"rank {me}: {reason}")
