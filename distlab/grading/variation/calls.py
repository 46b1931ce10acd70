"""Call a function with drawn arguments on this rank, several times; return what came out and what it left behind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import device
from distlab.grading.variation.draw import IN_CALL, Keywords, Vary
from distlab.grading.variation.left import left_on, marks
from distlab.grading.variation.owned import leaves, named, said, state


def call_varied(
    fn: Callable[..., Any],
    vary: Vary,
    seed: int,
    names_of: Callable[..., Any],
    *,
    goes_on: Callable[[int, dict[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """Make the calls of one seed and return plain data: a dict per call, and how many collectives torch counted.

    After the last call, the dict of each says what its result is by then, and which arguments have moved since.

    Args:
        fn: the learner's function, or the reference.
        vary: how the calls vary.
        seed: of all draws.
        names_of: the reference; its parameters name the arguments.
        goes_on: asked after each call, with its number and what it left, whether to make the next; results alone count.
    """
    groups, left = dict[str, Any](), list[list[str]]()
    looks = goes_on is None
    fn = watched(fn, names_of, vary.scratch, left) if looks else fn
    takes = names_of if vary.use is None else functools.partial(vary.use, fn)
    calls: list[dict[str, Any]] = []
    held: list[tuple[Any, dict[str, Any], list[list[Any]]]] = []  # result, arguments, what was in them
    num_collectives = 0
    first: Sequence[Any] = ()
    for number in range(vary.num_calls):
        draw = vary.draw(seed, number, dist.get_rank(), dist.get_world_size(), lambda parts: _group_of(parts, groups))
        drawn = vary.arguments(draw)
        if drawn is None:
            calls.append({"words": "", "result": None, "before": [], "after": [], "state": [], "left": []})
            held.append((None, {}, []))
            if goes_on is not None and not goes_on(number, calls[-1]):
                break
            continue
        first = first or drawn
        is_last = number == vary.num_calls - 1 and not calls[0]["left"]
        drawn, again = _as_before(first, drawn) if is_last else (drawn, "")
        positional, keywords = split(drawn)
        own = named(takes, positional, keywords)
        words = ", ".join(f"{name}={said(value)}" for name, value in own.items()) + again
        owned = {name: value for name, value in own.items() if name not in vary.scratch}
        before = [list(leaf) for name, value in owned.items() for leaf in leaves(name, value)]
        _seed_all(seed + number)
        left.clear()
        old, counted = state() if looks else {}, _num_collectives()
        result = _made(fn, vary, positional, keywords, f"{IN_CALL} {number + 1}, {names_of.__name__}({words})")
        num_collectives += _num_collectives() - counted
        changed = _changed(old, state(), vary) if looks else []
        after = [list(leaf) for name, value in owned.items() for leaf in leaves(name, value)]
        held.append((result, owned, after))
        seen = {"before": before, "after": after, "state": changed, "left": [*left]}
        calls.append({"words": words, "result": copied(result), **seen})
        torch.set_grad_enabled(True)
        if goes_on is not None and not goes_on(number, calls[-1]):
            break
    for call, (result, owned, after) in zip(calls, held, strict=True):
        call["later"], call["moved"] = copied(result), _moved_since(owned, after)
    return {"calls": calls, "num_collectives": num_collectives}


def _made(fn: Callable[..., Any], vary: Vary, positional: tuple[Any, ...], keywords: dict[str, Any], note: str) -> Any:
    """Make one call, and add a note on it to what it raises."""
    try:
        return fn(*positional, **keywords) if vary.use is None else vary.use(fn, *positional, **keywords)
    except Exception as error:
        error.add_note(note)
        raise


def _changed(old: dict[str, Any], new: dict[str, Any], vary: Vary) -> list[list[str]]:
    """Return the states that a call changed."""
    others = [name for name in old if old[name] != new.get(name) and name not in vary.any_state]
    return [[name, ""] for name in others]


def _moved_since(owned: dict[str, Any], after: list[list[Any]]) -> list[str]:
    """Return the places in a call's arguments that are no longer what they were after the call."""
    now = [list(leaf) for name, value in owned.items() for leaf in leaves(name, value)]
    return [name for (name, old), (_, new) in zip(after, now, strict=False) if not _same(old, new)]


def _as_before(first: Sequence[Any], drawn: Sequence[Any]) -> tuple[list[Any], str]:
    """Return arguments with the modules of the first call, which get the new ones' tensors, and words on that.

    So what an answer keeps by a module's id is seen.
    """
    taken = []
    for old, new in zip(first, drawn, strict=True):
        alike = isinstance(new, nn.Module) and str(old) == str(new)
        if alike and list(dict(old.named_parameters())) == list(dict(new.named_parameters())):
            for one, other in zip(old.modules(), new.modules(), strict=True):
                vars(one).update({key: value for key, value in vars(other).items() if key != "_modules"})
            taken.append(old)
        else:
            taken.append(new)
    is_again = any(one is not other for one, other in zip(taken, drawn, strict=True))
    return taken, " of call 1 with other tensors" if is_again else ""


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and bool(((old == new) | (old.isnan() & new.isnan())).all())
    return type(old) is type(new) and bool(old == new or (old != old and new != new))  # NaN is NaN


def watched(
    fn: Callable[..., Any], names_of: Callable[..., Any], scratch: frozenset[str], left: list[list[str]]
) -> Callable[..., Any]:
    """Return fn, which then adds to `left` what each call leaves on its arguments: kind, place and words."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        own = {name: each for name, each in named(names_of, arguments, keywords).items() if name not in scratch}
        before = [mark for name, value in own.items() for mark in marks(name, value)]
        result = fn(*arguments, **keywords)
        left.extend(left_on(before, [mark for name, value in own.items() for mark in marks(name, value)]))
        return result

    return call


def split(drawn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments and the keyword-only ones of a draw."""
    drawn = tuple(drawn)
    if drawn and isinstance(drawn[-1], Keywords):
        return drawn[:-1], dict(drawn[-1])
    return drawn, {}


def copied(value: Any) -> Any:
    """Return a value with copies of its tensors, which later calls cannot change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return in_python_numbers(value)


def in_python_numbers(value: Any, depth: int = 20) -> Any:
    """Return a value with Python's numbers for numpy's: np.int64(8) is 8; what holds none is returned itself."""
    if not depth:  # a list may hold itself
        return value
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex, str):
        return value.item()
    if type(value) in (list, tuple):
        items = [in_python_numbers(item, depth - 1) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if type(value) is dict:
        pairs = {in_python_numbers(key): in_python_numbers(item, depth - 1) for key, item in value.items()}
        is_same = all(new is old for new, old in zip([*pairs, *pairs.values()], [*value, *value.values()], strict=True))
        return value if is_same else pairs
    return value


def _seed_all(seed: int) -> None:
    """Begin each call with the same random states, for the learner's function and for the reference.

    For each kind of device that may be there later, `torch.manual_seed` writes down the whole stack: milliseconds.
    """
    if device.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _group_of(parts: list[list[int]], made: dict[str, Any]) -> Any:
    """Make the groups, once, and return this rank's."""
    key = str(parts)
    if key not in made:
        groups = [dist.new_group(part) for part in parts]
        made[key] = next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)
    return made[key]


def _num_collectives() -> int:
    """Return how many collectives torch has started in the group of all ranks, whoever called them."""
    group: Any = dist.group.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())
