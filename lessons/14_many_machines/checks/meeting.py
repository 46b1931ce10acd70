"""A rendezvous: every rank is an agent; agents meet, one comes too late, some meet again, one waits in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.grading import Evidence, Fault, Mutant, NotYet
from distlab.grading.diagnosis.values import describe
from distlab.grading.exercise import Refused
from distlab.grading.sandbox.guard import Board
from distlab.grading.variation.draw import Draw, Vary

SIZES = (2, 5, 3, 4)  # ranks that the agents start
PATIENCE = timedelta(seconds=0.3)
Asked = tuple[int, str]  # local ranks, address


def board(purpose: str) -> Board:
    """Return a part of the store in which the ranks of this run have met."""
    return Board(dist.PrefixStore(purpose, dist.distributed_c10d._get_default_store()))


class InTurn(Board):
    """A store in which agents are counted in the order of their ranks, so that a check says the same each time."""

    def __init__(self, store: Any, turns: Board, place: int) -> None:
        super().__init__(store)
        self._turns, self._place, self._has_come = turns, place, False

    def add(self, key: str, amount: int) -> int:
        """Wait for the agent before, and add."""
        if self._place and not self._has_come:
            self._turns.wait([f"turn {self._place - 1}"])
        found = super().add(key, amount)
        self._turns.set(f"turn {self._place}", "came")
        self._has_come = True
        return found


def attempted(fn: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """Call it; return ("returned", value) or ("raised", words)."""
    try:
        return "returned", fn(*arguments)
    except NotYet:
        raise
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"


def drive_meeting(fn: Callable[..., Any]) -> dict[str, Any]:
    """Meet, come too late, meet again without agent 0, and wait for an agent that never comes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = board("meeting")
    found = {"first": attempted(fn, InTurn(store, board("first"), rank), 0, n, SIZES[rank], f"old{rank}:1")}
    dist.barrier()
    if rank == 0:
        found["late"] = attempted(fn, store, 0, n, 1, "late:1")
    if rank > 0 or n == 1:
        again = InTurn(store, board("second"), max(0, rank - 1))
        found["second"] = attempted(fn, again, 1, max(1, n - 1), SIZES[rank] + 1, f"new{rank}:2")
    if rank == 0:
        alone = dist.HashStore()
        alone.set_timeout(PATIENCE)
        found["alone"] = attempted(fn, Board(alone), 0, 2, 1, "alone:1")
    return found


def judge_meeting(evidence: Evidence) -> Iterator[Fault]:
    """Numbers, ranks and master agree; one too late is refused, a new attempt begins anew, a missing one is missed."""
    results, n = evidence.results, evidence.world_size
    asked = [(SIZES[rank], f"old{rank}:1") for rank in range(n)]
    yield from judge_attempt("attempt 0", asked, [one["first"] for one in results])
    kind, said = results[0]["alone"]
    if kind == "returned":
        text = f"one of two agents came, and it was told {said!r}: wait for every agent before you answer"
        yield Fault("did not wait", f"{text}; store.get waits, and raises after the store's timeout")
    again = [rank for rank in range(n) if "second" in results[rank]]
    asked = [(SIZES[rank] + 1, f"new{rank}:2") for rank in again]
    yield from judge_attempt("attempt 1", asked, [results[rank]["second"] for rank in again])
    kind, said = results[0]["late"]
    if kind == "returned":
        text = f"{n} of {n} agents had met when one more came: it was told {said!r}"
        yield Fault("late", f"{text}; raise RuntimeError, or its ranks begin in a job that is full")
    if not said.startswith("RuntimeError"):
        yield Fault("late", f"an agent that came too late was told {said}; raise RuntimeError and say why")


def judge_attempt(what: str, asked: Sequence[Asked], answers: Sequence[tuple[str, Any]]) -> Iterator[Fault]:
    """Judge what the agents of one attempt were told; they may have come in any order."""
    n, total = len(asked), sum(size for size, _ in asked)
    counts = "; store.add returns 1 to the first that comes, and agents are numbered from 0"
    anew = "" if what.endswith("0") else ": nothing of a former attempt may count; give each attempt keys of its own"
    for (_, address), (kind, said) in zip(asked, answers, strict=True):
        if kind == "raised":
            why = anew or counts * said.startswith("RuntimeError")
            text = f"{what}, {n} agent{'s' * (n > 1)}: {address} was told {said}{why}"
            yield Fault("attempts mixed" if anew else "raised", text)
        if not isinstance(said, list | tuple) or len(said) != 4:
            yield Fault("returned", f"{what}: expected number, first rank, world size and master, got {describe(said)}")
    told = [tuple(said) for _, said in answers]
    numbers = [one[0] for one in told]
    if sorted(numbers, key=str) != list(range(n)):
        text = f"{what}: {n} agents got the numbers {numbers}, expected each of 0 to {n - 1} once"
        yield Fault(
            "attempts mixed" if anew else "numbers",
            f"{text}{anew or ': store.add counts, and tells each another number'}",
        )
    by_number = [asked[numbers.index(number)] for number in range(n)]
    for (size, address), (number, first, world_size, master) in zip(asked, told, strict=True):
        who = f"{what}, agent {number} of {n} with {size} ranks"
        if world_size != total:
            why = "the agents were counted, not their ranks" if world_size == n else "add up the ranks of all agents"
            why = "agents have different numbers of ranks" if world_size == n * size != n else why
            yield Fault("world size", f"{who}: the world size is {world_size}, expected {total}: {why}")
        want = sum(before for before, _ in by_number[:number])
        if first != want:
            text = f"{who}: its first rank is {first!r}, expected {want}, the ranks of the agents before it"
            yield Fault("first rank", f"{text}: agents have different numbers of ranks")
        if master != by_number[0][1]:
            is_dead = isinstance(master, str) and master not in dict(map(reversed, asked))  # type: ignore[arg-type]
            code, why = ("attempts mixed", f"a dead address{anew}") if is_dead else ("master", "that of agent 0")
            why = "its own; all agents name that of agent 0" if master == address else why
            yield Fault(code, f"{who}: the master is {master!r}, expected {by_number[0][1]!r}: {why}")


def budget_meeting(evidence: Evidence) -> list[str]:
    """Say who met."""
    return [f"{evidence.world_size} agents with {list(SIZES[: evidence.world_size])} ranks met, and met again"]


def _draw_meeting(draw: Draw) -> tuple[Any, ...]:
    return draw.integer(0, 3), draw.own(1, 8), f"host{draw.own(0, 9)}-{draw.rank}:{draw.integer(1, 9)}"


def _use_meeting(fn: Callable[..., Any], attempt: int, local_ranks: int, address: str) -> bool:
    """Meet in a store of this call's own, and judge what all were told."""
    everyone: list[Any] = [None] * dist.get_world_size()
    numbers = [board("varied").add("calls", 1) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(numbers)  # a part of the store for each call, also where two have the same attempt
    answer = fn(board(f"call {numbers[0]}"), attempt, dist.get_world_size(), local_ranks, address)
    dist.all_gather_object(everyone, ((local_ranks, address), ("returned", answer)))
    asked, answers = zip(*everyone, strict=True)
    for fault in judge_attempt(f"attempt {attempt}", asked, answers):
        raise Refused(fault.code, fault.message)
    return True


MEETING_VARY = Vary(_draw_meeting, _use_meeting, num_calls=4, left_out={"sub-group": "agents are no ranks yet"})
_LATE = "if number >= num_agents:"
WRONG_MEETINGS = (
    Mutant("one room for all attempts", "attempts mixed", "keys of its own", 3, "pytorch #135712").edit(
        "attempt {attempt}, agent", "agent", times=3
    ),
    Mutant("addresses kept", "attempts mixed", "dead address", 3, "pytorch #167288")
    .edit("return number", 'if number == attempt == 0:\n    store.set("master", address)\nreturn number')
    .edit("agents[0][1]", 'store.get("master").decode()'),
    Mutant("late is let in", "late", "begin in a job that is full", 3).edit(_LATE, "if False:"),
    Mutant("late leaves quietly", "late", "was told None", 3).edit(
        f"{_LATE}\n    raise RuntimeError", f"{_LATE}\n    return None\nif number < 0:\n    raise RuntimeError"
    ),
    Mutant("another error", "late", "raise RuntimeError", 3).edit("raise RuntimeError", "raise ValueError"),
    Mutant("does not wait", "did not wait", "wait for every agent", 1).edit("range(num_agents)", "range(number + 1)"),
    Mutant("agents counted", "world size", "not their ranks", 3).edit("sum(sizes), agents", "num_agents, agents"),
    Mutant("equal agents", "world size", "different numbers of ranks", 3).edit(
        "sum(sizes), agents", "num_agents * local_ranks, agents"
    ),
    Mutant("equal first ranks", "first rank", "the ranks of the agents before it", 3).edit(
        "sum(sizes[:number])", "number * local_ranks"
    ),
    Mutant("own included", "first rank", "expected 0", 3).edit("sizes[:number]", "sizes[: number + 1]"),
    Mutant("own address", "master", "its own; all agents name", 3).edit("agents[0][1]", "address"),
    Mutant("last agent's", "master", "that of agent 0", 3).edit("agents[0][1]", "agents[-1][1]"),
    Mutant("refused itself", "raised", "agents are numbered from 0", 1).edit('agents", 1) - 1', 'agents", 1)'),
    Mutant("counted from 1", "numbers", "each of 0 to 2 once", 3).edit("return number,", "return number + 1,"),
)
