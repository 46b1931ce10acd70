"""Call an answer in a rank, under limits: plain results come back, and what all else in the rank uses stays as it was.

A rank is a process of its own that is killed afterwards, and what it sends back is read as plain data. So an answer
that eats all memory, fills the disk, starts processes or leaves the group is told so in a sentence. This stops
accidents, not attackers: an answer runs as your user and can read what you can. Where that matters, grade in a
container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import resource
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.course.grading.diagnosis.values import describe, in_python_numbers
from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import RETURNED

MAX_FILE_BYTES = 256 << 20
MAX_OPEN_FILES = 1024
_STARTS_A_PROCESS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn", "subprocess.Popen"}
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # of the whole process: to read, and to set
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "the deterministic mode": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's anomaly mode": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "the working directory": (lambda: os.path.realpath("/proc/self/cwd"), os.chdir),  # its folder may be gone
}
_LIBRARIES = ("torch", "numpy", "distlab", "simulator")
_DEPTH = 20  # a list may hold itself


def drive_on_rank(
    drive: Callable[..., Any], fn: Callable[..., Any], memory_limit_bytes: int, *, is_looked_at: bool = True
) -> Any:
    """Drive a learner's function on this rank under limits, and return what the drive returns.

    Args:
        drive: calls the function.
        fn: the learner's.
        memory_limit_bytes: for what it adds to this process.
        is_looked_at: after each call, at what it must leave as it was; else the drive does so, with the `look` of what
            it is given.
    """
    limit_process(memory_limit_bytes)
    forbid_processes()
    streams, switches, fenced = (sys.stdout, sys.stderr), _read(), guarded(fn, is_looked_at=is_looked_at)
    try:
        if (load := getattr(fn, "load", None)) is not None:  # or the first call would be judged with the whole file
            guarded(load, is_looked_at=False)()
            _put_back(switches)
        with contextlib.suppress(AttributeError):
            inspect.unwrap(getattr(fn, "_fn", fn)).__globals__["hash"] = _hash
        return drive(fenced)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1:] * 2)  # for words
        error.add_note(f"{RETURNED} {fenced.returned}")  # type: ignore[attr-defined]
        raise
    finally:
        sys.stdout, sys.stderr = streams  # or the rank could not flush what was printed


def _hash(value: Any) -> int:
    """Hash a text, or a tuple with one, as the processes of torchrun do: on each rank otherwise. Forked ones agree."""
    holds_text = any(isinstance(one, str | bytes) for one in (value if isinstance(value, tuple) else [value]))
    return hash(value) ^ (os.getpid() if holds_text else 0)


def guarded(fn: Callable[..., Any], *, is_looked_at: bool = True) -> Callable[..., Any]:
    """Wrap a function: its result must be plain, and what it must leave is looked at after each call, or by `look`."""
    group, at_first = dist.group.WORLD, _read()

    def look(before: dict[str, Any] = at_first) -> None:
        _refuse_a_change(before, group)

    def call(*args: Any, **named: Any) -> Any:
        before = _read()
        result = fn(*args, **named)
        is_long = isinstance(result, list | tuple | dict)
        returned = f"a {type(result).__name__} of {len(result)}" if is_long else describe(result)
        call.returned = returned  # type: ignore[attr-defined]
        if is_looked_at:
            look(before)
        refuse_unless_plain(result)
        return in_python_numbers(result)

    with contextlib.suppress(Exception):
        functools.update_wrapper(call, fn)
    call.look, call.returned = look, ""  # type: ignore[attr-defined]
    return call


def _read() -> dict[str, Any]:
    return {name: get() for name, (get, _) in SWITCHES.items()}


def _put_back(before: dict[str, Any]) -> list[tuple[str, Any]]:
    """Switch back what was switched; return its names, and what each was switched to."""
    switched = [(name, now) for name, now in _read().items() if now != before[name]]
    for name, _ in switched:
        SWITCHES[name][1](before[name])
    return switched


def _refuse_a_change(before: dict[str, Any], group: Any) -> None:
    if not dist.is_initialized() or dist.group.WORLD is not group:
        raise Refused(
            "left the group",
            "it destroyed or replaced the process group (dist.destroy_process_group), which belongs to the caller: "
            "leave it as it is",
        )
    for name, now in _put_back(before):
        text = f"it changed {name} from {before[name]} to {now}, for everything that comes after"
        raise Refused("state left behind", f"{text}: put it back")
    if sys.stdout is None or sys.stdout.closed:
        raise Refused("state left behind", "it closed or replaced sys.stdout, which everything else prints to")


def refuse_unless_plain(value: Any, depth: int = _DEPTH) -> None:
    """Refuse, by `Refused`, a result that is not plain data: an object of the answer's own class may equal everything.

    Plain are values of Python's own classes, of torch's, numpy's and this library's; lists, tuples, sets, dicts and
    dataclasses of these; and what can be called, where an exercise asks for it. A generator can be read only once.
    """
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if not depth or package in _LIBRARIES or issubclass(kind, Enum) or callable(value):
        return
    if issubclass(kind, list | tuple | set | frozenset):
        inner = [*value]
    elif issubclass(kind, dict):
        inner = [*value, *value.values()]
    elif dataclasses.is_dataclass(kind):
        inner = [getattr(value, field.name) for field in dataclasses.fields(kind)]
    elif package in sys.stdlib_module_names and not issubclass(kind, Iterator):
        return
    else:
        text = f"it returned an object of class {kind.__name__}, which is not a plain value or tensor"
        raise Refused("returned", f"{text}: return tensors, numbers, texts, and lists or dicts of them")
    for item in inner:
        refuse_unless_plain(item, depth - 1)


def limit_process(memory_limit_bytes: int) -> None:
    """Limit memory beyond what this process has now, the size and the number of its files, and core dumps."""
    with contextlib.suppress(OSError, ValueError):  # systems other than Linux have no /proc, or refuse a limit
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # written to; not what is only mapped
        _lower(resource.RLIMIT_DATA, pages * resource.getpagesize() + memory_limit_bytes)
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
        _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        _lower(resource.RLIMIT_CORE, 0)


def limit_number_of_processes(more: int) -> None:
    """Let this process and those that it starts add at most so many to what this user runs now (root has no limit)."""
    num_threads = 0  # of all of this user's processes: to the system each is a process
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            num_threads += len(os.listdir(tasks)) if tasks.stat().st_uid == os.getuid() else 0
    with contextlib.suppress(OSError, ValueError):
        _lower(resource.RLIMIT_NPROC, num_threads + more)


def _lower(which: int, limit: int) -> None:
    soft, hard = resource.getrlimit(which)
    known = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(which, (min(known), hard))


def forbid_processes() -> None:
    """Refuse, from now on, to start a process or to send a signal."""
    own = os.getpid()

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS_A_PROCESS:
            raise Refused("forked", f"it starts a process ({event}); a check gives each rank one process: use that one")
        if event in ("os.kill", "os.killpg") and os.getpid() == own:
            raise Refused("signal", f"it sends signal {args[1]} to process {args[0]}; a check ends its ranks itself")

    sys.addaudithook(refuse)
