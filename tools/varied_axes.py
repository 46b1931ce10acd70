"""What the draws of an exercise cover, axis by axis, found by drawing: no rank runs and no function is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.course.grading import Exercise
from distlab.course.grading.variation.calls import named, said, split
from distlab.course.grading.variation.draw import AXES, GroupMembers

SEEDS = range(6)
COVERED = "yes"
_NO_TENSOR = "takes no tensor"
_TENSOR_AXES = ("dtype", "sizes", "dims", "layout")


def coverage(exercise: Exercise, reference: Callable[..., Any]) -> dict[str, str]:
    """Return for each axis "yes", the reason why it is left out, or "" where it is neither varied nor explained."""
    vary = exercise.vary
    if vary is None:
        return dict.fromkeys(AXES, "")
    world_size = max(exercise.worlds)
    takes = reference if vary.use is None else functools.partial(vary.use, None)
    drawn: list[list[dict[str, Any]]] = []  # for each call what each rank is given
    for seed in SEEDS:
        for call in range(vary.num_calls):
            ranks = [vary.arguments(vary.draw(seed, call, rank, world_size)) for rank in range(world_size)]
            drawn.append([named(takes, *split(given)) for given in ranks if given is not None])
    tensors = [tensor for call in drawn for given in call for tensor in _tensors(list(given.values()))]
    found = {
        "dtype": len({tensor.dtype for tensor in tensors if tensor.dtype != torch.int64}) > 1,
        "sizes": len({tuple(tensor.shape) for tensor in tensors}) > 2,
        "dims": len({tensor.dim() for tensor in tensors}) > 2,
        "empty": any(not tensor.numel() for tensor in tensors) or _has_empty_list(drawn),
        "layout": not all(tensor.is_contiguous() for tensor in tensors),
        "arguments": _all_vary(drawn),
        "calls": vary.num_calls > 1,
        "worlds": len(exercise.worlds) > 1,
        "sub-group": any(_groups_in(value) for call in drawn for given in call for value in given.values()),
        "unequal ranks": any(len({_form(given) for given in call}) > 1 for call in drawn),
    }
    reasons = _plain_reasons(exercise, has_tensors=bool(tensors)) | dict(vary.left_out)
    return {axis: COVERED if found[axis] else reasons.get(axis, "") for axis in AXES}


def stale_reasons(exercise: Exercise, cells: dict[str, str]) -> list[str]:
    """Return the axes that an exercise says it leaves out, though its draws vary them."""
    return [axis for axis in (exercise.vary.left_out if exercise.vary else ()) if cells.get(axis) == COVERED]


def _plain_reasons(exercise: Exercise, *, has_tensors: bool) -> dict[str, str]:
    """Return the reasons that need not be written down for each exercise."""
    reasons: dict[str, str] = {}
    if not has_tensors:
        reasons |= dict.fromkeys(_TENSOR_AXES, _NO_TENSOR) | {"empty": _NO_TENSOR}
    if exercise.worlds == (1,):
        reasons |= dict.fromkeys(("worlds", "sub-group", "unequal ranks"), "runs on one rank alone")
    return reasons


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _has_empty_list(drawn: list[list[dict[str, Any]]]) -> bool:
    values = [value for call in drawn for given in call for value in given.values()]
    return any(isinstance(value, list | dict) and not value for value in values)


def _groups_in(value: Any) -> list[GroupMembers]:
    """Return the groups in an argument."""
    values = value.values() if isinstance(value, dict) else [value]
    return [group for group in values if isinstance(group, GroupMembers)]


def _all_vary(drawn: list[list[dict[str, Any]]]) -> bool:
    """Whether every argument took at least two values."""
    names = {name for call in drawn for given in call for name in given}
    return all(len({_shown(given.get(name)) for call in drawn for given in call}) > 1 for name in names)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, nn.Module):
        return str([tensor.tolist() for tensor in _tensors(value)])
    if isinstance(value, list | tuple):
        return str([_shown(item) for item in value])
    if isinstance(value, dict):
        return str({key: _shown(item) for key, item in value.items()})
    return repr(value)


def _form(given: dict[str, Any]) -> str:
    """Say the kinds and sizes of what a rank is given, without the numbers in it; a group counts for nothing."""
    forms = {name: value for name, value in given.items() if not _groups_in(value)}
    modules = [tensor.grad is None for value in forms.values() for tensor in _tensors(value)]
    return str([(name, said(value), _lengths(value)) for name, value in forms.items()]) + str(modules)


def _lengths(value: Any) -> Any:
    return [_lengths(item) for item in value] if isinstance(value, list) else said(value)
