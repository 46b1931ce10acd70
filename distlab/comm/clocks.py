"""How far the ranks' clocks are apart, so that traces of several machines lie on one time line."""

from __future__ import annotations

import hashlib
import statistics
import uuid
from pathlib import Path
from time import monotonic_ns

import torch
import torch.distributed as dist

from distlab.comm.agree import all_gather_bytes, group_device
from distlab.comm.p2p import Receive, Send, exchange

ROUNDS = 20
BEST = 5


def clock_offsets_ns(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Measure the nanoseconds to add to each rank's monotonic clock to get that of the group's rank 0.

    Every rank of the group calls this and gets the same answer. Processes on one machine share the clock: 0 exactly.
    Between machines rank 0 plays ping-pong with one rank of each.

    Error: each of 20 rounds is off by at most half its round trip (where all of it was spent one way); the median of
        the quickest rounds counts.
    """
    machines = _gather(_machine(), group)
    rank = dist.get_rank(group)
    first = {machine: machines.index(machine) for machine in machines}
    measured = {machines[0]: 0}
    for machine, peer in first.items():
        if peer != 0:
            measured[machine] = measure_offset_ns(peer, group) if rank in (0, peer) else 0
    mine = measured[machines[rank]] if rank in first.values() else 0
    known = _gather(mine, group)
    return tuple(known[first[machine]] for machine in machines)


def measure_offset_ns(peer: int, group: dist.ProcessGroup | None = None) -> int:
    """Measure the peer's offset to the group's rank 0; these two ranks call this, and both get the answer.

    Rank 0 notes when it sends and when the answer, the peer's time, is back: the peer read its clock midway, give or
    take half the round trip. The median of the quickest rounds counts.
    """
    device = group_device(group)
    times = torch.zeros(1, dtype=torch.int64, device=device)
    if dist.get_rank(group) != 0:
        for _ in range(ROUNDS):
            exchange(Receive(times, 0), group=group)
            times.cpu()  # on a GPU: wait until it has arrived
            exchange(Send(torch.tensor([monotonic_ns()], device=device), 0), group=group)
        exchange(Receive(times, 0), group=group)
        return int(times.item())
    rounds = []
    for _ in range(ROUNDS):
        start = monotonic_ns()
        exchange(Send(times, peer), group=group)
        exchange(Receive(times, peer), group=group)
        theirs = int(times.item())
        end = monotonic_ns()
        rounds.append((end - start, (start + end) // 2 - theirs))
    offset = int(statistics.median(offset for _, offset in sorted(rounds)[:BEST]))
    exchange(Send(torch.tensor([offset], device=device), peer), group=group)
    return offset


def _machine() -> int:
    """A number that processes share when they share a clock: from the boot's id on Linux, else from the machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    text = path.read_text() if path.exists() else str(uuid.getnode())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _gather(value: int, group: dist.ProcessGroup | None) -> list[int]:
    data = value.to_bytes(8, "big", signed=True)
    return [int.from_bytes(other, "big", signed=True) for other in all_gather_bytes(data, group)]
