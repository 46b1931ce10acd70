"""Cases: the calls that a check makes with an answer, and with the reference, and in words where their results differ.

    drive_signs = Cases(lambda rank, n: {"": (gradient_of(rank),)}, needs="a number and a bit per element")

Nothing is said about values by hand: what is right, the reference says, on the same ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlab.course.grading.diagnosis.values import compare, near
from distlab.course.grading.exercise import Fault
from distlab.course.grading.variation.draw import IN_CASE

Given = Mapping[str, tuple[Any, ...]]  # what is asked, in words, and the arguments
Place = tuple[str, str, int, str]  # "result" or "after", the case, the rank, and where in its value
RESULT, AFTER = "result", "after"


@dataclass(frozen=True)
class Cases:
    """The calls that a check makes with an answer, with the reference and with each wrong version.

    Attributes:
        given: the arguments of each case by its name, which says in words what is asked ("" where there is one case);
            or a function that takes a rank and the number of ranks and returns them.
        use: calls fn(*arguments), and whatever fn returned; gives back plain values or tensors. Of a dict each name
            says in words what it holds, such as "the memory after step 0". By default fn alone.
        most_bytes: an answer may send so many times the reference's bytes; 0: bytes are not looked at.
        needs: what needs the reference's bytes, in words.
        only: the one case that is made; None: all of them.
    """

    given: Given | Callable[[int, int], Given]
    use: Callable[..., Any] | None = None
    most_bytes: float = 1.01
    needs: str = "the reference"
    only: str | None = None

    def __call__(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """Make the calls on this rank; return by case what came out, and what has become of the arguments."""
        rank, n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        made = {}
        for name, arguments in (self.given(rank, n) if callable(self.given) else self.given).items():
            if self.only in (None, name):
                own = copy.deepcopy(arguments)
                try:
                    result = fn(*own) if self.use is None else self.use(fn, *own)
                except Exception as error:
                    error.add_note(f"{IN_CASE} {name}")
                    raise
                after = {at: plain(one) for at, one in enumerate(own) if is_plain(one)}
                made[name] = {RESULT: plain(result), AFTER: after}
        return made

    def at(self, name: str) -> Cases:
        """Return this one case alone."""
        return replace(self, only=name)


@dataclass(frozen=True)
class Free:
    """A part of a result that an answer may choose, if all ranks have the same: it is compared with rank 0's alone."""

    value: Any


@dataclass(frozen=True, eq=False)
class Noted:
    """A part of a result that the judge alone reads, such as times: it is compared with nothing."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noted)

    __hash__ = None  # type: ignore[assignment]


def is_plain(value: Any) -> bool:
    """Whether an argument is made of numbers, texts and tensors."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, Tensor | int | float | str)


def plain(value: Any) -> Any:
    """Return a copy of a value with its tensors cut from their graph."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Free):
        return Free(plain(value.value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def compared_with_rank_0(results: Sequence[Any]) -> list[Any]:
    """Return the ranks' results, each free part replaced by whether it is rank 0's."""

    def told(value: Any, first: Any) -> Any:
        if isinstance(value, Free):
            is_alike = isinstance(first, Free) and near(value.value, first.value)
            return "the same on all ranks" if is_alike else "not that of rank 0"
        if isinstance(value, dict):
            return {key: told(item, first.get(key) if isinstance(first, dict) else None) for key, item in value.items()}
        if isinstance(value, list):
            theirs = first if isinstance(first, list) and len(first) == len(value) else [None] * len(value)
            return [told(*pair) for pair in zip(value, theirs, strict=True)]
        return value

    return [told(result, results[0]) for result in results]


def leaves(results: Sequence[Mapping[str, Any]]) -> dict[Place, Any]:
    """Return every value in the ranks' cases by its place: results first, case by case, rank by rank."""

    def walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict | list) and value:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(item, f"{place}[{key!r}]")
        else:
            yield place, value

    return {
        (part, case, rank, place): value
        for part in (RESULT, AFTER)
        for case in results[0]
        for rank, made in enumerate(results)
        for place, value in walk(made[case][part], "")
    }


def alike(one: Mapping[Place, Any], other: Mapping[Place, Any], place: Place, scale: float = 0.0) -> bool:
    """Whether both have equal values at a place, or neither has one."""
    if place not in one or place not in other:
        return (place in one) == (place in other)
    return near(one[place], other[place], scale)


def difference(
    got: Sequence[Any], want: Sequence[Any], takes: Callable[..., Any], *, num_averaged: int = 1
) -> Fault | None:
    """Say in words what differs first: results, case by case, part by part, then what has become of arguments.

    Args:
        got: what the answer made of the cases on each rank.
        want: the same of the reference.
        takes: the function whose parameters name the arguments.
        num_averaged: of how many ranks a result may be the mean: a ratio of this size is told as the sum.
    """
    for part in (RESULT, AFTER):
        for case in want[0]:
            pairs = {rank: (got[rank][case][part], want[rank][case][part]) for rank in range(len(got))}
            for rank, (mine, right) in sorted(pairs.items(), key=lambda pair: _first_part(*pair[1])):
                if near(mine, right):
                    continue
                where = ", ".join(filter(None, [f"rank {rank}" * (len(got) > 1), case]))
                head = f"{where}: " if where else ""
                both = mine, right, head
                if fault := _in_result(*both, num_averaged) if part == RESULT else _in_arguments(*both, takes):
                    return fault
    return None


def few_cases(got: Sequence[Any], want: Sequence[Any]) -> str:
    """Return in words which cases alone are wrong, or right, where these are few; or ""."""
    right = [case for case in want[0] if all(near(mine[case], one[case]) for mine, one in zip(got, want, strict=True))]
    wrong = [case for case in want[0] if case not in right]
    few, word = min((wrong, "wrong"), (right, "right"), key=lambda pair: len(pair[0]))
    return f"\n  {word} in {len(few)} of {len(want[0])} cases: {'; '.join(few)}" if 0 < len(few) < 4 else ""


def _first_part(got: Any, want: Any) -> int:
    """Return which part of a dict differs first: on whatever rank, what was made first is told."""
    if not isinstance(got, dict) or not isinstance(want, dict) or got.keys() != want.keys():
        return 0
    return next((place for place, key in enumerate(want) if not near(got[key], want[key])), len(want))


def _in_result(got: Any, want: Any, head: str, n: int, name: str = "") -> Fault | None:
    """Compare two results; in a dict whose names are words, the first part that differs is told by its name.

    What is no such dict is compared with the first part: `use` gave up on what fn returned.
    """
    if isinstance(want, dict) and want and not isinstance(got, dict) and not name:
        first = next(iter(want))
        return _in_result(got, want[first], head, n, str(first))
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        names = {key: ", ".join(filter(None, [name, str(key)])) for key in want if not near(got[key], want[key])}
        parts = (_in_result(got[key], want[key], head, n, inner) for key, inner in names.items())
        return next(filter(None, parts), None)
    return compare(got, want, f"{head}{name or 'the result'}", n)


def _in_arguments(got: dict[int, Any], want: dict[int, Any], head: str, takes: Callable[..., Any]) -> Fault | None:
    names = [name for name in inspect.signature(takes).parameters if name != "fn"]
    for at, value in want.items():
        if not near(got.get(at), value):
            name = names[at] if at < len(names) else f"argument {at}"
            fault = compare(got.get(at), value, f"{head}{name} afterwards")
            if fault is not None:
                return Fault("changed argument", f"{fault.message}: it belongs to the caller, so work on a copy")
    return None
