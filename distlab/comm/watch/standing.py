"""Where each rank stands, from its record: what it waits in, for which ranks, and that in words.

`is_settled` tells whether ranks can go on together after an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from distlab.comm.record.file import OPS, RECV, SEND, WAITING
from distlab.comm.record.header import Header
from distlab.comm.record.matching import Ledger, groups_of, ledger_of
from distlab.comm.record.read import Records, call_of, group_ranks, is_pair

NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class Standing(NamedTuple):
    """Where one rank stands: calls not known to be over, its newest call, and whether other threads make calls too."""

    names: list[str]
    unfinished: NDArray[Any]
    last: Any
    header: Header

    @property
    def group(self) -> str:
        """Members and line of the last group that it has begun to make."""
        return (groups_of(self.header, self.names) or [""])[-1]

    @property
    def blocked_in(self) -> Any:
        """The row of the call that the rank is blocked in, or None."""
        waiting = self.unfinished[self.unfinished["state"] == WAITING]
        return waiting[0] if len(waiting) else None


def standings_of(records: Records) -> dict[int, Standing]:
    """Return where every rank stands."""
    found = {}
    for rank, record in records.by_rank.items():
        unfinished = record.rows[(record.rows["end"] == 0)]
        last = record.rows[-1] if len(record.rows) else None
        found[rank] = Standing(record.names, unfinished, last, record.header)
    return found


def waits_for(rank: int, row: Any, names: list[str], ledger: Ledger) -> list[int]:
    """Return the ranks without which this call cannot go on; empty where what others have called may be enough.

    Only what is certain counts: a broadcast may reach a rank as soon as its root has called, while an all_reduce needs
    every member. gloo's send returns once the receive is there.
    """
    members, peer, op = group_ranks(names[row["group"]]), int(row["peer"]), OPS[row["op"]]
    others = [other for other in members if other != rank]
    if row["op"] in (SEND, RECV):
        if peer < 0:
            return others
        return [] if ledger.has_made(peer, row, receive=bool(row["op"] == SEND)) else [peer]
    absent = [other for other in others if not ledger.has_made(other, row)]
    if op in NEED_ALL or (op in ("reduce", "gather") and rank == peer):
        return absent
    if op in ("broadcast", "scatter") and rank != peer:
        return [peer] if peer in absent else []
    return absent if len(absent) == len(others) else []


def describe(records: Records, world_size: int) -> list[str]:
    """Return one line per rank: where it stands and which ranks it waits for."""
    standings, ledger, now = standings_of(records), ledger_of(records), time.monotonic_ns()
    return [_line(rank, standings, ledger, now) for rank in range(world_size)]


def _line(rank: int, standings: Mapping[int, Standing], ledger: Ledger, now: int) -> str:
    standing = standings.get(rank)
    if standing is not None and (number := standing.header.making):
        return f"rank {rank} waits in dist.new_group #{number} {standing.group}, which every rank must call"
    if standing is None or standing.last is None:
        return f"rank {rank} has made no call to torch.distributed"
    row, names = standing.blocked_in, standing.names
    is_blocked = row is not None
    if not is_blocked:
        collectives = standing.unfinished[~is_pair(standing.unfinished)]
        if not len(collectives):
            last, since = call_of(rank, standing.last, names), (now - int(standing.last["start"])) / 1e9
            return f"rank {rank} waits in no call; its last was {last}, {since:.1f} s ago"
        row = collectives[0]
    call, since = call_of(rank, row, names), (now - int(row["wait" if is_blocked else "start"])) / 1e9
    reasons = [f"rank {other} {_excuse(other, row, standings)}" for other in waits_for(rank, row, names, ledger)]
    if not is_blocked:
        return "; ".join([f"rank {rank} has called {call} {since:.1f} s ago and it is not known to be over", *reasons])
    reasons = reasons or ["all that it needs have called it"]
    return "; ".join([f"rank {rank} waits in {call} for {since:.1f} s", *reasons])


def _excuse(rank: int, wanted: Any, standings: Mapping[int, Standing]) -> str:
    """Say what a rank does instead of the call that another needs."""
    other_end = {SEND: "the recv", RECV: "the send"}.get(int(wanted["op"]), "it")
    missing = f"has not called {other_end}"
    standing = standings.get(rank)
    if standing is None or standing.last is None:
        return f"{missing} (it has made no call)"
    row = standing.blocked_in
    if row is not None:
        return f"{missing}: it is in {call_of(rank, row, standing.names)}"
    return f"{missing}: its last call was {call_of(rank, standing.last, standing.names)}"


def is_settled(records: Records, ranks: Collection[int]) -> bool:
    """Return whether the ranks' calls are all over, every message was received, and every collective was made by all.

    `ranks` are those that had a job; the others' calls belong to an earlier one. In doubt the answer is no.
    """
    made: dict[int, Counter[tuple[tuple[int, ...], str]]] = {rank: Counter() for rank in ranks}
    under_way = 0
    for rank in ranks:
        if rank not in records.by_rank or records.dropped(rank):
            return False
        for call in records.calls(rank):
            if call.state != "done":
                return False
            if call.op in ("send", "recv"):
                under_way += 1 if call.op == "send" else -1
            else:
                made[rank][call.group, call.op] += 1
    for count in made.values():
        for (group, op), number in count.items():
            if any(made.get(other, Counter())[group, op] != number for other in group):
                return False
    return under_way == 0
