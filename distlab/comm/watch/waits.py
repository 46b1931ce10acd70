"""Who waits for whom, from records of calls: our recorder's, or dumps of torch's flight recorder.

`waits_of` is the one analysis. `describe` says it rank by rank, `find_deadlock` tells whether no rank can ever move
again, and `is_settled` whether ranks can go on together after an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from distlab.comm.record.file import OPS, RECV, SEND, WAITING
from distlab.comm.record.matching import CallLedger, absences, groups_of, ledger_of
from distlab.comm.record.read import RankRecord, Records, call_of, group_ranks, is_pair

NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
NEVER_S = 5.0  # a call of C++ code that is so old, and that a finished rank never made, will never end
_ALL_MAKE = "every rank must call new_group, also a rank outside the group"


class Wait(NamedTuple):
    """A call that is not known to be over, and the ranks without which it cannot go on.

    Attributes:
        call: the call in words.
        absent: ranks that it needs and that have not come; empty where what others have called may be enough.
        since_s: how long it has lasted.
        lacks: what the absent ranks have not called: "it", "the send" or "the recv".
        is_blocked: the rank does nothing else meanwhile; else it may compute, or wait where nobody sees it.
        op: its operation.
    """

    call: str
    absent: list[int]
    since_s: float
    lacks: str
    is_blocked: bool
    op: str

    def is_forever(self, finished: Collection[int]) -> bool:
        """Whether the rank can never go on, unless an absent rank comes: it is blocked, or who is needed has gone.

        C++ code (DDP's reducer) waits where no wait() can be seen.
        """
        is_left = self.op in NEED_ALL and self.since_s > NEVER_S and not set(self.absent).isdisjoint(finished)
        return bool(self.absent) and (self.is_blocked or is_left)


def blocked_in(record: RankRecord) -> Any:
    """Return the row of the call that a rank is blocked in, or None."""
    waiting = record.rows[(record.rows["end"] == 0) & (record.rows["state"] == WAITING)]
    return waiting[0] if len(waiting) else None


def waits_of(records: Mapping[int, RankRecord], ledger: CallLedger) -> dict[int, Wait]:
    """Return what each rank waits in; ranks whose calls are all over are left out.

    A rank that is blocked in no call may have collectives that are not over: then the first that lacks a rank counts.
    """
    now, found = time.monotonic_ns(), {}
    for rank, record in records.items():
        if number := record.header.making:
            absent = [other for other, one in sorted(records.items()) if one.header.groups_begun < number]
            group = (groups_of(record.header, record.names) or [""])[-1]
            found[rank] = Wait(f"dist.new_group #{number} {group}", absent, 0.0, "it", True, "new_group")
            continue
        row, names, is_blocked = blocked_in(record), record.names, True
        if row is None:
            rows, is_blocked = record.rows[(record.rows["end"] == 0) & ~is_pair(record.rows)], False
            row = next((row for row in rows if waits_for(rank, row, names, ledger)), rows[0] if len(rows) else None)
        if row is not None:
            absent = [] if _may_be_served(rank, row, records) else waits_for(rank, row, names, ledger)
            since_s = (now - int((row["wait"] if is_blocked else 0) or row["start"])) / 1e9
            lacks = {SEND: "the recv", RECV: "the send"}.get(int(row["op"]), "it")
            call = str(call_of(rank, row, names))
            found[rank] = Wait(call, absent, since_s, lacks, is_blocked, OPS[row["op"]])
    return found


def waits_for(rank: int, row: Any, names: list[str], ledger: CallLedger) -> list[int]:
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


def _may_be_served(rank: int, row: Any, records: Mapping[int, RankRecord]) -> bool:
    """Tell whether a receive from anyone has a message under way."""
    if row["op"] != RECV or row["peer"] >= 0:
        return False
    others = [one.rows for other, one in records.items() if other != rank]
    return any(((rows["op"] == SEND) & (rows["end"] == 0) & (rows["peer"] == rank)).any() for rows in others)


def describe(records: Records, world_size: int) -> list[str]:
    """Return one line per rank: where it stands and which ranks it waits for."""
    waits = waits_of(records.by_rank, ledger_of(records))
    return [f"rank {rank} {_line(rank, records.by_rank, waits)}" for rank in range(world_size)]


def _line(rank: int, records: Mapping[int, RankRecord], waits: Mapping[int, Wait]) -> str:
    wait, record = waits.get(rank), records.get(rank)
    if wait is None:
        if record is None or not len(record.rows):
            return "has made no call to torch.distributed"
        last, names = record.rows[-1], record.names
        since_s = (time.monotonic_ns() - int(last["start"])) / 1e9
        return f"waits in no call; its last was {call_of(rank, last, names)}, {since_s:.1f} s ago"
    if wait.op == "new_group":
        return f"waits in {wait.call}, which every rank must call"
    reasons = [f"rank {other} has not called {wait.lacks}{_instead(other, records)}" for other in wait.absent]
    if not wait.is_blocked:
        return "; ".join([f"has called {wait.call} {wait.since_s:.1f} s ago and it is not known to be over", *reasons])
    reasons = reasons or ["all that it needs have called it"]
    return "; ".join([f"waits in {wait.call} for {wait.since_s:.1f} s", *reasons])


def _instead(rank: int, records: Mapping[int, RankRecord]) -> str:
    """Say what a rank does instead of the call that a different one needs."""
    record = records.get(rank)
    if record is None or not len(record.rows):
        return " (it has made no call)"
    row = blocked_in(record)
    if row is not None:
        return f": it is in {call_of(rank, row, record.names)}"
    return f": its last call was {call_of(rank, record.rows[-1], record.names)}"


def find_deadlock(records: Mapping[int, RankRecord], ledger: CallLedger, finished: Collection[int] = ()) -> str | None:
    """Return why no rank can ever move again, or None while one may; `finished`: ranks whose function has returned.

    A slow job must never be ended. So each rank must have returned or be blocked in a call that no call of the others
    can complete. The caller makes sure that nothing moves.
    """
    lines, waits = [], waits_of(records, ledger)
    for rank in sorted(records.keys() - set(finished)):
        wait = waits.get(rank)
        if wait is None or records[rank].header.aside or not wait.is_forever(finished):
            return None
        why = ", ".join(absences(wait.absent, finished, wait.lacks))
        is_group = wait.op == "new_group"
        lasted, rule = ("", f"; {_ALL_MAKE}") if is_group else (f" for {wait.since_s:.1f} s", "")
        lines.append(f"  rank {rank} waits in {wait.call}{lasted}: {why}{rule}")
    if not lines:
        return None
    done = f"; finished: ranks {sorted(finished)}" if finished else ""
    return "\n".join([f"deadlock: every rank that has not finished waits, and none can go on{done}", *lines])


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
