"""Find what wrong results are right for: a known wrong version, or the reference with a different argument.

Each is called with the drawn arguments of all calls. Where its results are those of the answer, in every call and on
every rank, that is what is wrong with the answer. Nothing is guessed: an answer that agrees with none gets no words
from here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from distlab.grading.agreement import told, words_of
from distlab.grading.causes.mend import mend_of
from distlab.grading.causes.search import Agreed, Drawn, agreed, explained, next_size, results_of
from distlab.grading.exercise import Exercise
from distlab.grading.mutant import build
from distlab.grading.variation.calls import split
from distlab.grading.variation.draw import Members, Vary
from distlab.grading.variation.near import near, outcome
from distlab.grading.variation.owned import named

BUDGET_S = 2.0  # of a rank's processor time, for all changes of one answer: a busy machine changes no verdict
LIMIT_S = 4.0  # of a batch: a changed argument may make the reference's ranks wait for each other
PLAIN = bool | int | float | str
Own = MutableMapping[str, Any]  # a call's arguments by name


class Change(NamedTuple):
    """What is called in the answer's place.

    Attributes:
        what: a parameter's name, with the field after a dot; "" of a known wrong version.
        words: what to say.
        fn: takes what the reference takes.
    """

    what: str
    words: str
    fn: Callable[..., Any]


def cause_of(fn: Callable[..., Any], drawn: Drawn) -> str:
    """Return in words what the results of all drawn calls are right for, or where the answer's own text is wrong.

    "" where no change of the reference has these results, and no change of the answer makes them right.
    """
    if not _is_of_one_kind(drawn.got, drawn.wanted):
        return mend_of(fn, drawn)
    return _of_a_change(drawn) or mend_of(fn, drawn)


def _is_of_one_kind(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> bool:
    """Whether each result is a tensor, a number, a list or a dict where the right one is."""
    kinds = (Tensor, bool, int | float, list | tuple, dict, str)
    return all(
        isinstance(outcome(mine), kind) == isinstance(outcome(right), kind)
        for one, other in zip(got, wanted, strict=True)
        for mine, right in zip(one["calls"], other["calls"], strict=True)
        for kind in kinds
    )


def _of_a_change(drawn: Drawn) -> str:
    """Say so where one change has the answer's results, or one part of them."""
    from distlab.comm import RankError

    got, wanted, ranks, vary = drawn.got, drawn.wanted, drawn.ranks, drawn.vary
    written = _written(wanted)  # a different tensor in the place of one that the reference writes to says nothing
    every = changes_of(drawn.exercise, drawn.reference, drawn.seed, len(got))
    changes = (change for change in every if change.what not in written)
    results = [(results_of(got, rank), results_of(wanted, rank)) for rank in range(len(got))]
    answers = [mine for mine, _ in results]
    spent_s, size, limit_s = 0.0, 1, ranks.timeout_s
    perhaps: list[str] = []  # where few results are wrong, one change of all must explain them
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        while spent_s < BUDGET_S and (batch := list(islice(changes, size))):
            found, took_s = zip(*ranks.run(_tried, drawn.reference, vary, drawn.seed, batch, answers), strict=True)
            spent_s += took_s[0]
            for index, change in enumerate(batch):
                agreements = [of_rank[index] for of_rank in found]
                part, is_sure = explained(agreements, results, vary.scale, is_known=not change.what)
                if part is not None:
                    text = _words(change, part, wanted)
                    if is_sure or perhaps:  # two that only may be it: nothing is known, however many a batch has
                        return text if is_sure else ""
                    perhaps.append(text)
            size = next_size(size, took_s[0])
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s
    return perhaps[0] if perhaps and spent_s < BUDGET_S else ""


def _written(wanted: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of arguments that the reference writes to."""
    calls = [call for run in wanted for call in run["calls"]]
    pairs = [(name, old, dict(call["after"]).get(name)) for call in calls for name, old in call["before"]]
    return {name.partition(".")[0].partition("[")[0] for name, old, new in pairs if not near(new, old, 0.0)}


def _words(change: Change, part: str, wanted: Sequence[dict[str, Any]]) -> str:
    calls = f"in all {len(wanted[0]['calls'])} drawn calls"
    if not change.what:
        return f"{change.words}: so it is {calls}."
    is_in_place = all(call["result"] is None for run in wanted for call in run["calls"])
    whole = "what it leaves in its arguments" if is_in_place else "what it returns"
    text = f"{calls} {f'the result{part}' if part else whole} is what is right {change.words}"
    return text if text.endswith("?") else f"{text}."


def _tried(
    reference: Callable[..., Any], vary: Vary, seed: int, changes: Sequence[Change], given: Sequence[Sequence[Any]]
) -> tuple[list[Agreed], float]:
    """On a rank, make all calls of the reference with each change."""
    return agreed(lambda number: contextlib.nullcontext(changes[number].fn), len(changes), vary, seed, reference, given)


def changes_of(exercise: Exercise, reference: Callable[..., Any], seed: int, world_size: int) -> Iterator[Change]:
    """Yield what is tried: known wrong versions, then each argument at each of a few other values."""
    for wrong in told(exercise, world_size):
        fn = build(wrong, exercise.name, reference, exercise.imports).fn
        assert fn is not None
        yield Change("", words_of(wrong), fn)

    def changed(what: str, words: str, change: Callable[[Own], None]) -> Change:
        """Return the reference as it is with changed arguments; what belongs to the caller is not touched."""

        @wraps(reference)
        def other(*arguments: Any, **keywords: Any) -> Any:
            bound = inspect.signature(reference).bind(*arguments, **keywords)
            bound.apply_defaults()
            change(bound.arguments)
            return reference(*bound.args, **bound.kwargs)

        return Change(what, words, other)

    seen = _drawn_values(exercise, reference, seed, world_size)
    for name, values in seen.items():
        for what, words, new in _of_values(name, values):
            yield changed(what, words, partial(_put, name, new))
    kinds = {name: {type(value) for value in values} for name, values in seen.items()}
    for one, other in ((one, other) for one in seen for other in seen if one != other):
        if kinds[one] == kinds[other] == {int}:
            words = f"for {one} = {other} - 1 - {one}: is it counted from the other end?"
            yield changed(one, words, partial(_from_the_end, one, other))
        if kinds[one] == kinds[other] and kinds[one] <= {int, float} and one < other:
            words = f"if {one} and {other} had changed places"
            yield changed(one, words, partial(_swap, one, other))


def _put(name: str, new: Callable[[Any], Any], own: Own) -> None:
    own[name] = new(own[name])


def _always(value: Any, old: Any) -> Any:
    return value


def _from_the_end(one: str, size: str, own: Own) -> None:
    own[one] = own[size] - 1 - own[one]


def _swap(one: str, other: str, own: Own) -> None:
    own[one], own[other] = own[other], own[one]


def _drawn_values(
    exercise: Exercise, reference: Callable[..., Any], seed: int, world_size: int
) -> dict[str, list[Any]]:
    """Return what each parameter of the function is given in the drawn calls, on all ranks; no rank is asked."""
    vary, names = exercise.vary, inspect.signature(reference).parameters
    assert vary is not None
    takes = reference if vary.use is None else partial(vary.use, None)
    seen: dict[str, list[Any]] = {}
    for call in range(vary.num_calls):
        for rank in range(world_size):
            given = vary.arguments(vary.draw(seed, call, rank, world_size))
            for name, value in named(takes, *split(given)).items() if given is not None else ():
                if name in names:
                    seen.setdefault(name, []).append(value)
    own = [name for name, one in names.items() if one.annotation in (int, "int") and name not in seen]
    return seen | {name: [0, 1] for name in own}  # `use` gives these itself


def _of_values(name: str, values: Sequence[Any]) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield the changes of an argument, or of a field of one: its name, words, and what makes the new value."""
    kinds = [value for value in values if value is not None]
    if not kinds or any(isinstance(value, Members) for value in values):
        return
    one = kinds[0]
    if not isinstance(one, Tensor) and len({repr(value) for value in values}) == 1:
        return  # it was the same in all calls
    if isinstance(one, PLAIN) or any(value is None for value in values):
        plain = [value for value in values if value is None or isinstance(value, PLAIN)]
        few = [0, 1, 2] if isinstance(one, int) and not isinstance(one, bool) else [0.0, 1.0] * isinstance(one, float)
        for value in dict.fromkeys([*few, *(plain if isinstance(one, str | bool) else plain[:1])]):
            yield name, f"for {name}={value!r}, whatever {name} is: is it used?", partial(_always, value)
    if isinstance(one, int) and not isinstance(one, bool):
        yield name, f"for {name} +1: one too many?", lambda old: old + 1
        yield name, f"for {name} -1: one too few?", lambda old: old - 1
    elif isinstance(one, list | tuple) and not is_dataclass(one) and not hasattr(one, "_fields"):
        yield name, f"for an empty {name}: is it used?", lambda old: old[:0]
        yield name, f"for the first of {name} alone", lambda old: old[:1]
        yield name, f"without the first of {name}", lambda old: old[1:]
        yield name, f"without the last of {name}", lambda old: old[:-1]
        yield name, f"for {name} from back to front", lambda old: old[::-1]
    elif isinstance(one, Tensor):
        yield name, f"for {name} of zeros", lambda old: old * 0
        yield name, f"for the negative of {name}", lambda old: -old
        yield name, f"for the magnitudes of {name}", lambda old: old.abs()
    elif is_dataclass(one):
        for field in (field.name for field in fields(one) if field.init):
            for what, words, new in _of_values(f"{name}.{field}", [getattr(value, field) for value in kinds]):

                def with_field(old: Any, field: str = field, new: Callable[[Any], Any] = new) -> Any:
                    return replace(old, **{field: new(getattr(old, field))})

                yield what, words, with_field
