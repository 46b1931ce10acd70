"""The calls that a seed draws, in the form of `Cases`: an answer and the reference make the same ones on every rank.

Beside results, what belongs to the caller is looked at: the arguments with all that is in them, and the process.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import device
from distlab.comm.launch.worker import environment
from distlab.course.grading.cases import AFTER, RESULT, plain
from distlab.course.grading.causes.places import SHORT, first_line
from distlab.course.grading.diagnosis.values import in_python_numbers, near
from distlab.course.grading.variation.draw import IN_CALL, Keywords, Vary


@dataclasses.dataclass(frozen=True)
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
        return dataclasses.replace(self, numbers=(int(name.rpartition(" ")[2]) - 1,))

    def bare(self, seed: int | None = None) -> DrawnCalls:
        """Return these calls, or those of a different seed, with nothing looked at but results."""
        return dataclasses.replace(self, seed=self.seed if seed is None else seed, is_bare=True)

    def __call__(self, fn: Callable[..., Any]) -> dict[str, dict[str, Any]]:
        """Make the calls on this rank; return by call what came out, and what has become of the arguments.

        After the last call, "later" says what each result is by then, and "moved" which arguments have changed since.
        """
        made: dict[str, dict[str, Any]] = {}
        for name, call, result, owned in list(self.each(fn)):
            now, made[name] = _leaves(owned), call
            call["later"] = copied(result)
            call["moved"] = [name for name, old in call[AFTER].items() if name in now and not near(now[name], old)]
        return made

    def each(self, fn: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any], Any, dict[str, Any]]]:
        """Make one call after the other; yield its name, what came of it, and its result and arguments in memory."""
        vary, groups, first = self.vary, dict[str, Any](), list[Any]()
        left: dict[str, str] = {}
        takes = self.reference if vary.use is None else functools.partial(vary.use, fn)
        if not self.is_bare:
            fn = _watched(fn, self.reference, vary.scratch, left)
        numbers = range(vary.num_calls) if self.numbers is None else self.numbers
        for number in numbers:
            group_of = functools.partial(_group_of, groups)
            draw = vary.draw(self.seed, number, dist.get_rank(), dist.get_world_size(), group_of)
            name, drawn = f"call {number + 1}", vary.arguments(draw)
            if drawn is None:
                nothing: dict[str, Any] = {"words": "", RESULT: None, "before": {}, AFTER: {}, "state": [], "left": {}}
                yield name, nothing, None, {}
                continue
            is_repeated = bool(first) and number == vary.num_calls - 1 and not left
            drawn, again = _as_before(first, drawn) if is_repeated else (drawn, "")
            first = first or list(drawn)
            positional, keywords = split(drawn)
            own = named(takes, positional, keywords)
            words = ", ".join(f"{name}={first_line(said(value), 2 * SHORT)}" for name, value in own.items()) + again
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
            yield name, {**call, "state": changed, "left": dict(left)}, result, owned


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
    return taken, " of call 1 with other tensors" if is_again else ""


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


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and a copy of every plain value in an argument: numbers, texts, tensors, gradients, weights."""
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
        if value.requires_grad or value.grad is not None:
            yield f"{name}.requires_grad", value.requires_grad
            yield f"{name}.grad", None if value.grad is None else value.grad.detach().clone()
    elif isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from leaves(f"{name}.{key}", tensor)
        yield f"{name}.training", value.training
    elif isinstance(value, torch.optim.Optimizer):
        yield from leaves(f"{name}.state", [list(state.values()) for state in value.state.values()])
    elif isinstance(value, dict):
        yield f"names of {name}", [str(key) for key in value]
        for key, item in value.items():
            yield from leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        yield f"length of {name}", len(value)
        for index, item in enumerate(value):
            yield from leaves(f"{name}[{index}]", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))


def marks(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield in words what values do not show of an argument, and its size: hooks, and options of optimizers."""
    if isinstance(value, Tensor):
        hooks = [getattr(value, each, None) or () for each in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        yield f"the number of hooks on {name}", sum(map(len, hooks))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            kept = {key: each for key, each in vars(module).items() if key.endswith("_hooks")}
            count = sum(len(each) for each in kept.values() if isinstance(each, dict))
            yield f"the number of hooks on {name}{'.' * bool(path)}{path}", count
        for path, tensor in value.named_parameters():
            yield from marks(f"{name}.{path}", tensor)
    elif isinstance(value, torch.optim.Optimizer):
        groups = {f"{name}.param_groups[{index}]": group for index, group in enumerate(value.param_groups)}
        for place, group in {**groups, f"{name}.defaults": value.defaults}.items():
            yield from ((f"{place}[{key!r}]", repr(option)) for key, option in group.items() if key != "params")
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from marks(f"{name}[{key!r}]", item)


def left_on(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    """Return words for each mark that differs."""
    differ = (what for what, value in after.items() if before.get(what, value) != value)
    return {what: f"it changed {what} from {before[what]} to {after[what]}" for what in differ}


def named(fn: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names that the reference gives them."""
    try:
        return dict(inspect.signature(fn).bind(*arguments, **keywords).arguments)
    except (TypeError, ValueError):  # `use` takes other arguments than the function itself
        return {f"argument {index}": value for index, value in enumerate(arguments)} | keywords


def state() -> dict[str, Any]:
    """Return what every function must leave as it found it, by name, each as a plain value."""
    found: dict[str, Any] = {
        "torch's random state": hash(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": hash(random.getstate()),
        "numpy's random state": hash(pickle.dumps(np.random.get_state(legacy=False)["state"])),
        "the environment": hash(environment()),
    }
    if dist.is_initialized():
        found["the number of process groups"] = len(dist.distributed_c10d._world.pg_map)
    return found


def said(value: Any) -> str:
    """Say in a few words what an argument is."""
    if isinstance(value, Tensor):
        layout = "" if value.is_contiguous() else ", not contiguous"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{layout}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        inner = ", ".join(said(item) for item in value[:3])
        more = ", ..." if len(value) > 3 else ""
        return f"[{inner}{more}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {said(item)}" for key, item in list(value.items())[:5]) + "}"
    if isinstance(value, dist.ProcessGroup):
        return f"the group of ranks {dist.get_process_group_ranks(value)}"
    if value is None or isinstance(value, bool | int | str | set):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        chosen = [item.name for item in dataclasses.fields(value) if getattr(value, item.name) != item.default]
        return f"{type(value).__name__}({', '.join(f'{name}={said(getattr(value, name))}' for name in chosen)})"
    return getattr(value, "__name__", f"a {type(value).__name__}")
