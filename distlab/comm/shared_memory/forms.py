"""How torch calls a group's methods, and how its profiler and modes come to see the calls."""

from __future__ import annotations

import contextlib
import csv
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _autograd, _distributed_c10d as c10d
from torch.futures import Future
from torch.utils import _pytree as pytree

from distlab.comm.shared_memory import dense

profiler_is_on, num_modes = _autograd._profiler_enabled, torch._C._len_torch_dispatch_stack  # of this thread
# The methods: how many arguments are data, of what kind the options are that follow, and an older name in torch.
_METHODS = [*csv.reader(Path(__file__).with_suffix(".csv").read_text("utf-8").splitlines())]
FORMS = {name: (int(count), getattr(c10d, kind) if kind else None) for name, count, kind, _ in _METHODS}
OTHER_NAMES = {older: name for name, _, _, older in _METHODS if older}


def as_torch_calls_it(kind: type) -> None:
    """Let each method of a class take its options in all ways that torch's groups know, and show the call to torch."""
    for name in (*FORMS, *OTHER_NAMES):
        setattr(kind, name, _in_all_forms(name, getattr(kind, OTHER_NAMES.get(name, name))))


def _in_all_forms(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    count, kind = FORMS[OTHER_NAMES.get(name, name)]
    length = count if kind is None else count + 1

    @functools.wraps(method)
    def call(group: Any, *args: Any, **named: Any) -> Any:
        if named or len(args) != length or type(args[-1]) is not kind:
            args = with_options(name, args, named)
        if profiler_is_on() or num_modes():
            group.shown.show(name, args)
        return method(group, *args)

    return call


def with_options(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return a method's arguments with its options as one object: they may come one by one, as op, root, timeout."""
    count, kind = FORMS[OTHER_NAMES.get(name, name)]
    if kind is None or (len(args) == count + 1 and type(args[count]) is kind and not named):
        return (*args, *named.values()) if named else args
    options = kind()
    for value in (*args[count:], *named.values()):
        if isinstance(value, kind):
            options = value
        elif value is not None:
            place = "timeout" if isinstance(value, timedelta) else "rootRank" if type(value) is int else "reduceOp"
            setattr(options, place, value)
    return (*args[:count], options)


def event_of(op: str, tensors: Sequence[torch.Tensor]) -> Future[None] | None:
    """Begin an event in torch's profiler, if it is on, with the shapes of what is sent; settle the future to end it."""
    if not profiler_is_on():
        return None
    over: Future[None] = Future()
    event = _autograd._record_function_with_args_enter(f"shared:{op}", *tensors)
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(event, over)
    return over


def until(event: Future[None], call: Callable[[], None]) -> None:
    """Make a call, and end its event."""
    try:
        call()
    finally:
        event.set_result(None)


class Unmoved(dist.ProcessGroup):
    """A group that moves nothing: its calls go through torch's operators, where profilers and modes see them."""


class Shown:
    """Shows the calls of a group to torch: each is made once more, in a group that moves nothing."""

    def __init__(self, group: Any) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._unmoved: Unmoved | None = None

    def show(self, name: str, args: Sequence[Any]) -> None:
        """Show a call that is about to be made."""
        if self._unmoved is None:
            self._unmoved = Unmoved(self._rank, self._size)  # type: ignore[call-arg]
            fake = c10d.FakeProcessGroup._create_internal(self._rank, self._size)
            self._unmoved._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)
        tensors = [one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # what cannot be is refused by the call itself
            if dense.overlap((one.data_ptr(), dense.extent_of(one), True) for one in tensors):
                args = pytree.tree_map_only(torch.Tensor, torch.clone, args)  # to show a gather writes its outputs
            getattr(dist.ProcessGroup, name)(self._unmoved, *args)
