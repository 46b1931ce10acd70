"""A rendezvous: every rank is an agent; agents meet, one comes too late, some meet again, one waits in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distlab.grading import Evidence, Fault, Mutant, NotYet
from distlab.grading.diagnosis.values import describe
from distlab.grading.exercise import Refused
from distlab.grading.variation.draw import Draw, Vary

SIZES = (2, 5, 3, 4)  # ranks that the agents start
PATIENCE = timedelta(seconds=0.3)
Asked = tuple[int, str]  # local ranks, address


def board(purpose: str) -> dist.Store:
    """Return a part of the store in which the ranks of this run have met."""
    return dist.PrefixStore(purpose, dist.distributed_c10d._get_default_store())


class InTurn:
    """A store in which agents are counted in the order of their ranks, so that a check says the same each time.

    Attributes:
        written: keys that got a value.
        read: keys whose value was asked for.
    """

    def __init__(self, store: dist.Store, turns: dist.Store, place: int) -> None:
        self._store = store
        self._turns, self._place, self._has_come = turns, place, False
        self.written, self.read = set[str](), set[str]()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.written.add(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until there is a value, and return it."""
        self.read.add(key)
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Wait for the agent before, and add."""
        self.written.add(key)
        self.read.add(key)
        if self._place and not self._has_come:
            self._turns.wait([f"turn {self._place - 1}"])
        found = int(self._store.add(key, amount))
        self._turns.set(f"turn {self._place}", "came")
        self._has_come = True
        return found

    def wait(self, keys: list[str]) -> None:
        """Wait until all have a value."""
        self.read |= {*keys}
        self._store.wait(keys)


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
    met = InTurn(store, board("first"), rank)
    found = {"first": attempted(fn, met, 0, n, SIZES[rank], f"old{rank}:1"), "written": sorted(met.written)}
    dist.barrier()
    if rank == 0:
        found["late"] = attempted(fn, store, 0, n, 1, "late:1")
    if rank > 0 or n == 1:
        again = InTurn(store, board("second"), max(0, rank - 1))
        found["second"] = attempted(fn, again, 1, max(1, n - 1), SIZES[rank] + 1, f"new{rank}:2")
        found["read"] = sorted(again.read)
    if rank == 0:
        alone = dist.HashStore()
        alone.set_timeout(PATIENCE)
        found["alone"] = attempted(fn, alone, 0, 2, 1, "alone:1")
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
    written = {key for one in results for key in one["written"]}
    shared = sorted(written & {key for rank in again for key in results[rank]["read"]})
    is_in_order = [one["first"][1][0] for one in results] == [*range(n)]
    since = "; attempt 0 was right" + ", where each agent's number was its rank" * is_in_order
    answers = [results[rank]["second"] for rank in again]
    yield from judge_attempt("attempt 1", asked, answers, since=since, shared=shared)
    kind, said = results[0]["late"]
    if kind == "returned":
        text = f"{n} of {n} agents had met when one more came: it was told {said!r}"
        yield Fault("late", f"{text}; raise RuntimeError, or its ranks begin in a job that is full")
    if not said.startswith("RuntimeError"):
        yield Fault("late", f"an agent that came too late was told {said}; raise RuntimeError and say why")


def judge_attempt(
    what: str,
    asked: Sequence[Asked],
    answers: Sequence[tuple[str, Any]],
    *,
    since: str = "",
    shared: Sequence[str] = (),
) -> Iterator[Fault]:
    """Judge what the agents of one attempt were told; they may have come in any order.

    Args:
        what: the attempt, for messages.
        asked: by agent, its number of ranks and its address.
        answers: by agent, what the call returned or raised.
        since: words on a former attempt, which was right.
        shared: keys read in this attempt that were written in the former one.
    """
    n, sizes = len(asked), [size for size, _ in asked]
    codes = {}
    if shared:
        codes = dict.fromkeys(("raised", "numbers", "world size", "first rank", "master"), "attempts mixed")
        keys = f"the key{'s' * (len(shared) > 1)} {', '.join(map(repr, shared))}"
        since = f": {keys} of the attempt before it {'are' if len(shared) > 1 else 'is'} read again"
        since += ", and nothing of a former attempt may count; give each attempt keys of its own"

    def fault(code: str, text: str, why: str = "") -> Fault:
        return Fault(codes.get(code, code), f"{what}{text}{since or (f': {why}' if why else '')}")

    for place, ((_, address), (kind, said)) in enumerate(zip(asked, answers, strict=True)):
        if kind == "raised":
            is_last = place == n - 1 and said.startswith("RuntimeError")
            counts = "store.add returns 1 to the first that comes, and agents are numbered from 0" * is_last
            yield fault("raised", f", {n} agent{'s' * (n > 1)}: {address} was told {said}", counts)
        if not isinstance(said, list | tuple) or len(said) != 4:
            yield Fault("returned", f"{what}: expected number, first rank, world size and master, got {describe(said)}")
    told = [tuple(said) for _, said in answers]
    numbers = [one[0] for one in told]
    if sorted(numbers, key=str) != list(range(n)):
        text = f": {n} agents got the numbers {numbers}, expected each of 0 to {n - 1} once"
        yield fault("numbers", text, "store.add counts, and tells each another number")
    by_number = [asked[numbers.index(number)] for number in range(n)]
    before = [sum(size for size, _ in by_number[:number]) for number in numbers]
    why_total = _why([one[2] for one in told], _totals(sizes, before))
    why_first = _why([one[1] for one in told], _firsts(sizes, before, numbers))
    for place, (number, first, world_size, master) in enumerate(told):
        who = f", agent {number} of {n} with {sizes[place]} ranks"
        if world_size != sum(sizes):
            text = f"{who}: the world size is {world_size!r}, expected {sum(sizes)}, the ranks of all agents"
            yield fault("world size", text, why_total)
        if first != before[place]:
            text = f"{who}: its first rank is {first!r}, expected {before[place]}, the ranks of the agents before it"
            yield fault("first rank", text, why_first)
        if master != by_number[0][1]:
            text = f"{who}: the master is {master!r}, expected {by_number[0][1]!r}"
            yield fault("master", text, _whose(master, asked[place][1], [address for _, address in by_number]))


def _totals(sizes: Sequence[int], before: Sequence[int]) -> dict[str, list[int]]:
    """Return wrong world sizes, agent by agent, each with its cause."""
    n, total = len(sizes), sum(sizes)
    return {
        "the agents were counted, not their ranks": [n] * n,
        f"that is {n} times its own: agents have different numbers of ranks": [n * size for size in sizes],
        "its own ranks are missing": [total - size for size in sizes],
        "only the agents before it were added": [*before],
        "the agents after it are missing": [sum(pair) for pair in zip(before, sizes, strict=True)],
        "that is its own number of ranks": [*sizes],
    }


def _firsts(sizes: Sequence[int], before: Sequence[int], numbers: Sequence[int]) -> dict[str, list[int]]:
    """Return wrong first ranks, agent by agent, each with its cause."""
    total, ends = sum(sizes), [sum(pair) for pair in zip(before, sizes, strict=True)]
    return {
        "that is its number times its own ranks: agents have different numbers of ranks": [
            number * size for number, size in zip(numbers, sizes, strict=True)
        ],
        "its own ranks are counted with them": ends,
        "that is its number: the agents were counted, not their ranks": [*numbers],
        "that is the sum of the agents after it": [total - end for end in ends],
    }


def _why(told: Sequence[Any], causes: dict[str, list[int]]) -> str:
    """Return the cause that explains what every agent was told, or "": one number may agree by chance."""
    return next((words for words, values in causes.items() if [*told] == values), "")


def _whose(master: Any, own: str, addresses: Sequence[str]) -> str:
    """Say whose address an agent was given as the master's."""
    if isinstance(master, bytes):
        return "store.get returns bytes: decode() them"
    if master == own:
        return "its own; all agents name that of agent 0"
    return (
        f"that is the address of agent {addresses.index(master)}"
        if master in addresses
        else "no agent has that address"
    )


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
    Mutant("addresses kept", "attempts mixed", "'master' of the attempt before it is read again", 3, "pytorch #167288")
    .edit("return number", 'if number == attempt == 0:\n    store.set("master", address)\nreturn number')
    .edit("agents[0][1]", 'store.get("master").decode()'),
    Mutant("late is let in", "late", "begin in a job that is full", 3).edit(_LATE, "if False:"),
    Mutant("late leaves quietly", "late", "was told None", 3).edit(
        f"{_LATE}\n    raise RuntimeError", f"{_LATE}\n    return None\nif number < 0:\n    raise RuntimeError"
    ),
    Mutant("another error", "late", "raise RuntimeError", 3).edit("raise RuntimeError", "raise ValueError"),
    Mutant("does not wait", "did not wait", "wait for every agent", 1).edit("range(num_agents)", "range(number + 1)"),
    Mutant("agents counted", "world size", "not their ranks", 3).edit("sum(sizes), agents", "num_agents, agents"),
    Mutant("equal agents", "world size", "3 times its own", 3).edit(
        "sum(sizes), agents", "num_agents * local_ranks, agents"
    ),
    Mutant("equal first ranks", "first rank", "its number times its own ranks", 3).edit(
        "sum(sizes[:number])", "number * local_ranks"
    ),
    Mutant("own included", "first rank", "its own ranks are counted", 3).edit("sizes[:number]", "sizes[: number + 1]"),
    Mutant("own address", "master", "its own; all agents name", 3).edit("agents[0][1]", "address"),
    Mutant("last agent's", "master", "the address of agent 2", 3).edit("agents[0][1]", "agents[-1][1]"),
    Mutant("refused itself", "raised", "agents are numbered from 0", 1).edit('agents", 1) - 1', 'agents", 1)'),
    Mutant("sizes kept", "attempts mixed", "keys of its own", 3)
    .edit('f"attempt {attempt}, agent {number}"', 'f"agent {number}"')
    .edit('f"attempt {attempt}, agent {other}"', 'f"agent {other}"'),
    Mutant("attempt added", "world size", "; attempt 0 was right, where each agent's number was its rank", 3).edit(
        "sum(sizes), agents", "sum(sizes) + attempt, agents"
    ),
    Mutant("rank for number", "first rank", "; attempt 0 was right, where each agent's number was its rank", 3).edit(
        "sum(sizes[:number])", "sum(sizes[: __import__('torch').distributed.get_rank()])"
    ),
    Mutant("bytes", "master", "decode() them", 1).edit("agents[0][1]", "agents[0][1].encode()"),
    Mutant("counted from 1", "numbers", "each of 0 to 2 once", 3).edit("return number,", "return number + 1,"),
)
