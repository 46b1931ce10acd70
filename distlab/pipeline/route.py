"""What a rank must know of a schedule to run its part: with whom each message is exchanged, and in which order.

All of it is worked out from the plan, before anything runs, and the same on every rank. So no message says what it is:
the n-th that comes from a rank is the n-th that the plan has it send here.
"""

from __future__ import annotations

from typing import NamedTuple

from distlab.plan import Action, Schedule, add_communication

_SENT = {"F": ("SEND_F", 1), "B": ("SEND_B", -1), "I": ("SEND_B", -1)}  # what an action makes, and where it is needed
_OTHER_END = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}


class Route(NamedTuple):
    """One rank's part of a schedule.

    Attributes:
        actions: what it runs, in order, sends and receives included.
        stage_to_rank: the rank of each stage.
        incoming: for each rank that sends here, the receives in the order of arrival.
        settled: for each receive, the sends of this rank that are certainly over when its message is here: their
            receiver had used them before it made the message.
    """

    actions: tuple[Action, ...]
    stage_to_rank: tuple[int, ...]
    incoming: dict[int, tuple[Action, ...]]
    settled: dict[Action, tuple[Action, ...]]

    def peer(self, message: Action) -> int:
        """Return the rank at the other end of a send or a receive."""
        return self.stage_to_rank[other_end(message).stage]


def needed(action: Action, num_stages: int) -> Action | None:
    """Return the receive that would bring what an action needs from a neighbouring stage, or None."""
    if action.kind == "F" and action.stage > 0:
        return Action(action.stage, "RECV_F", action.microbatch)
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return Action(action.stage, "RECV_B", action.microbatch)
    return None


def made(action: Action, num_stages: int) -> Action | None:
    """Return the send that would take what an action makes to a neighbouring stage, or None."""
    kind, step = _SENT.get(action.kind, ("", 0))
    if step and 0 <= action.stage + step < num_stages:
        return Action(action.stage, kind, action.microbatch)
    return None


def other_end(message: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    kind, step = _OTHER_END[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forward passes of a schedule, in its order."""
    return Schedule.from_actions(
        [action for action in schedule.actions(rank) if action.kind == "F"] for rank in range(schedule.num_ranks)
    )


def route_of(schedule: Schedule, rank: int) -> Route:
    """Work out a rank's part of a valid schedule; sends and receives are derived where it has none."""
    complete = schedule if schedule.has_communication else add_communication(schedule)
    stage_to_rank = tuple(int(owner) for owner in schedule.home)
    actions = tuple(complete.actions(rank))
    bare = Route(actions, stage_to_rank, {}, {})
    incoming: dict[int, list[Action]] = {}
    for action in actions:
        if action.kind.startswith("RECV"):
            incoming.setdefault(bare.peer(action), []).append(action)
    settled: dict[Action, tuple[Action, ...]] = {}
    for peer in incoming:
        settled |= _settled(complete.actions(peer), stage_to_rank, rank)
    return Route(actions, stage_to_rank, {peer: tuple(receives) for peer, receives in incoming.items()}, settled)


def _settled(actions: list[Action], stage_to_rank: tuple[int, ...], rank: int) -> dict[Action, tuple[Action, ...]]:
    """Walk through a different rank's actions: what it has used of this rank's when it sends something back."""
    used: list[Action] = []
    settled: dict[Action, tuple[Action, ...]] = {}
    for action in actions:
        wanted = needed(action, len(stage_to_rank))
        if wanted is not None and stage_to_rank[(send := other_end(wanted)).stage] == rank:
            used.append(send)
        if action.kind.startswith("SEND") and stage_to_rank[(receive := other_end(action)).stage] == rank:
            settled[receive] = tuple(used)
            used = []
    return settled
