"""The memory in which the ranks of a group meet: one nameless file, mapped by all.

The group's first rank makes it (memfd: it has no name in any folder) and tells the others where it stands under
`/proc`. Once all have mapped it, nobody holds it open: it is gone with the last of them, however they end.

    headers     one page a rank: its step, its state, its bell, who it is
    slots       two a rank: what it shows to the others in even and in odd steps
    lanes       one for each ordered pair of ranks: messages from the one to the other

Only pages that are used take memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distlab.shared_memory import futex

PAGE = 4096
STEP, STATE, BELL, REASON = 0, 64, 128, 256  # places in a header
PRESENT, LEFT, FAILED = 1, 2, 3
REASON_BYTES = 1024
LOOK_S = 0.05  # how often a rank that waits looks whether the others still live
SLOT_BYTES = 4 << 20
RECORD_BYTES = 512  # at the head of a slot: what its rank calls
NUM_PIECES = 8  # of a lane
MAX_LANE_BYTES = 2 << 20
MAX_LANES_BYTES = 64 << 20
MIN_PIECE_BYTES = 8 << 10
TOO_LITTLE = (errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EFBIG)
LANE_HEAD_BYTES = 5 * PAGE  # counters, letters and receipts


@dataclass(frozen=True)
class Layout:
    """Where things stand in the arena of a group."""

    size: int
    piece_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        share = min(MAX_LANE_BYTES, MAX_LANES_BYTES // self.size**2) // NUM_PIECES
        object.__setattr__(self, "piece_bytes", max(MIN_PIECE_BYTES, share // PAGE * PAGE))

    def header(self, rank: int) -> int:
        """Where a rank's header begins."""
        return rank * PAGE

    def slot(self, rank: int, parity: int) -> int:
        """Where a rank's slot begins, with its record first."""
        return (self.size + (2 * rank + parity) * (1 + SLOT_BYTES // PAGE)) * PAGE

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
        self.layout = Layout(size)
        self.memory = map_file(file, self.layout.num_bytes)
        self.base = ctypes.addressof(self.memory)
        self.owner = os.getpid()
        self._views: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}
        self._states = [futex.word_at(self.header(r) + STATE) for r in range(size)]

    def header(self, rank: int) -> int:
        """Address of a rank's header."""
        return self.base + self.layout.header(rank)

    def view(self, dtype: torch.dtype, rank: int, parity: int) -> torch.Tensor:
        """The data of a slot as a tensor."""
        key = (dtype, rank, parity)
        if key not in self._views:
            count, start = SLOT_BYTES // dtype.itemsize, self.layout.data(rank, parity)
            self._views[key] = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)
        return self._views[key]

    def state(self, rank: int) -> int:
        """How a rank stands to the group: PRESENT, LEFT or FAILED; 0 while it has not come."""
        return self._states[rank].value

    def change_state(self, state: int, reason: str = "") -> None:
        """Say how this rank stands to the group, and let everyone look who waits for it."""
        mine = self.header(self.rank)
        text = reason.encode()[: REASON_BYTES - 8]
        ctypes.memmove(mine + REASON, len(text).to_bytes(4, "little") + text, 4 + len(text))
        futex.fence()
        self._states[self.rank].value = state
        futex.wake(mine + STEP)
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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _own_place() -> dict[str, Any]:
    """Say where this process runs: what must be equal for two to share memory, and how to find it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place = {"boot": boot, "processes": os.readlink("/proc/self/ns/pid"), "user": os.getuid()}
    return {"place": place, "host": platform.node(), "pid": os.getpid(), "start": start_of(os.getpid())}


def join(store: Any, rank: int, members: list[int], timeout_s: float) -> Arena:
    """Make the arena of a group, or map it; every member calls this.

    Raises:
        RuntimeError: the ranks cannot share memory (all get the same line), or one does not come in time.
    """
    reason = futex.why_not_here()
    if reason:
        raise RuntimeError(f"backend 'shared' does not work here: {reason}; pass backend='gloo'")
    size = len(members)
    store.set(f"place{rank}", json.dumps(_own_place()))
    if rank == 0:
        return _make(store, members, timeout_s)
    told = _told(store, "arena", rank, members, 0, timeout_s)
    if isinstance(told, str):
        raise RuntimeError(told)
    try:
        file = os.open(f"/proc/{told['pid']}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            arena = Arena(file, rank, size, [tuple(pid) for pid in told["pids"]])
        finally:
            os.close(file)
    except OSError as error:
        text = (
            f"backend 'shared': rank {members[rank]} may not map the memory of rank {members[0]} (process "
            f"{told['pid']}): {error.strerror}; run both as one user in one container, or pass backend='gloo'"
        )
        if error.errno in TOO_LITTLE:
            text = _too_little(members[rank], size, error)
        store.set("refused", text)
        raise RuntimeError(text) from error
    arena.change_state(PRESENT)
    _await_all(arena, store, members, timeout_s, (0,))
    return arena


def _make(store: Any, members: list[int], timeout_s: float) -> Arena:
    """Make the arena, hand it to the others and wait until all have it."""
    size = len(members)
    places = [_told(store, f"place{rank}", 0, members, rank, timeout_s) for rank in range(size)]
    different = next((r for r in range(size) if places[r]["place"] != places[0]["place"]), None)
    if different is not None:
        text = (
            f"backend 'shared' needs all ranks on one host, in one container, of one user: rank {members[different]} "
            f"runs on {places[different]['host']} and rank {members[0]} on {places[0]['host']}, which differ in "
            f"{_difference(places[different]['place'], places[0]['place'])}; pass backend='gloo'"
        )
        store.set("arena", json.dumps(text))
        raise RuntimeError(text)
    file = os.memfd_create("distlab", os.MFD_CLOEXEC)
    try:
        pids = [(place["pid"], place["start"]) for place in places]
        try:
            os.ftruncate(file, Layout(size).num_bytes)
            arena = Arena(file, 0, size, pids)
        except OSError as error:
            text = _too_little(members[0], size, error)
            store.set("arena", json.dumps(text))
            raise RuntimeError(text) from error
        store.set("arena", json.dumps({"pid": os.getpid(), "file": file, "pids": pids}))
        try:
            _await_all(arena, store, members, timeout_s, range(1, size))
        except RuntimeError as error:
            store.set("refused", str(error))  # the others wait for this rank
            raise
    finally:
        os.close(file)
    arena.change_state(PRESENT)
    return arena


def _told(store: Any, key: str, rank: int, members: list[int], other: int, timeout_s: float) -> Any:
    """Return what another rank has said through the store.

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


def _too_little(rank: int, size: int, error: OSError) -> str:
    return (
        f"backend 'shared': rank {rank} cannot map {Layout(size).num_bytes >> 20} MiB of addresses, of which a group "
        f"of {size} ranks uses what its calls need: {error.strerror}; raise the limits (ulimit -v, ulimit -f), or pass "
        "backend='gloo'"
    )


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    names = {"boot": "kernel", "processes": "container (process namespace)", "user": "user"}
    return " and ".join(names[key] for key in one if one[key] != other[key])


def _await_all(arena: Arena, store: Any, members: list[int], timeout_s: float, ranks: Any) -> None:
    """Wait until some ranks have said that they are present.

    Raises:
        RuntimeError: one was refused, has ended or does not come in time.
    """
    deadline, me = time.monotonic() + timeout_s, members[arena.rank]
    bell = futex.word_at(arena.header(arena.rank) + BELL)
    for rank in ranks:
        while True:
            seen = bell.value
            futex.fence()
            if arena.state(rank):
                break
            futex.wait(arena.header(arena.rank) + BELL, seen, futex.timeout_at(LOOK_S))
            if arena.state(rank):
                break
            if store.check(["refused"]):
                raise RuntimeError(store.get("refused").decode())
            if arena.has_ended(rank):
                raise RuntimeError(f"rank {me}: connection closed by peer: rank {members[rank]} has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {me}: timed out waiting {timeout_s * 1000:.0f} ms for rank {members[rank]} to join the group"
                )
