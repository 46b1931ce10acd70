"""Changes to try: a different value of an argument, of a field or of a reduction, and the reference run with it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from distlab.grading.agreement import told, words_of
from distlab.grading.exercise import Exercise
from distlab.grading.mutant import build
from distlab.grading.variation.calls import split
from distlab.grading.variation.draw import Members
from distlab.grading.variation.owned import named

REDUCTIONS, ALL = "all_reduce", "all"
_REDUCED = {"MAX": "the largest", "MIN": "the smallest", "PRODUCT": "the product"}


class Change(NamedTuple):
    """One thing that is other than in the reference.

    Attributes:
        what: a parameter's name, with the field after a dot; or REDUCTIONS; or ALL of the function.
        how: "is", "plus", "swapped with", "from the end", "list", "tensor", "op", "left out"; "does" where the value is
            the whole function.
        value: what it is changed to, or by.
        words: what to say.
    """

    what: str
    how: str
    value: Any
    words: str


def changed(reference: Callable[..., Any], change: Change, made: list[int]) -> Callable[..., Any]:
    """Return the reference as it is with a changed argument; what belongs to the caller is not touched."""
    if change.how == "does":
        return change.value  # type: ignore[no-any-return]
    name, _, field = change.what.partition(".")

    @functools.wraps(reference)
    def other(*arguments: Any, **keywords: Any) -> Any:
        made[0] = 0
        if change.what == REDUCTIONS:
            return reference(*arguments, **keywords)
        bound = inspect.signature(reference).bind(*arguments, **keywords)
        bound.apply_defaults()
        own = bound.arguments
        if change.how == "swapped with":
            own[name], own[change.value] = own[change.value], own[name]
        elif change.how == "from the end":
            own[name] = own[change.value] - 1 - own[name]
        else:
            own[name] = _with_field(own[name], field, change) if field else _new(own[name], change)
        return reference(*bound.args, **bound.kwargs)

    return other


def _with_field(value: Any, field: str, change: Change) -> Any:
    """Return a record, or a record in a record, with one field changed."""
    first, _, rest = field.partition(".")
    old = getattr(value, first)
    return replace(value, **{first: _with_field(old, rest, change) if rest else _new(old, change)})


def _new(old: Any, change: Change) -> Any:
    """Return what stands in an argument's place."""
    import torch

    if change.how == "plus":
        return old + change.value
    if change.how == "list":
        return {"empty": old[:0], "one": old[:1], "first": old[1:], "last": old[:-1], "reversed": old[::-1]}[
            change.value
        ]
    if change.how == "tensor":
        made: dict[str, Callable[[Any], Any]] = {"zeros": torch.zeros_like, "negated": torch.neg, "absolute": torch.abs}
        return made[change.value](old)
    return change.value


@contextlib.contextmanager
def reductions(change: Change) -> Iterator[list[int]]:
    """Make each all_reduce of this process reduce otherwise, or have no effect; yield how many were made."""
    import torch.distributed as dist

    real, made = dist.all_reduce, [0]

    def reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        made[0] += 1
        if change.how == "op" and op == dist.ReduceOp.SUM:
            op = getattr(dist.ReduceOp, change.value)
        is_left_out = change.how == "left out" and made[0] == change.value
        return real(tensor.clone() if is_left_out else tensor, op, group, async_op)

    if change.what == REDUCTIONS:
        dist.all_reduce = reduce
    try:
        yield made
    finally:
        dist.all_reduce = real


def changes_of(exercise: Exercise, reference: Callable[..., Any], seed: int, world_size: int) -> Iterator[Change]:
    """Yield what is tried: known wrong versions, other reductions, then each argument at each of a few other values."""
    for wrong in told(exercise, world_size):
        yield Change(ALL, "does", build(wrong, exercise.name, reference, exercise.imports).fn, words_of(wrong))
    if world_size > 1:
        for op, words in _REDUCED.items():
            yield Change(REDUCTIONS, "op", op, f"if each all_reduce took {words} of the ranks' values, not their sum")
        for number, which in enumerate(("first", "second", "third"), start=1):
            yield Change(REDUCTIONS, "left out", number, f"if the {which} all_reduce of each call had no effect")
    seen = _drawn_values(exercise, reference, seed, world_size)
    for name, values in seen.items():
        yield from _of_values(name, values)
    kinds = {name: {type(value) for value in values} for name, values in seen.items()}
    for one, other in ((one, other) for one in seen for other in seen if one != other):
        if kinds[one] == kinds[other] == {int}:
            yield Change(
                one, "from the end", other, f"for {one} = {other} - 1 - {one}: is it counted from the other end?"
            )
    for one in seen:
        for other in list(seen)[list(seen).index(one) + 1 :]:
            if kinds[one] == kinds[other] and kinds[one] <= {int, float}:
                yield Change(one, "swapped with", other, f"if {one} and {other} had changed places")


def _drawn_values(
    exercise: Exercise, reference: Callable[..., Any], seed: int, world_size: int
) -> dict[str, list[Any]]:
    """Return what each parameter of the function is given in the drawn calls, on all ranks; no rank is asked."""
    vary, names = exercise.vary, inspect.signature(reference).parameters
    assert vary is not None
    takes = reference if vary.use is None else functools.partial(vary.use, None)
    seen: dict[str, list[Any]] = {}
    for call in range(vary.num_calls):
        for rank in range(world_size):
            given = vary.arguments(vary.draw(seed, call, rank, world_size))
            for name, value in named(takes, *split(given)).items() if given is not None else ():
                if name in names:
                    seen.setdefault(name, []).append(value)
    own = [name for name, one in names.items() if one.annotation in (int, "int") and name not in seen]
    return seen | {name: [0, 1] for name in own}  # `use` gives these itself


def _of_values(name: str, values: Sequence[Any]) -> Iterator[Change]:
    """Yield the changes of an argument, or of a field of one, by what it was given."""
    from torch import Tensor

    kinds = [value for value in values if value is not None]
    if not kinds or any(isinstance(value, Members) for value in values):
        return
    if not isinstance(kinds[0], Tensor) and len({repr(value) for value in values}) == 1:
        return  # it was the same in all calls
    one = kinds[0]
    if isinstance(one, bool | int | float | str) or any(value is None for value in values):
        plain = [value for value in values if value is None or isinstance(value, bool | int | float | str)]
        few = [0, 1, 2] if isinstance(one, int) and not isinstance(one, bool) else [0.0, 1.0] * isinstance(one, float)
        for value in dict.fromkeys([*few, *(plain if isinstance(one, str | bool) else plain[:1])]):
            yield Change(name, "is", value, f"for {name}={value!r}, whatever {name} is: is it used?")
    if isinstance(one, int) and not isinstance(one, bool):
        for step in (1, -1):
            yield Change(name, "plus", step, f"for {name} {step:+d}: one too {'many' if step > 0 else 'few'}?")
    elif isinstance(one, list | tuple) and not is_dataclass(one) and not hasattr(one, "_fields"):
        yield Change(name, "list", "empty", f"for an empty {name}: is it used?")
        yield Change(name, "list", "one", f"for the first of {name} alone")
        yield Change(name, "list", "first", f"without the first of {name}")
        yield Change(name, "list", "last", f"without the last of {name}")
        yield Change(name, "list", "reversed", f"for {name} from back to front")
    elif isinstance(one, Tensor):
        for how, words in (("zeros", "zeros"), ("negated", "the negative"), ("absolute", "the magnitudes")):
            yield Change(name, "tensor", how, f"for {words} of {name}" if how != "zeros" else f"for {name} of zeros")
    elif is_dataclass(one):
        for field in fields(one):
            if field.init:
                yield from _of_values(f"{name}.{field.name}", [getattr(v, field.name) for v in kinds])
