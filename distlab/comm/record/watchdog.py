"""Say from outside who waits for whom: hangs, calls that do not fit, and deadlocks, while the ranks stand still.

The launcher reads the ranks' record files, so it works when they cannot answer. A slow job must never be ended. It is a
deadlock only if three things hold. Each rank has returned or is blocked in wait(). No call that a rank waits for can be
completed by what others have called. Nothing has moved for two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record.file import ISSUED, OPS, RECV, SEND, WAITING, Header
from distlab.comm.record.file_reader import RecordReader
from distlab.comm.record.matching import Ledger, absences, explain, groups_differ, groups_of, ledger_of, left_by_some
from distlab.comm.record.read import Records, call_of, group_ranks, is_pair

STABLE_S = 2.0
MISMATCH_GRACE_S = 0.3  # time for the other members to arrive, so that the message can name them all
_ALL_MAKE = "every rank must call new_group, also a rank outside the group"
_NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


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
    if op in _NEED_ALL or (op in ("reduce", "gather") and rank == peer):
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


def find_deadlock(standings: Mapping[int, Standing], ledger: Ledger, finished: Collection[int] = ()) -> str | None:
    """Return why no rank can ever move again, or None while one may; `finished`: ranks whose function has returned."""
    lines, now = [], time.monotonic_ns()
    for rank, standing in sorted(standings.items()):
        if rank in finished:
            continue
        if number := standing.header.making:
            absent = [r for r, other in sorted(standings.items()) if other.header.groups_begun < number]
            if not absent:
                return None
            why = ", ".join(absences(absent, finished))
            lines.append(f"  rank {rank} waits in dist.new_group #{number} {standing.group}: {why}; {_ALL_MAKE}")
            continue
        row = standing.blocked_in
        if row is None:
            row = _never_met(rank, standing, ledger, finished, now)
        if row is None or standing.header.aside or _may_be_served(rank, row, standings):
            return None
        absent = waits_for(rank, row, standing.names, ledger)
        if not absent:
            return None
        call, since = call_of(rank, row, standing.names), (now - int(row["wait"] or row["start"])) / 1e9
        reasons = absences(absent, finished)
        if row["op"] in (SEND, RECV):
            other = "recv" if row["op"] == SEND else "send"
            reasons = [reason.replace("called it", f"called the {other}") for reason in reasons]
        lines.append(f"  rank {rank} waits in {call} for {since:.1f} s: {', '.join(reasons)}")
    if not lines:
        return None
    done = f"; finished: ranks {sorted(finished)}" if finished else ""
    return "\n".join([f"deadlock: every rank that has not finished waits, and none can go on{done}", *lines])


def _may_be_served(rank: int, row: Any, standings: Mapping[int, Standing]) -> bool:
    """Tell whether a receive from anyone has a message under way."""
    if row["op"] != RECV or row["peer"] >= 0:
        return False
    sends = [s.unfinished[s.unfinished["op"] == SEND] for other, s in standings.items() if other != rank]
    return any((rows["peer"] == rank).any() for rows in sends)


def _never_met(rank: int, standing: Standing, ledger: Ledger, finished: Collection[int], now: int) -> Any:
    """Return a collective, called five seconds ago or more, that a finished rank never made.

    C++ code (DDP's reducer) waits where no wait() can be seen; such a call can never end, so whoever needs it is stuck.
    """
    rows = standing.unfinished[(standing.unfinished["state"] == ISSUED) & (now - standing.unfinished["start"] > 5e9)]
    for row in rows:
        if OPS[row["op"]] in _NEED_ALL and set(waits_for(rank, row, standing.names, ledger)) & set(finished):
            return row
    return None


class _Follower:
    """Follow one rank's file through one job."""

    def __init__(self, reader: RecordReader, header: Header) -> None:
        self.reader, self.header, self.read = reader, header, header.first - 1
        self._open = np.empty(0, np.uint64)  # numbers of the calls that were unfinished at the last look

    def new_rows(self, header: Header) -> tuple[NDArray[Any], bool]:
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

    def standing(self) -> Standing:
        """Return where the rank stands now."""
        unfinished = self.unfinished()
        last = self.reader.rows(self.header, self.header.newest - 1)
        row = last[-1] if len(last) else None
        return Standing(self.reader.read_names(), unfinished, row, self.header)


class Watchdog:
    """Look at the ranks' records again and again; reads only what is new (about 0.2 ms per look for four ranks).

    One for each job. A rank counts once its record was begun after `since_ns` (time.monotonic_ns before the job
    was handed out).
    """

    def __init__(self, folder: str | Path, world_size: int, *, since_ns: int) -> None:
        self.folder, self.world_size, self.since_ns = Path(folder), world_size, since_ns
        self._readers: dict[int, RecordReader] = {}
        self._followers: dict[int, _Follower] = {}
        self._ledger = Ledger()
        self._mismatch_at: float | None = None
        self._num_groups = 0
        self._still: tuple[object, float] = (None, 0.0)

    def check(self, finished_ranks: Collection[int] = ()) -> str | None:
        """Return why the job cannot end well, or None.

        A mismatch is told at once (once all members have arrived, or 0.3 s later); a deadlock when nothing has moved
        for two seconds. `finished_ranks`: those whose function has returned.
        """
        mismatch = self.mismatch(patient=True)
        if mismatch is not None:
            return mismatch
        finished = set(finished_ranks)
        followers = self._followers
        if not followers or any(r not in followers and r not in finished for r in range(self.world_size)):
            return None
        read = tuple((r, f.read, f.header.groups_begun, f.header.groups_made) for r, f in sorted(followers.items()))
        signature = (frozenset(finished), read, self._waits())
        now = time.monotonic()
        if signature != self._still[0]:
            self._still = (signature, now)
            return None
        if now - self._still[1] < STABLE_S:
            return None
        standings = {rank: follower.standing() for rank, follower in followers.items()}
        return find_deadlock(standings, self._ledger, finished)

    def mismatch(self, *, patient: bool = False) -> str | None:
        """Read what is new and return calls that do not agree; patient: give the other members a moment to arrive."""
        self._follow()
        for rank, follower in self._followers.items():
            header = follower.reader.header()
            if header.job != follower.header.job:  # it began another job while we looked; next time
                continue
            rows, lost = follower.new_rows(header)
            if len(rows) or lost or header.is_stopped:
                names = follower.reader.read_names()
                self._ledger.add(rank, rows, names, dropped=lost, stopped=header.is_stopped)
        found = self._ledger.disagreement()
        if found is None:
            if misfit := self._ledger.misfit(is_over=not patient):
                return misfit
            before, self._num_groups = self._num_groups, sum(f.header.groups_begun for f in self._followers.values())
            return (self.groups() or None) if self._num_groups != before else None
        now = time.monotonic()
        self._mismatch_at = self._mismatch_at or now
        if patient and len(found[0]) < found[0][0]["parties"] and now - self._mismatch_at < MISMATCH_GRACE_S:
            return None
        return explain(self._ledger, *found)

    def groups(self, *, is_over: bool = False) -> str:
        """Return where the ranks do not make the same groups, or ""; `is_over`: no rank will make another."""
        self._follow()
        headers = {rank: follower.reader.header() for rank, follower in sorted(self._followers.items())}
        begun = {rank: groups_of(header, self._readers[rank].read_names()) for rank, header in headers.items()}
        return groups_differ(begun, is_over=is_over and not any(header.is_stopped for header in headers.values()))

    def left(self) -> dict[int, str]:
        """Return which ranks destroyed a group that others still had: members and line, by rank."""
        self._follow()
        return left_by_some({r: f.reader.read_names()[f.reader.header().left_text] for r, f in self._followers.items()})

    def _follow(self) -> None:
        """Find the ranks that have begun this job; begin anew when they have begun another."""
        for rank in range(self.world_size):
            path = self.folder / f"rank{rank}.rec"
            if rank not in self._readers and path.exists() and RecordReader.is_ready(path):
                self._readers[rank] = RecordReader(path)
        headers = {rank: reader.header() for rank, reader in self._readers.items()}
        here = {rank for rank, header in headers.items() if header.start_ns >= self.since_ns}
        if any(headers[rank].job != follower.header.job for rank, follower in self._followers.items()):
            # Ranks that had just joined, seen before they took up the job: their record begins with it anew.
            self._followers, self._ledger, self._mismatch_at = {}, Ledger(), None
        for rank in here - set(self._followers):
            self._followers[rank] = _Follower(self._readers[rank], headers[rank])

    def _waits(self) -> tuple[int, ...]:
        """Return what changes whenever a call begins to wait or ends."""
        numbers = []
        for _, follower in sorted(self._followers.items()):
            open_rows = follower.unfinished()
            waiting = open_rows["n"][open_rows["state"] == WAITING]
            numbers += [len(open_rows), *np.asarray(waiting, dtype=np.int64).tolist()]
        return tuple(numbers)
