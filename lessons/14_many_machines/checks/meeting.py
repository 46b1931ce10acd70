"""A rendezvous: every rank is an agent; agents meet, some meet again, one waits in vain, one comes too late."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant, NotYet

SIZES = (2, 5, 3, 4)  # ranks that the agents start
PATIENCE = timedelta(seconds=0.3)
MEET, AGAIN, MISSING, LATE = (
    "attempt 0",
    "attempt 1, after attempt 0",
    "a second agent never comes",
    "an agent too many",
)
NAMES = ("its number", "its first rank", "the world size", "the master")


class InTurn:
    """A store in which agents come and write in an order, so that a check says the same each time.

    They are counted in the order of their places. Each writes only when the one before it has its answer, or waits.
    """

    def __init__(self, store: dist.Store, purpose: str, place: int) -> None:
        self._store, self._turns, self._place = store, dist.PrefixStore(f"turns of {purpose}", store), place
        self._has_come = False

    def _wait_for_the_one_before(self, has: str) -> None:
        if self._place:
            self._turns.wait([f"{self._place - 1} {has}"])

    def goes_on(self) -> None:
        """Let the next one write."""
        self._turns.set(f"{self._place} goes on", "")

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._wait_for_the_one_before("goes on")
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until there is a value, and return it."""
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str]) -> None:
        """Wait until all have a value."""
        if not self._store.check(keys):
            self.goes_on()
        self._store.wait(keys)

    def add(self, key: str, amount: int) -> int:
        """Wait for the agent before, and add."""
        if self._has_come:  # it may ask again and again
            self.goes_on()
        else:
            self._wait_for_the_one_before("came")
        found = int(self._store.add(key, amount))
        self._turns.set(f"{self._place} came", "")
        self._has_come = True
        return found


def new_board() -> dist.Store:
    """Return a part of its own, for this call, of the store in which the ranks of this run have met."""
    store = dist.distributed_c10d._get_default_store()
    numbers = [store.add("boards", 1) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(numbers)
    return dist.PrefixStore(f"board {numbers[0]}", store)


def meet_in_turn(fn: Callable[..., Any], store: dist.Store, purpose: str, place: int, *asked: Any) -> Any:
    """Return what an agent is told."""
    met = InTurn(store, purpose, place)
    try:
        return fn(met, *asked)
    finally:
        met.goes_on()


def by_name(told: Any) -> dict[str, Any]:
    """Return each part of what an agent is told by its name."""
    parts = told if isinstance(told, list | tuple) and len(told) == len(NAMES) else (told, None, None, None)
    return dict(zip(NAMES, parts, strict=True))


def error_or(fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returned, or which error it raised; the words of a RuntimeError are the agent's own."""
    try:
        return fn(*arguments)
    except NotYet:
        raise
    except Exception as error:
        return f"{type(error).__name__} was raised" + f": {error}" * (type(error) is not RuntimeError)


def _use_meetings(fn: Callable[..., Any], what: str, rank: int, n: int) -> Any:
    """Meet; then meet again without agent 0, or with one agent more; or be one of two agents."""
    store = new_board()
    if what == MISSING:
        alone = dist.HashStore()
        alone.set_timeout(PATIENCE)
        told = error_or(fn, alone, 0, 2, 1, "alone:1") if rank == 0 else "an error was raised"
        return {"what the first is told": "an error was raised" if "was raised" in str(told) else told}
    first = error_or(meet_in_turn, fn, store, MEET, rank, 0, n, SIZES[rank], f"old{rank}:1")
    if what == MEET:
        return by_name(first)
    dist.barrier()
    if what == LATE:
        late = error_or(fn, store, 0, n, 1, "late:1") if rank == 0 else "RuntimeError was raised"
        return {"what it is told": late.partition(":")[0] if isinstance(late, str) else late}
    if rank == 0 and n > 1:
        return {}
    place, asked = max(0, rank - 1), (1, max(1, n - 1), SIZES[rank] + 1, f"new{9 - rank}:2")
    return by_name(error_or(meet_in_turn, fn, store, AGAIN, place, *asked))


drive_rendezvous = Cases(
    lambda rank, n: {what: (what, rank, n) for what in (MEET, AGAIN, MISSING, LATE)}, _use_meetings, most_bytes=0
)


def budget_rendezvous(evidence: Evidence) -> list[str]:
    """Say who met."""
    return [f"{evidence.world_size} agents with {list(SIZES[: evidence.world_size])} ranks met, and met again"]


def _draw_meeting(draw: Draw) -> tuple[Any, ...]:
    return draw.integer(0, 3), draw.own(1, 8), f"host{draw.own(0, 9)}-{draw.rank}:{draw.integer(1, 9)}"


def _use_meeting(fn: Callable[..., Any], attempt: int, local_ranks: int, address: str) -> dict[str, Any]:
    """Meet in a store of this call's own, in the order of the ranks."""
    n = dist.get_world_size()
    return by_name(meet_in_turn(fn, new_board(), "draw", dist.get_rank(), attempt, n, local_ranks, address))


vary_rendezvous = Vary(_draw_meeting, _use_meeting, num_calls=4, left_out={"sub-group": "agents are no ranks yet"})
_FULL, _AGENT = "if number >= num_agents:", 'f"attempt {attempt}, agent {%s}"'
_MIXED = "nothing of a former attempt may count: give each attempt keys of its own"
_ITS = "all agents name the address of agent 0"
WRONG_RENDEZVOUS = (
    Mutant("least", "master", "it names the least address; all name that of agent 0", 3).edit(
        "agents[0][1]", "min(at for _, at in agents)"
    ),
    Mutant(
        "one room for all attempts", "attempts mixed", f"all are counted again; {_MIXED}", 3, "pytorch #135712"
    ).edit("attempt {attempt}, agent", "agent", times=3),
    Mutant("addresses kept", "attempts mixed", f"the former master is read again; {_MIXED}", 3, "pytorch #167288")
    .edit("return number", 'if number == attempt == 0:\n    store.set("master", address)\nreturn number')
    .edit("agents[0][1]", 'store.get("master").decode()'),
    Mutant("sizes kept", "attempts mixed", f"former agents are read; {_MIXED}", 3)
    .edit(_AGENT % "number", 'f"agent {number}"')
    .edit(_AGENT % "other", 'f"agent {other}"'),
    Mutant("late is let in", "late", "all had met when one more came: raise RuntimeError, its job is full", 3).edit(
        _FULL, "if False:"
    ),
    Mutant(
        "late leaves quietly",
        "late",
        "an agent that comes too late is told nothing: raise RuntimeError, and say why",
        3,
    ).edit(f"{_FULL}\n    raise RuntimeError", f"{_FULL}\n    return None\nif number < 0:\n    raise RuntimeError"),
    Mutant("another error", "late", "an agent that comes too late gets a different error: raise RuntimeError", 3).edit(
        "raise RuntimeError", "raise ValueError"
    ),
    Mutant("does not wait", "did not wait", "wait for every agent before you answer: store.get waits", 1).edit(
        "range(num_agents)", "range(number + 1)"
    ),
    Mutant("agents counted", "world size", "the agents are counted, not their ranks", 3).edit(
        "sum(sizes), agents", "num_agents, agents"
    ),
    Mutant("equal agents", "world size", "agents have different numbers of ranks: add up those of all", 3).edit(
        "sum(sizes), agents", "num_agents * local_ranks, agents"
    ),
    Mutant(
        "attempt added", "world size", "the world size grows with the attempt: add up the ranks of all agents alone", 3
    ).edit("sum(sizes), agents", "sum(sizes) + attempt, agents"),
    Mutant(
        "equal first ranks", "first rank", "agents have different numbers of ranks: add up those before this one", 3
    ).edit("sum(sizes[:number])", "number * local_ranks"),
    Mutant("own included", "first rank", "its own ranks are counted with those of the agents before it", 3).edit(
        "sizes[:number]", "sizes[: number + 1]"
    ),
    Mutant(
        "rank for number", "first rank", "it counts by the rank: an agent's number is what store.add told it", 3
    ).edit("sum(sizes[:number])", "sum(sizes[: __import__('torch').distributed.get_rank()])"),
    Mutant("own address", "master", f"it names its own address as the master; {_ITS}", 3).edit(
        "agents[0][1]", "address"
    ),
    Mutant("last agent's", "master", f"it names the last agent as the master; {_ITS}", 3).edit(
        "agents[0][1]", "agents[-1][1]"
    ),
    Mutant("bytes", "master", "store.get returns bytes: decode() them", 1).edit(
        "agents[0][1]", "agents[0][1].encode()"
    ),
    Mutant("counted from 1", "numbers", "the number it returns counts from 1; agents are numbered from 0", 3).edit(
        "return number,", "return number + 1,"
    ),
    Mutant(
        "refused itself", "numbers", "store.add returns 1 to the first that comes; agents are numbered from 0", 1
    ).edit('agents", 1) - 1', 'agents", 1)'),
    Mutant("after it", "first rank", "it adds up the agents after it; its first rank follows those before it", 3).edit(
        "sizes[:number]", "sizes[number + 1 :]"
    ),
)
