"""Say from outside who waits for whom: hangs, calls that do not fit, and deadlocks, while the ranks stand still.

`waits_of` is the one analysis of records. `describe` says it rank by rank, `find_deadlock` tells whether no rank can
ever move again, and `is_settled` whether ranks can go on together after an error. A `Watchdog` looks again and again:
the launcher's reads the ranks' record files, so it works when they cannot answer. A slow job must never be ended: it is
a deadlock only if no rank can go on, and nothing has moved for two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record import matching
from distlab.comm.record.file import DONE, FAILED, OPS, RECV, SEND, WAITING, RecordHeader
from distlab.comm.record.read import RankRecord, RecordReader, Records, call_of, group_ranks, is_pair

NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
NEVER_S = 5.0  # a call of C++ code that is so old, and that a finished rank never made, will never end


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


def waits_of(records: Mapping[int, RankRecord], ledger: matching.CallLedger) -> dict[int, Wait]:
    """Return what each rank waits in; ranks whose calls are all over are left out.

    A rank that is blocked in no call may have collectives that are not over: then the first that lacks a rank counts.
    """
    now, found = time.monotonic_ns(), {}
    for rank, record in records.items():
        if number := record.header.making:
            absent = [other for other, one in sorted(records.items()) if one.header.groups_begun < number]
            group = (matching.groups_of(record.header, record.names) or [""])[-1]
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


def waits_for(rank: int, row: Any, names: list[str], ledger: matching.CallLedger) -> list[int]:
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
    waits = waits_of(records.by_rank, matching.ledger_of(records))
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
    record = records.get(rank)
    if record is None or not len(record.rows):
        return " (it has made no call)"
    row = blocked_in(record)
    if row is not None:
        return f": it is in {call_of(rank, row, record.names)}"
    return f": its last call was {call_of(rank, record.rows[-1], record.names)}"


def find_deadlock(
    records: Mapping[int, RankRecord], ledger: matching.CallLedger, finished: Collection[int] = ()
) -> str | None:
    """Return why no rank can ever move again, or None while one may; `finished`: ranks whose function has returned.

    A slow job must never be ended. So each rank must have returned or be blocked in a call that no call of the others
    can complete. The caller makes sure that nothing moves.
    """
    lines, waits = [], waits_of(records, ledger)
    for rank in sorted(records.keys() - set(finished)):
        wait = waits.get(rank)
        if wait is None or records[rank].header.aside or not wait.is_forever(finished):
            return None
        why = ", ".join(matching.absences(wait.absent, finished, wait.lacks))
        is_group = wait.op == "new_group"
        lasted = "" if is_group else f" for {wait.since_s:.1f} s"
        rule = "; every rank must call new_group, also a rank outside the group" if is_group else ""
        lines.append(f"  rank {rank} waits in {wait.call}{lasted}: {why}{rule}")
    if not lines:
        return None
    done = f"; finished: ranks {sorted(finished)}" if finished else ""
    return "\n".join([f"deadlock: every rank that has not finished waits, and none can go on{done}", *lines])


def is_settled(records: Records, ranks: Collection[int]) -> bool:
    """Return whether the ranks' calls are all over, every message was received, and every collective was made by all.

    `ranks` are those that had a job; the others' calls belong to an earlier one. In doubt the answer is no.
    """
    if any(rank not in records.by_rank or records.dropped(rank) for rank in ranks):
        return False
    ledger, own = matching.CallLedger(), [records.by_rank[rank] for rank in ranks]
    for rank, record in zip(ranks, own, strict=True):
        ledger.add(rank, record.rows, record.names)
    is_over = all((record.rows["state"] == DONE).all() for record in own)
    return is_over and ledger.disagreement() is None and not len(ledger.open)


STABLE_S = 2.0
MISMATCH_GRACE_S = 0.3  # time for the other members to arrive, so that the message can name them all


class _Follower:
    def __init__(self, reader: RecordReader, header: RecordHeader) -> None:
        self.reader, self.header, self.read = reader, header, header.first - 1
        self._open = np.empty(0, np.uint64)  # numbers of the calls that were unfinished at the last look

    def new_rows(self, header: RecordHeader) -> tuple[NDArray[Any], bool]:
        """Return the rows written since the last look, and whether some were overwritten unread."""
        self.header = header
        rows = self.reader.rows(header, self.read)
        lost = len(rows) < header.newest - self.read
        self.read = header.newest
        self._open = np.concatenate([self._open, rows["n"]])
        return rows, lost

    def unfinished(self) -> NDArray[Any]:
        """Return the rows of calls that are not known to be over; looks only at those that were not before."""
        rows = self.reader.pick(self.header, self._open)
        open_rows: NDArray[Any] = rows[rows["end"] == 0]
        self._open = open_rows["n"].copy()
        return open_rows

    def standing(self) -> RankRecord:
        """Return where the rank stands now: of its rows those that are not known to be over, and the last."""
        unfinished, last = self.unfinished(), self.reader.rows(self.header, self.header.newest - 1)
        rows = np.concatenate([unfinished[unfinished["n"] < self.header.newest], last])
        return RankRecord(self.header, rows, self.reader.totals(), self.reader.read_names())


class Watchdog:
    """Look at the ranks' records again and again; reads only what is new (about 0.2 ms per look for four ranks).

    One for each job.

    Args:
        folder: where the records are.
        world_size: number of ranks.
        since_ns: a rank counts once its record was begun after this (time.monotonic_ns before the job was handed out).
    """

    def __init__(self, folder: str | Path, world_size: int, *, since_ns: int) -> None:
        self.folder, self.ranks, self.since_ns = Path(folder), range(world_size), since_ns
        self._readers: dict[int, RecordReader] = {}
        self._followers: dict[int, _Follower] = {}
        self._ledger = matching.CallLedger()
        self._mismatch_at: float | None = None
        self._num_groups = 0
        self._still: tuple[object, float] = (None, 0.0)

    def check(self, finished_ranks: Collection[int] = ()) -> str | None:
        """Return why the job cannot end well, or None.

        A mismatch is told at once (once all members have arrived, or 0.3 s later); a deadlock when nothing has moved
        for two seconds. `finished_ranks`: those whose function has returned, in addition to those whose records say so.
        """
        mismatch = self.mismatch(patient=True)
        if mismatch is not None:
            return mismatch
        followers = self._followers
        finished = {*finished_ranks, *(rank for rank, one in followers.items() if one.header.is_finished)}
        if not followers or any(r not in followers and r not in finished for r in self.ranks):
            return None
        # It changes whenever a call begins, begins to wait or ends, and when a group is begun or made.
        moved = [(f.read, f.header, f.unfinished().tobytes()) for _, f in sorted(followers.items())]
        signature, now = (finished, moved), time.monotonic()
        if signature != self._still[0]:
            self._still = (signature, now)
            return None
        if now - self._still[1] < STABLE_S:
            return None
        standings = {rank: follower.standing() for rank, follower in followers.items()}
        return find_deadlock(standings, self._ledger, finished)

    def mismatch(self, *, patient: bool = False) -> str | None:
        """Read what is new and return calls that do not agree; patient: give the other members a moment to arrive."""
        self.follow()
        for rank, follower in self._followers.items():
            header = follower.reader.header()
            if header.job != follower.header.job:  # it began a new job while we looked; next time
                continue
            rows, lost = follower.new_rows(header)
            if len(rows) or lost:
                names = follower.reader.read_names()
                self._ledger.add(rank, rows, names, dropped=lost)
        found = self._ledger.disagreement()
        if found is None:
            if exchange := self._ledger.exchange():
                return exchange
            before, self._num_groups = self._num_groups, sum(f.header.groups_begun for f in self._followers.values())
            return (self.groups() or None) if self._num_groups != before else None
        now = time.monotonic()
        self._mismatch_at = self._mismatch_at or now
        if patient and len(found) < found[0]["parties"] and now - self._mismatch_at < MISMATCH_GRACE_S:
            return None
        return matching.explain(self._ledger, found)

    def groups(self, *, is_over: bool = False) -> str:
        """Return where the ranks do not make the same groups, or ""; `is_over`: no rank will make a further one."""
        self.follow()
        headers = {rank: follower.reader.header() for rank, follower in sorted(self._followers.items())}
        begun = {rank: matching.groups_of(header, self._readers[rank].read_names()) for rank, header in headers.items()}
        return matching.groups_differ(begun, is_over=is_over)

    def left(self) -> dict[int, str]:
        """Say of each rank that destroyed a group which others still had what it did."""
        self.follow()
        readers = {rank: follower.reader for rank, follower in self._followers.items()}
        return matching.left_by_some({r: one.read_names()[one.header().left_text] for r, one in readers.items()})

    def failed(self, rank: int) -> str:
        """Say which ranks had no part in the call of a rank that failed last, or ""."""
        self.mismatch()
        if (follower := self._followers.get(rank)) is None:
            return ""
        rows = follower.standing().rows
        if not len(rows) or rows[-1]["state"] != FAILED:
            return ""
        last, names = rows[-1], self._ledger.names.get(rank, [""])
        absent = waits_for(rank, last, names, self._ledger)
        done = [other for other, one in self._followers.items() if one.header.is_finished]
        reasons = ", ".join(matching.absences(absent, done))
        return f"rank {rank} failed in {call_of(rank, last, names)}: {reasons}" if absent else ""

    def is_finished(self, rank: int) -> bool:
        """Tell whether a rank's record says that it makes no more calls."""
        reader = self._reader(rank)
        return reader is not None and reader.header().is_finished

    def _reader(self, rank: int) -> RecordReader | None:
        if rank not in self._readers:
            path = self.folder / f"rank{rank}.rec"
            if path.exists() and RecordReader.is_ready(path):
                self._readers[rank] = RecordReader(path)
        return self._readers.get(rank)

    def follow(self) -> None:
        """Find the ranks that have begun this job, and open their records; begin anew when they have begun the next."""
        for rank in self.ranks:
            self._reader(rank)
        headers = {rank: reader.header() for rank, reader in self._readers.items()}
        here = {rank for rank, header in headers.items() if header.start_ns >= self.since_ns}
        if any(headers[rank].job != follower.header.job for rank, follower in self._followers.items()):
            # Ranks that had just joined, seen before they took up the job: their record begins with it anew.
            self._followers, self._ledger, self._mismatch_at = {}, matching.CallLedger(), None
        for rank in here - set(self._followers):
            self._followers[rank] = _Follower(self._readers[rank], headers[rank])
