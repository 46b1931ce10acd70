"""What an answer may do while it is checked, enforced inside each rank: memory, files, processes, the group.

A rank is a process of its own that is killed afterwards, and what it sends back is read as plain data. So this is no
boundary that holds against all malice. It turns what goes wrong into a sentence: a function that eats all memory,
starts processes, replaces torch's functions, looks into the check or leaves the group is told so.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import resource
import sys
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from distlab.comm.launch.worker import own_job
from distlab.grading.diagnosis.blame import file_of
from distlab.grading.exercise import Refused
from distlab.grading.sandbox.library import Twins, is_twin, refuse_twins
from distlab.grading.sandbox.tamper import Fence, Untouched
from distlab.grading.sandbox.wires import belongs_to_answer, close_other_wires, is_answers

MAX_FILE_BYTES = 256 << 20
_STARTS_A_PROCESS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn", "subprocess.Popen"}


class Board:
    """A store that an answer may use: what is written there reaches the other ranks, and no record sees it.

    Args:
        store: of torch; answers may not call its methods.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until there is a value, and return it."""
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0, and return the sum."""
        return int(self._store.add(key, amount))

    def wait(self, keys: list[str]) -> None:
        """Wait until all have a value."""
        self._store.wait(keys)


def drive_on_rank(
    drive: Callable[..., Any],
    fn: Callable[..., Any],
    memory_limit_bytes: int,
    twins: Twins | None = None,
    *,
    is_looked_at: bool = True,
) -> Any:
    """Drive a learner's function on this rank under limits, and return what the drive returns.

    Args:
        drive: calls the function.
        fn: the learner's.
        memory_limit_bytes: for what it adds to this process.
        twins: functions of the library that it may not lead to.
        is_looked_at: after each call, at what it must leave as it was; else the drive does so, with the `look` of what
            it is given.
    """
    from distlab.grading.variation.left import restored

    limit_process(memory_limit_bytes)
    forbid_processes()
    fence = Fence(own_job())
    sys.addaudithook(fence.hook)
    close_other_wires(lambda: fence.is_up, fence.ways)
    if twins is not None:
        refuse_twins(twins, lambda: fence.is_up)
    belongs_to_answer([file_of(fn), *(name for name, _ in getattr(getattr(fn, "source", None), "pieces", ()))])
    _as_in_a_program_of_its_own(fence)
    untouched = Untouched()
    streams = sys.stdout, sys.stderr
    try:
        with restored():
            if (load := getattr(fn, "load", None)) is not None:  # or the first call would be judged with the whole file
                guarded(load, untouched, fence)()
            result = drive(guarded(fn, untouched, fence, is_looked_at=is_looked_at))
        untouched.check()  # the drive may have called what the function returned
        return result
    finally:
        sys.stdout, sys.stderr = streams  # or the rank could not flush what was printed


def limit_process(memory_limit_bytes: int) -> None:
    """Limit memory beyond what this process has now, the size of a file, and core dumps."""
    with contextlib.suppress(OSError, ValueError):  # systems other than Linux have no /proc, or refuse a limit
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[5])  # written to or kept for it; not what is only mapped or reserved
        _lower(resource.RLIMIT_DATA, pages * resource.getpagesize() + memory_limit_bytes)
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
        _lower(resource.RLIMIT_CORE, 0)


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def forbid_processes() -> None:
    """Refuse, from now on, to start a process or to signal another one."""
    own = os.getpid()

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS_A_PROCESS:
            raise Refused("forked", f"it starts a process ({event}); a check gives each rank one process: use that one")
        if event in ("os.kill", "os.killpg") and args[0] not in (own, 0) and os.getpid() == own:
            raise Refused("forked", f"it sends a signal to process {args[0]}, which is not its own")

    sys.addaudithook(refuse)


def _as_in_a_program_of_its_own(fence: Fence) -> None:
    """Let hash() of a text differ from call to call, as between programs; refuse what would be run at a program's end.

    A call stands for one of another rank where a function is told its rank, so a number of ranks is not enough.
    """
    at_end, plain, find = atexit.register, builtins.hash, sys._getframe

    def register(fn: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if fence.is_up and is_answers(find(1)):
            text = "it leaves a function to be run at the program's end (atexit.register), which is the caller's"
            raise Refused("state left behind", f"{text}: do before you return what is to be done")
        return at_end(fn, *args, **named)

    def hashed(value: Any, /) -> int:
        number = plain(value)
        is_own = fence.is_up and _holds_text(value) and is_answers(find(1))
        return plain((os.getpid(), fence.num_calls, number)) if is_own else number

    atexit.register, builtins.hash = register, hashed  # type: ignore[assignment]


def _holds_text(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, tuple | frozenset) and any(map(_holds_text, value)))


def in_python_numbers(value: Any, depth: int = 20) -> Any:
    """Return a value with Python's numbers for numpy's: np.int64(8) is 8; what holds none is returned itself."""
    import numpy as np

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


def guarded(
    fn: Callable[..., Any], untouched: Untouched, fence: Fence, *, is_looked_at: bool = True
) -> Callable[..., Any]:
    """Wrap a function in the fence; what it must leave as it was is looked at after each call, or by `look`."""
    look = _look(untouched)

    def call(*args: Any, **named: Any) -> Any:
        allowed = fence.ways.allow((*args, *named.values()))
        fence.is_up, was_up = True, fence.is_up
        fence.num_calls += 1
        try:
            result = fn(*args, **named)
        finally:
            fence.is_up = was_up
            fence.ways.put_back(allowed)
        if is_looked_at:
            look()
        return _fenced(in_python_numbers(result), fence, (*args, *named.values()))

    with contextlib.suppress(Exception):
        functools.update_wrapper(call, fn)
    call.look = look  # type: ignore[attr-defined]
    return call


def _look(untouched: Untouched) -> Callable[[], None]:
    """Return a function that refuses where something is no longer what it is now."""
    import torch
    import torch.distributed as dist

    from distlab.grading.variation.left import kept

    dtype, device, group, state = torch.get_default_dtype(), torch.get_default_device(), dist.group.WORLD, kept()

    def look() -> None:
        untouched.check()
        if not dist.is_initialized() or dist.group.WORLD is not group:
            raise Refused(
                "left the group",
                "it destroyed or replaced the process group (dist.destroy_process_group), which belongs to the caller: "
                "leave it as it is",
            )
        if torch.get_default_dtype() != dtype:
            raise Refused(
                "default dtype",
                f"it changed torch's default dtype to {torch.get_default_dtype()}, for everything that comes after; "
                "give the dtype to the tensors that you make",
            )
        if torch.get_default_device() != device:
            now = torch.get_default_device()
            torch.set_default_device(device)  # or the check's own tensors would land there
            raise Refused(
                "default device",
                f"it changed torch's default device to {now}, for everything that comes after; "
                "give the device to the tensors that you make",
            )
        if (after := kept()) != state:
            what = next(name for name in state if after[name] != state[name])
            raise Refused("state left behind", f"it changed {what}, for everything that comes after: put it back")

    return look


def _fenced(result: Any, fence: Fence, given: tuple[Any, ...]) -> Any:
    """Return a result whose functions, called later, run behind the fence as well; `given` are the arguments."""
    if type(result) in (tuple, list):
        items = [_fenced(item, fence, given) for item in result]
        is_same = all(new is old for new, old in zip(items, result, strict=True))
        return result if is_same else type(result)(items)
    if not isinstance(result, FunctionType | MethodType | BuiltinMethodType | functools.partial):
        return result
    if isinstance(result, FunctionType) and is_twin(result):
        raise Refused(
            "library", f"it returns {result.__module__}.{result.__qualname__} of the library: write it yourself"
        )

    @functools.wraps(result)
    def call(*args: Any, **named: Any) -> Any:
        allowed = fence.ways.allow((*given, *args, *named.values()))
        fence.is_up, was_up = True, fence.is_up
        try:
            return in_python_numbers(result(*args, **named))
        finally:
            fence.is_up = was_up
            fence.ways.put_back(allowed)

    return call
