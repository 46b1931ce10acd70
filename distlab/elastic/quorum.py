"""Who is in: a pure function of what stands in the store, so that all replicas that read the store agree.

Those that are left after a death make a new group, in an *epoch* of its own, and first settle who that is. Each has a
number that it keeps, and writes an `Arrival` for the epoch. When all that live have arrived, whoever sees it first
proposes `quorum(...)`, and the store keeps one proposal (compare and set).

Three rules keep the replicas equal:

1. Only who was in the quorum before and lives holds the newest state. All others take a holder's: the new, and those
   that were taken for dead. In the first quorum all hold it, since all begin with equal weights.
2. Holders are at most one update apart: an update is made after a vote in which all said that they have the step's
   average. Some may have read the vote's result when one died, and some not. Who has not makes that update now.
3. Newcomers join at a step's border. Where a holder is inside a step, the holders finish it among themselves.

Source: torchft, a library of PyTorch's, has these parts too: a server (the lighthouse) decides the quorum, managers
vote whether a step is committed, and who is behind takes a peer's state (https://github.com/meta-pytorch/torchft).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Arrival(NamedTuple):
    """What a replica says of itself when it asks for a quorum.

    Attributes:
        line: the epoch that its state comes from; -1: its state is that of a new process.
        step: updates made.
        deal: the replicas among which the samples of the step were dealt that it is in; () between two steps.
        facts: stands for the work and the weights that it began with; equal on all.
    """

    line: int
    step: int
    deal: tuple[int, ...] = ()
    facts: str = ""


class Quorum(NamedTuple):
    """Who makes the steps of an epoch.

    Attributes:
        epoch: of the group.
        members: the numbers of the replicas, sorted; the place in it is the rank.
        step: updates that each has made when the group stands.
        takers: members that take the state of the giver, the first that is none of them.
        deal: among whom the samples of this step were dealt.
        refused: replicas with different weights or different work at the start.
    """

    epoch: int
    members: tuple[int, ...]
    step: int = 0
    takers: tuple[int, ...] = ()
    deal: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()

    @property
    def giver(self) -> int:
        """The member whose state the takers get."""
        return next(number for number in self.members if number not in self.takers)


def quorum(arrived: Mapping[int, Arrival], alive: Collection[int], last: Quorum) -> Quorum | None:
    """Decide who is in the epoch after `last`; None: wait for more.

    Args:
        arrived: by number, what those said that ask for it.
        alive: numbers of those that live.
        last: the quorum before; of the first epoch, -1, with those that the run was started with.

    Raises:
        RuntimeError: all that held the newest state are gone.
    """
    living = {number: arrived[number] for number in sorted(arrived) if number in alive}
    if not living or any(number in alive and number not in living for number in last.members):
        return None
    holders = [number for number, one in living.items() if one.line == last.epoch]
    if not holders:
        raise RuntimeError(
            f"all replicas that held step {last.step} and later are gone ({', '.join(map(str, last.members))}); "
            "start the run anew from a checkpoint, if it is not over"
        )
    refused = tuple(number for number, one in living.items() if one.facts != living[holders[0]].facts)
    step = max(living[number].step for number in holders)
    newest = [living[number] for number in holders if living[number].step == step]
    deal = next((one.deal for one in newest if one.deal), ())
    takers = () if deal else tuple(number for number in living if number not in (*holders, *refused))
    members = tuple(sorted({*holders, *takers} - {*refused}))
    return Quorum(last.epoch + 1, members, step, takers, deal or members, refused)
