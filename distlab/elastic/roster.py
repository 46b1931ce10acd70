"""The roster of replicas in a store: who has which number, who lives, who asks for a quorum, and what was settled.

The store (a TCPStore) belongs to a process that outlives the replicas. A replica lives while its heartbeat, a count,
goes on, and nobody has noted its end. Where two may write, the store compares and sets.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.elastic.quorum import Arrival, Quorum, quorum

BEAT_S, DEAD_AFTER_S, LOOK_S = 0.1, 1.0, 0.005


class Seat(NamedTuple):
    """Which replica a process is, and where the store listens.

    Attributes:
        number: its own for the whole run; a process in the place of a dead one has the same.
        num_replicas: that the run begins with.
        port: of the store.
        host: of the store.
        ticket: this process's own, where who started it notes its end.
    """

    number: int
    num_replicas: int
    port: int
    host: str = "127.0.0.1"
    ticket: str = ""


class Roster:
    """What one replica reads and writes there; it has its number from here until `leave`.

    Raises:
        ValueError: a replica with this number lives.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat, self._id = seat, seat.ticket or secrets.token_hex(8)
        # calls of one client wait for each other, so heartbeats and groups have their own
        self._store, self._beats, self.for_groups = (
            dist.TCPStore(seat.host, seat.port, is_master=False)  # type: ignore[attr-defined]
            for _ in range(3)
        )
        self._seen: dict[str, tuple[int, float]] = {}
        self._left = threading.Event()
        mine, until = f"holder/{seat.number}", time.monotonic() + 1.5 * DEAD_AFTER_S
        while (holder := self._store.compare_set(mine, "", self._id).decode()) != self._id:
            if not self._lives(holder):
                self._store.compare_set(mine, holder, self._id)
            elif time.monotonic() > until:
                raise ValueError(
                    f"replica {seat.number} is here already and goes on; start this one with a number of its own, or "
                    "end that one first"
                )
            time.sleep(LOOK_S)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while not self._left.wait(BEAT_S):
            try:
                self._beats.add(f"beat/{self._id}", 1)
            except RuntimeError:  # the store has gone; the next call of the replica's own says so
                return

    def _lives(self, holder: str) -> bool:
        if self._store.check([f"end/{holder}"]):
            return False
        now, beat = time.monotonic(), self._store.add(f"beat/{holder}", 0)
        if self._seen.get(holder, (-1, 0.0))[0] != beat:
            self._seen[holder] = beat, now
        return now - self._seen[holder][1] < DEAD_AFTER_S

    def is_alive(self, number: int) -> bool:
        """Whether a replica lives; one that the run begins with and that has not come yet counts."""
        key = f"holder/{number}"
        return not self._store.check([key]) or self._lives(self._store.get(key).decode())

    def is_asked(self, epoch: int) -> bool:
        """Whether any replica asks for a quorum of this epoch."""
        return bool(self._store.add(f"asked/{epoch}", 0))

    def begin(self) -> None:
        """Note that an update was made."""
        self._store.set("begun", "yes")

    def settle(self, mine: Arrival, last: Quorum, *, min_replicas: int, timeout_s: float) -> Quorum:
        """Wait for a quorum with this replica in it, or one that refuses it.

        Raises:
            RuntimeError: too few come, or the newest state is lost.
        """
        me, until, asked = self.seat.number, time.monotonic() + timeout_s, -1
        while True:
            epoch, key = last.epoch + 1, f"quorum/{last.epoch + 1}"
            if self._store.check([key]):
                settled = _read(self._store.get(key))
                is_holder = mine.line == last.epoch or not self._store.check(["begun"])
                if asked == epoch and (me in settled.refused + settled.takers or (me in settled.members and is_holder)):
                    return settled
                last = settled
                continue
            if asked != epoch:
                place = self._store.add(f"places/{epoch}", 1)
                self._store.set(f"arrival/{epoch}/{place}", json.dumps([me, mine]))
                self._store.add(f"asked/{epoch}", 1)
                asked = epoch
            arrived = self._arrived(epoch)
            alive = [number for number in {*last.members, *arrived} if self.is_alive(number)]
            begun = self._store.check(["begun"])
            if (found := quorum(arrived, alive, last, min_replicas=min_replicas, has_begun=begun)) is not None:
                self._store.compare_set(key, "", json.dumps(found))
            elif time.monotonic() > until:
                raise RuntimeError(
                    f"replica {me}: of at least {min_replicas} replicas these live: {alive}; and these ask to go on: "
                    f"{sorted(arrived)}; that was all in {timeout_s:g} s. Start more, or anew from a checkpoint"
                )
            time.sleep(LOOK_S)

    def _arrived(self, epoch: int) -> dict[int, Arrival]:
        """Return what those said that ask for the epoch, by number; of two with one number the later."""
        found = {}
        for place in range(1, self._store.add(f"places/{epoch}", 0) + 1):
            if self._store.check([key := f"arrival/{epoch}/{place}"]):
                number, (line, step, deal, facts) = json.loads(self._store.get(key))
                found[number] = Arrival(line, step, tuple(deal), facts)
        return found

    def leave(self) -> None:
        """Note this replica's end."""
        self._left.set()
        self._store.set(f"end/{self._id}", "left")


def note_end(store: Any, seat: Seat) -> None:
    """Note the end of a process, for others to know at once, also if it never came."""
    store.compare_set(f"holder/{seat.number}", "", seat.ticket)
    store.set(f"end/{seat.ticket}", "ended")


def _read(text: bytes) -> Quorum:
    epoch, members, step, takers, deal, refused = json.loads(text)
    return Quorum(epoch, tuple(members), step, tuple(takers), tuple(deal), tuple(refused))
