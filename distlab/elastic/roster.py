"""The roster of replicas in a store: who has which number, who lives, who asks for a quorum, and what was settled.

The store (a TCPStore) belongs to a process that outlives the replicas. A replica lives while its last heartbeat is new
and nobody has noted its end. Where two may write, the store compares and sets.
"""

from __future__ import annotations

import ast
import contextlib
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.elastic.quorum import Arrival, Quorum, quorum

HOST, ENDED = "127.0.0.1", "ended"
BEAT_S, DEAD_AFTER_S, LOOK_S = 0.1, 1.0, 0.005


class Seat(NamedTuple):
    """Which replica a process is, and where the store listens.

    Attributes:
        number: its own for the whole run; a process in the place of a dead one has the same.
        num_replicas: of the run; numbers are below it.
        port: of the store, on this machine.
        ticket: this process's own.
    """

    number: int
    num_replicas: int
    port: int
    ticket: str


class Roster:
    """What one replica reads and writes there; it has its number from here until `note_end`.

    Raises:
        ValueError: a replica with this number lives.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        # calls of one client wait for each other, so heartbeats and groups have their own
        self.store, self._beats, self.for_groups = (
            dist.TCPStore(HOST, seat.port, is_master=False)  # type: ignore[attr-defined]
            for _ in range(3)
        )
        self.store.compare_set(f"beat/{seat.number}", "", str(time.monotonic()))  # before its number is taken
        key, expected, until = f"holder/{seat.number}", "", time.monotonic() + 1.5 * DEAD_AFTER_S
        while (found := self.store.compare_set(key, expected, seat.ticket).decode()) != seat.ticket:
            expected = "" if self.is_alive(seat.number) else found
            if time.monotonic() > until:
                raise ValueError(
                    f"replica {seat.number} is here already and goes on; start this one with a number of its own, or "
                    "end that one first"
                )
            time.sleep(LOOK_S)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone; the next call of the replica's own says so
            while self._beats.get(f"holder/{self.seat.number}").decode() == self.seat.ticket:
                self._beats.set(f"beat/{self.seat.number}", str(time.monotonic()))
                time.sleep(BEAT_S)

    def is_alive(self, number: int) -> bool:
        """Return whether a replica lives; one that has not come yet counts."""
        holder, beat = f"holder/{number}", f"beat/{number}"
        if not self.store.check([holder]):
            return True
        ended = self.store.get(holder).decode() == ENDED
        return not ended and time.monotonic() - float(self.store.get(beat)) < DEAD_AFTER_S

    def is_asked(self, epoch: int) -> bool:
        """Return whether any replica asks for a quorum of this epoch."""
        return bool(self.store.check([f"asked/{epoch}"]))

    def settle(self, mine: Arrival, last: Quorum) -> Quorum:
        """Wait for a quorum with this replica in it, or one that refuses it.

        Raises:
            RuntimeError: the newest state is lost.
        """
        me, numbers = self.seat.number, range(self.seat.num_replicas)
        while True:
            while self.store.check([key := f"quorum/{last.epoch + 1}"]):  # settled without this replica
                last = Quorum(*self._read(key))
            arrivals = {number: f"arrival/{last.epoch + 1}/{number}" for number in numbers}
            self.store.set(arrivals[me], repr(tuple(mine)))
            self.store.set(f"asked/{last.epoch + 1}", "yes")
            while not self.store.check([key]):
                arrived = {n: Arrival(*self._read(one)) for n, one in arrivals.items() if self.store.check([one])}
                if (found := quorum(arrived, [n for n in numbers if self.is_alive(n)], last)) is not None:
                    self.store.compare_set(key, "", repr(tuple(found)))
                time.sleep(LOOK_S)
            settled = Quorum(*self._read(key))
            if me in settled.refused + settled.takers or (me in settled.members and mine.line == last.epoch):
                return settled

    def _read(self, key: str) -> Any:
        return ast.literal_eval(self.store.get(key).decode())


def note_end(store: Any, seat: Seat) -> None:
    """Note the end of a process, for others to know at once, also if it never came."""
    for expected in ("", seat.ticket):
        store.compare_set(f"holder/{seat.number}", expected, ENDED)
