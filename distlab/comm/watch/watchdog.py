"""Say from outside who waits for whom: hangs, calls that do not fit, and deadlocks, while the ranks stand still.

The launcher reads the ranks' record files, so it works when they cannot answer. A slow job must never be ended: it is a
deadlock only if no rank can go on (`waits.find_deadlock`), and nothing has moved for two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distlab.comm.record.file import FAILED, RecordHeader
from distlab.comm.record.matching import CallLedger, absences, explain, groups_differ, groups_of, left_by_some
from distlab.comm.record.read import RankRecord, RecordReader, call_of
from distlab.comm.watch.waits import find_deadlock, waits_for

STABLE_S = 2.0
MISMATCH_GRACE_S = 0.3  # time for the other members to arrive, so that the message can name them all


class _Follower:
    """Follow one rank's file through one job."""

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
        self._ledger = CallLedger()
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
        self._follow()
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
        if patient and len(found[0]) < found[0][0]["parties"] and now - self._mismatch_at < MISMATCH_GRACE_S:
            return None
        return explain(self._ledger, *found)

    def groups(self, *, is_over: bool = False) -> str:
        """Return where the ranks do not make the same groups, or ""; `is_over`: no rank will make a further one."""
        self._follow()
        headers = {rank: follower.reader.header() for rank, follower in sorted(self._followers.items())}
        begun = {rank: groups_of(header, self._readers[rank].read_names()) for rank, header in headers.items()}
        return groups_differ(begun, is_over=is_over)

    def left(self) -> dict[int, str]:
        """Return which ranks destroyed a group that others still had: members and line, by rank."""
        self._follow()
        return left_by_some({r: f.reader.read_names()[f.reader.header().left_text] for r, f in self._followers.items()})

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
        reasons = ", ".join(absences(absent, done))
        return f"rank {rank} failed in {call_of(rank, last, names)}: {reasons}" if absent else ""

    def is_finished(self, rank: int) -> bool:
        """Tell whether a rank's record says that it makes no more calls."""
        reader = self._reader(rank)
        return reader is not None and reader.header().is_finished

    def open(self) -> None:
        """Open all records that are there, so that their files may be removed."""
        self._follow()

    def _reader(self, rank: int) -> RecordReader | None:
        """Return what reads a rank's record, once that is there."""
        if rank not in self._readers:
            path = self.folder / f"rank{rank}.rec"
            if path.exists() and RecordReader.is_ready(path):
                self._readers[rank] = RecordReader(path)
        return self._readers.get(rank)

    def _follow(self) -> None:
        """Find the ranks that have begun this job; begin anew when they have begun the next."""
        for rank in self.ranks:
            self._reader(rank)
        headers = {rank: reader.header() for rank, reader in self._readers.items()}
        here = {rank for rank, header in headers.items() if header.start_ns >= self.since_ns}
        if any(headers[rank].job != follower.header.job for rank, follower in self._followers.items()):
            # Ranks that had just joined, seen before they took up the job: their record begins with it anew.
            self._followers, self._ledger, self._mismatch_at = {}, CallLedger(), None
        for rank in here - set(self._followers):
            self._followers[rank] = _Follower(self._readers[rank], headers[rank])
