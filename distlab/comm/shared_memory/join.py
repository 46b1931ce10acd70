"""How the ranks of a group come to map one memory, or find out together that they cannot.

Each rank says through the store where it runs. The first compares, makes the memory and tells the others where it
stands; they map it and say so in it. Where one of them cannot, all are told the same line, and all go the same way.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from distlab.comm.shared_memory import futex
from distlab.comm.shared_memory.arena import BELL, PRESENT, Arena, ArenaLayout, start_of

PASS_GLOO = "pass backend='gloo'"


class CannotShare(RuntimeError):
    """The ranks cannot share memory: every rank of the group is told the same line."""


def join(store: Any, rank: int, members: list[int], timeout_s: float, reason: str = "") -> Arena:
    """Make the arena of a group, or map it; every member calls this.

    Args:
        store: through which the members find each other.
        rank: this process's number among the members.
        members: global rank of each.
        timeout_s: how long to wait for each other rank.
        reason: why this rank does not want to share memory.

    Raises:
        CannotShare: on every rank.
        RuntimeError: one does not come in time, or has ended.
    """
    store.set(f"place{rank}", json.dumps(_own_place(reason)))
    if rank == 0:
        return _make(store, members, timeout_s)
    told = _told(store, "arena", rank, members, 0, timeout_s)
    if isinstance(told, str):
        raise CannotShare(told)
    try:
        file = os.open(f"/proc/{told['pid']}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            arena = Arena(file, rank, len(members), [tuple(pid) for pid in told["pids"]])
        finally:
            os.close(file)
    except OSError as error:
        text = _cannot_map(members[rank], len(members), error)
        store.set("refused", text)
        raise CannotShare(text) from error
    arena.change_state(PRESENT)
    _await_all(arena, store, members, timeout_s, (0,))
    return arena


def _make(store: Any, members: list[int], timeout_s: float) -> Arena:
    """Make the arena, hand it to the others and wait until all have it."""
    size, file = len(members), -1
    places = [_told(store, f"place{rank}", 0, members, rank, timeout_s) for rank in range(size)]
    pids = [(place["pid"], place["start"]) for place in places]
    text = _why_not(places, members)
    try:
        if not text:
            try:
                file = os.memfd_create("distlab", os.MFD_CLOEXEC)
                os.ftruncate(file, ArenaLayout(size).num_bytes)
                arena = Arena(file, 0, size, pids)
            except OSError as error:
                text = _cannot_map(members[0], size, error)
        store.set("arena", json.dumps(text or {"pid": os.getpid(), "file": file, "pids": pids}))
        if text:
            raise CannotShare(text)
        _await_all(arena, store, members, timeout_s, range(1, size))
    finally:
        if file >= 0:
            os.close(file)
    arena.change_state(PRESENT)
    return arena


def _why_not(places: Sequence[dict[str, Any]], members: list[int]) -> str:
    """Return why ranks at these places cannot share memory, or ""."""
    names = {"boot": "kernel", "processes": "container (process namespace)", "user": "user"}
    for place, member in zip(places, members, strict=True):
        host, here, there = place["host"], place["place"], places[0]["place"]
        if place["reason"]:
            return f"backend 'shared' does not work for rank {member} on {host}: {place['reason']}; {PASS_GLOO}"
        if here != there:
            return (
                f"backend 'shared' needs all ranks on one host, in one container, of one user: rank {member} runs on "
                f"{host} and rank {members[0]} on {places[0]['host']}, which differ in "
                f"{' and '.join(names[key] for key in here if here[key] != there[key])}; {PASS_GLOO}"
            )
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
        f"backend 'shared': rank {rank} cannot map {num_bytes >> 20} MiB of addresses, of which {size} ranks use "
        f"what their calls need: {error.strerror}; run all as one user in one container, raise the limits (ulimit -v, "
        f"ulimit -f), or {PASS_GLOO}"
    )


def _await_all(arena: Arena, store: Any, members: list[int], timeout_s: float, ranks: Iterable[int]) -> None:
    """Wait until some ranks have said that they are present.

    Raises:
        CannotShare: one may not map the memory.
        RuntimeError: one has ended or does not come in time.
    """
    deadline, me, mine = time.monotonic() + timeout_s, members[arena.rank], arena.header(arena.rank) + BELL
    bell = futex.word_at(mine)
    for rank in ranks:
        while True:
            seen = bell.value
            if arena.state(rank):
                break
            futex.wait(mine, seen)
            if arena.state(rank):
                break
            if store.check(["refused"]):
                raise CannotShare(store.get("refused").decode())
            reason = arena.why_gone(rank, members)
            if time.monotonic() > deadline:
                reason = f"timed out waiting {timeout_s * 1000:.0f} ms for rank {members[rank]} to join the group"
            if reason:
                raise RuntimeError(f"rank {me}: {reason}")


def kernel_and_user() -> dict[str, str | int]:
    """Return this process's kernel, process namespace and user: processes can reach each other where all three agree.

    Raises:
        OSError: this system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "processes": os.readlink("/proc/self/ns/pid"), "user": os.getuid()}


def _own_place(reason: str) -> dict[str, Any]:
    """Say where this process runs: what must be equal for two to share memory, and how to find it."""
    place: dict[str, Any] = {}
    reason = reason or futex.why_not_here()
    if not reason:
        try:
            place = kernel_and_user()
        except OSError as error:
            reason = f"it needs {error.filename}, and this system has none ({error.strerror})"
    return {
        "place": place,
        "reason": reason,
        "host": platform.node(),
        "pid": os.getpid(),
        "start": start_of(os.getpid()),
    }
