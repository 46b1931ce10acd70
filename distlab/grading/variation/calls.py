"""The calls that a seed draws, in the form of `Cases`: an answer and the reference make the same ones on every rank."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import device
from distlab.grading.cases import AFTER, RESULT, plain
from distlab.grading.diagnosis.values import in_python_numbers, near
from distlab.grading.variation.draw import IN_CALL, Keywords, Vary
from distlab.grading.variation.owned import leaves, left_on, marks, named, said, state

FIRST = "call 1"


class _Held(NamedTuple):
    """What a call was given and gave back, as it is in memory."""

    result: Any
    owned: dict[str, Any]


@dataclass(frozen=True)
class DrawnCalls:
    """The calls of one seed.

    Attributes:
        vary: how they vary.
        seed: of all draws.
        reference: its parameters name the arguments.
        numbers: of the calls that are made, from 0; None: all of them.
        is_bare: whether results alone count: then nothing else is looked at.
    """

    vary: Vary
    seed: int
    reference: Callable[..., Any]
    numbers: tuple[int, ...] | None = None
    is_bare: bool = False

    def at(self, name: str) -> DrawnCalls:
        """Return this one call alone."""
        return replace(self, numbers=(int(name.rpartition(" ")[2]) - 1,))

    def bare(self, seed: int | None = None) -> DrawnCalls:
        """Return these calls, or those of a different seed, with nothing looked at but results."""
        return replace(self, seed=self.seed if seed is None else seed, is_bare=True)

    def __call__(self, fn: Callable[..., Any]) -> dict[str, dict[str, Any]]:
        """Make the calls on this rank; return by call what came out, and what has become of the arguments.

        After the last call, "later" says what each result is by then, and "moved" which arguments have changed since.
        """
        made: dict[str, dict[str, Any]] = {}
        held: list[_Held] = []
        for name, call, own in self.each(fn):
            made[name] = call
            held.append(own)
        for call, own in zip(made.values(), held, strict=True):
            now = _leaves(own.owned)
            call["later"] = copied(own.result)
            call["moved"] = [name for name, old in call[AFTER].items() if name in now and not near(now[name], old)]
        return made

    def each(self, fn: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any], _Held]]:
        """Make one call after the other; yield its name, what came of it, and what is held in memory."""
        vary, groups, first = self.vary, dict[str, Any](), list[Any]()
        left: dict[str, str] = {}
        takes = self.reference if vary.use is None else functools.partial(vary.use, fn)
        if not self.is_bare:
            fn = _watched(fn, self.reference, vary.scratch, left)
        numbers = range(vary.num_calls) if self.numbers is None else self.numbers
        for number in numbers:
            draw = vary.draw(
                self.seed, number, dist.get_rank(), dist.get_world_size(), functools.partial(_group_of, groups)
            )
            name, drawn = f"call {number + 1}", vary.arguments(draw)
            if drawn is None:
                yield (
                    name,
                    {"words": "", RESULT: None, "before": {}, AFTER: {}, "state": [], "left": {}},
                    _Held(None, {}),
                )
                continue
            is_repeated = bool(first) and number == vary.num_calls - 1 and not left
            drawn, again = _as_before(first, drawn) if is_repeated else (drawn, "")
            first = first or list(drawn)
            positional, keywords = split(drawn)
            own = named(takes, positional, keywords)
            words = ", ".join(f"{name}={said(value)}" for name, value in own.items()) + again
            owned = {name: value for name, value in own.items() if name not in vary.scratch}
            before = _leaves(owned)
            _seed_all(self.seed + number)
            left.clear()
            old = {} if self.is_bare else state()
            try:
                result = fn(*positional, **keywords) if vary.use is None else vary.use(fn, *positional, **keywords)
            except Exception as error:
                error.add_note(f"{IN_CALL} {number + 1}, {self.reference.__name__}({words})")
                raise
            new = {} if self.is_bare else state()
            changed = [name for name in old if old[name] != new.get(name) and name not in vary.any_state]
            call = {"words": words, RESULT: copied(result), "before": before, AFTER: _leaves(owned)}
            torch.set_grad_enabled(True)
            yield name, {**call, "state": changed, "left": dict(left)}, _Held(result, owned)


def outcome(call: dict[str, Any]) -> Any:
    """Return a call's result, or what it left in its arguments where it returns nothing."""
    return call[AFTER] if call[RESULT] is None else call[RESULT]


def split(drawn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments and the keyword-only ones of a draw."""
    drawn = tuple(drawn)
    if drawn and isinstance(drawn[-1], Keywords):
        return drawn[:-1], dict(drawn[-1])
    return drawn, {}


def copied(value: Any) -> Any:
    """Return a value with copies of its tensors, which later calls cannot change, and Python's own numbers."""
    return plain(in_python_numbers(value))


def _leaves(owned: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of every plain value in arguments, by its place."""
    return dict(leaf for name, value in owned.items() for leaf in leaves(name, value))


def _watched(
    fn: Callable[..., Any], names_of: Callable[..., Any], scratch: frozenset[str], left: dict[str, str]
) -> Callable[..., Any]:
    """Return fn, which then adds to `left` what each call leaves on its arguments where values do not show it."""

    def seen(own: dict[str, Any]) -> dict[str, Any]:
        return dict(mark for name, value in own.items() if name not in scratch for mark in marks(name, value))

    def call(*arguments: Any, **keywords: Any) -> Any:
        own = named(names_of, arguments, keywords)
        before = seen(own)
        result = fn(*arguments, **keywords)
        left.update(left_on(before, seen(own)))
        return result

    return call


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
    return taken, f" of {FIRST} with other tensors" if is_again else ""


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


def _group_of(made: dict[str, Any], parts: list[list[int]]) -> Any:
    """Make the groups, once, and return this rank's."""
    key = str(parts)
    if key not in made:
        groups = [dist.new_group(part) for part in parts]
        made[key] = next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)
    return made[key]
