"""A rendezvous: every rank is an agent; agents meet, one comes too late, some meet again, one waits in vain."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.grading import Evidence, Mutant, NotYet
from distlab.grading.cases import Cases
from distlab.grading.variation.draw import Draw, Vary

SIZES = (2, 5, 3, 4)  # ranks that the agents start
PATIENCE = timedelta(seconds=0.3)


def new_board(purpose: str) -> dist.Store:
    """Return a part of its own, for this call, of the store in which the ranks of this run have met."""
    store = dist.distributed_c10d._get_default_store()
    numbers = [store.add(f"{purpose} calls", 1) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(numbers)
    return dist.PrefixStore(f"{purpose} {numbers[0]}", store)


class InTurn:
    """A store in which agents are counted in the order of their ranks, so that a check says the same each time.

    With `is_late` this agent writes nothing before the first one has its answer, or has waited for it long enough.
    """

    def __init__(self, store: dist.Store, turns: dist.Store, place: int, *, is_late: bool = False) -> None:
        self._store = store
        self._turns, self._place, self._has_come, self._is_late = turns, place, False, is_late

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        if self._is_late:
            self._is_late = False
            for _ in range(30):
                if not self._turns.check(["answered"]):
                    time.sleep(0.01)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until there is a value, and return it."""
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Wait for the agent before, and add."""
        if self._place and not self._has_come:
            self._turns.wait([f"turn {self._place - 1}"])
        found = int(self._store.add(key, amount))
        self._turns.set(f"turn {self._place}", "came")
        self._has_come = True
        return found

    def wait(self, keys: list[str]) -> None:
        """Wait until all have a value."""
        self._store.wait(keys)


def told(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what an agent was told, each part by its name, or which error was raised."""
    try:
        found = fn(*arguments)
    except NotYet:
        raise
    except Exception as error:
        return f"{type(error).__name__} was raised"
    if isinstance(found, list | tuple) and len(found) == 4:
        return dict(zip(("its number", "its first rank", "the world size", "the master"), found, strict=True))
    return found


def meetings(fn: Callable[..., Any], rank: int, n: int) -> dict[str, Any]:
    """Meet, come too late, meet again without agent 0, and wait for an agent that never comes."""
    store, size = new_board("meeting"), SIZES[rank]
    found = {"attempt 0": told(fn, InTurn(store, dist.PrefixStore("first", store), rank), 0, n, size, f"old{rank}:1")}
    dist.barrier()
    if rank == 0:
        alone = dist.HashStore()
        alone.set_timeout(PATIENCE)
        answer = told(fn, alone, 0, 2, 1, "alone:1")
        raised = isinstance(answer, str) and answer.endswith("was raised")
        found["an agent that is alone, of two"] = "an error was raised" if raised else answer
    if rank > 0 or n == 1:
        turns, place = dist.PrefixStore("second", store), max(0, rank - 1)
        again = InTurn(store, turns, place, is_late=place > 0)
        found["attempt 1, after attempt 0"] = told(fn, again, 1, max(1, n - 1), size + 1, f"new{rank}:2")
        if place == 0:
            turns.set("answered", "yes")
    if rank == 0:
        found["an agent that comes too late"] = told(fn, store, 0, n, 1, "late:1")
    return found


drive_rendezvous = Cases(lambda rank, n: {"": (rank, n)}, meetings, most_bytes=0)


def budget_rendezvous(evidence: Evidence) -> list[str]:
    """Say who met."""
    return [f"{evidence.world_size} agents with {list(SIZES[: evidence.world_size])} ranks met, and met again"]


def _draw_meeting(draw: Draw) -> tuple[Any, ...]:
    return draw.integer(0, 3), draw.own(1, 8), f"host{draw.own(0, 9)}-{draw.rank}:{draw.integer(1, 9)}"


def _use_meeting(fn: Callable[..., Any], attempt: int, local_ranks: int, address: str) -> Any:
    """Meet in a store of this call's own, in the order of the ranks."""
    store, rank = new_board("varied"), dist.get_rank()
    met = InTurn(store, dist.PrefixStore("turns", store), rank)
    return told(fn, met, attempt, dist.get_world_size(), local_ranks, address)


vary_rendezvous = Vary(_draw_meeting, _use_meeting, num_calls=4, left_out={"sub-group": "agents are no ranks yet"})
_LATE = "if number >= num_agents:"
WRONG_RENDEZVOUS = (
    Mutant(
        "one room for all attempts",
        "attempts mixed",
        "agents of a former attempt are counted again, and nothing of it may count: give each attempt keys of its own",
        3,
        "pytorch #135712",
    ).edit("attempt {attempt}, agent", "agent", times=3),
    Mutant(
        "addresses kept",
        "attempts mixed",
        "the master of the attempt before it is read again, and nothing of a former attempt may count: give each "
        "attempt keys of its own",
        3,
        "pytorch #167288",
    )
    .edit("return number", 'if number == attempt == 0:\n    store.set("master", address)\nreturn number')
    .edit("agents[0][1]", 'store.get("master").decode()'),
    Mutant(
        "late is let in",
        "late is let in",
        "all agents had met when one more came: raise RuntimeError, or its ranks begin in a job that is full",
        3,
    ).edit(_LATE, "if False:"),
    Mutant(
        "late leaves quietly",
        "late leaves",
        "an agent that came too late was told nothing: raise RuntimeError and say why",
        3,
    ).edit(f"{_LATE}\n    raise RuntimeError", f"{_LATE}\n    return None\nif number < 0:\n    raise RuntimeError"),
    Mutant(
        "another error",
        "late",
        "an agent that came too late must be told by a RuntimeError: raise RuntimeError and say why",
        3,
    ).edit("raise RuntimeError", "raise ValueError"),
    Mutant(
        "does not wait",
        "did not wait",
        "wait for every agent before you answer; store.get waits, and raises after the store's timeout",
        1,
    ).edit("range(num_agents)", "range(number + 1)"),
    Mutant("agents counted", "world size", "the agents were counted, not their ranks", 3).edit(
        "sum(sizes), agents", "num_agents, agents"
    ),
    Mutant(
        "equal agents",
        "equal agents",
        "agents have different numbers of ranks: the world size is not num_agents times its own",
        3,
    ).edit("sum(sizes), agents", "num_agents * local_ranks, agents"),
    Mutant(
        "equal first ranks",
        "first rank",
        "that is its number times its own ranks: agents have different numbers of ranks",
        3,
    ).edit("sum(sizes[:number])", "number * local_ranks"),
    Mutant("own included", "own included", "its own ranks are counted with those of the agents before it", 3).edit(
        "sizes[:number]", "sizes[: number + 1]"
    ),
    Mutant("own address", "master", "that is its own address; all agents name that of agent 0", 3).edit(
        "agents[0][1]", "address"
    ),
    Mutant(
        "last agent's", "last agent", "that is the address of the last agent; all agents name that of agent 0", 3
    ).edit("agents[0][1]", "agents[-1][1]"),
    Mutant(
        "refused itself",
        "numbered from 1",
        "store.add returns 1 to the first that comes, and agents are numbered from 0",
        1,
    ).edit('agents", 1) - 1', 'agents", 1)'),
    Mutant(
        "sizes kept",
        "values",
        "attempt 1, after attempt 0, the world size: expected 10, got 11",
        3,
    )
    .edit('f"attempt {attempt}, agent {number}"', 'f"agent {number}"')
    .edit('f"attempt {attempt}, agent {other}"', 'f"agent {other}"'),
    Mutant(
        "attempt added",
        "attempt added",
        "the world size is that of all agents' ranks in each attempt: its number is no part of it",
        3,
    ).edit("sum(sizes), agents", "sum(sizes) + attempt, agents"),
    Mutant(
        "rank for number",
        "rank for number",
        "an agent's number is not its rank: it is what store.add told it in this attempt",
        3,
    ).edit("sum(sizes[:number])", "sum(sizes[: __import__('torch').distributed.get_rank()])"),
    Mutant("bytes", "bytes", "store.get returns bytes: decode() them", 1).edit("agents[0][1]", "agents[0][1].encode()"),
    Mutant("counted from 1", "numbers", "agents are numbered from 0, each of 0 to num_agents - 1 once", 3).edit(
        "return number,", "return number + 1,"
    ),
)
