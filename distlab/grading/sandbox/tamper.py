"""What an answer may not touch while it is checked: torch's functions, the frames of the check, its files, other wires.

A check's drive runs in the same process as the answer. It compares with `torch.equal` and holds values that the answer
should work out by itself. So a replaced function is put back and named, and a look into the check is refused. The
verdict is never made here: the process that started the ranks judges plain data.
"""

from __future__ import annotations

import builtins
import importlib
import math
import os
import re
import sys
import time
from collections.abc import Callable
from operator import is_, itemgetter
from types import FrameType, FunctionType
from typing import Any

from distlab.grading.exercise import Refused
from distlab.grading.sandbox.wires import Ways, is_answers, leads_from_answer, poses, reads_for_answer, went_around

_LOOKS = {
    "sys._getframe",
    "sys._current_frames",
    "sys._current_exceptions",
    "sys.settrace",
    "sys.setprofile",
    "sys.monitoring.register_callback",  # from Python 3.12 on
    "sys.addaudithook",
    "gc.get_objects",
    "gc.get_referrers",
    "gc.get_referents",
}
_OF_THE_CHECK = ("distlab.grading.", "distlab.comm.launch.")
_CODE = ("__code__", "__defaults__", "__kwdefaults__")
_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
_FILES = {"open", "os.truncate", "os.remove", "os.rename", "os.listdir", "os.scandir", "shutil.rmtree"}
IS_REFERENCE = "this is the reference, which the check compares with: write the function yourself"
# Where references, checks and answers stand.
_CLOSED = re.compile(r"/lessons/\d\d_\w+(/|$)|/tests/(styles|mutation)/|/solution(s\.py|\.ipynb)$")
_SOLUTION = re.compile(r"(^|/)lessons/\d\d_\w+/solutions\.py$|/tests/styles/|^<sealed solutions")
_MOVES = {"Storage"}  # torch itself replaces it when the default dtype changes


class Untouched:
    """Functions and classes that must stay what they are; `check` puts back what was replaced, and refuses."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        from distlab.comm.record import file, intercept, recorder
        from distlab.grading.diagnosis import traffic, values

        importlib.import_module("distlab.grading.variation.calls")  # before an answer can load and change it
        places: tuple[Any, ...] = (torch, torch.Tensor, torch.linalg, torch.nn.functional, torch.nn.Module)
        places += (torch.autograd, dist, c10d)
        places += (dist.Work, dist.ProcessGroup, math, time, values, traffic, torch.nn.Parameter)
        places += (file.RecordWriter, intercept.FrontEnd, recorder.Recorder)
        places += tuple(module for name, module in sys.modules.items() if name.startswith(_OF_THE_CHECK))
        self._places = [_Place(place) for place in places if any(map(_acts, vars(place).values()))]
        self._builtins = dict(vars(builtins))

    def check(self) -> None:
        """Put back what was replaced.

        Raises:
            Refused: something was replaced.
        """
        replaced, now = [], builtins.__dict__
        for name, value in self._builtins.items():  # first, and with none of them: all() may be replaced too
            if now.get(name) is not value:
                now[name] = value
                replaced += [f"builtins.{name}"]
        replaced += [name for place in self._places for name in place.restore()]
        if replaced:
            raise Refused(
                "replaced",
                f"it replaced {', '.join(sorted(replaced))}, which everything else in the program uses too: give a "
                "function of your own another name",
            )


class _Place:
    """A module or class, with the functions and classes in it."""

    def __init__(self, place: Any) -> None:
        self.place = place
        found = {name: value for name, value in vars(place).items() if _acts(value) and name not in _MOVES}
        self.names, self.values = tuple(found), tuple(found.values())
        self._get = itemgetter(*self.names, self.names[0])  # twice the first: of one name it would return no tuple
        self._size = len(vars(place))

    def restore(self) -> list[str]:
        """Put back what was replaced, and return its names."""
        now, replaced = vars(self.place), []
        grew = isinstance(self.place, type) and len(now) != self._size  # what a class inherits can be covered
        try:
            if all(map(is_, self._get(now), self.values)) and not grew:
                return []
        except KeyError:  # one was deleted
            pass
        for name in [name for name, value in now.items() if grew and _acts(value) and name not in self.names]:
            delattr(self.place, name)
            replaced.append(f"{self.place.__name__}.{name}")
        for name, value in zip(self.names, self.values, strict=True):
            if now.get(name) is not value and not _is_of_compile(now.get(name)):
                setattr(self.place, name, value)
                replaced.append(f"{self.place.__name__}.{name}")
        return replaced


def _is_of_compile(value: Any) -> bool:
    """Whether torch.compile put it there: it counts the changes of modules."""
    guard = os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "_dynamo", "mutation_guard.py")
    return type(value) is FunctionType and value.__code__.co_filename == guard


def _acts(value: Any) -> bool:
    return callable(value) or issubclass(type(value), property)  # an instance's __class__ may warn or lie


class Fence:
    """An audit hook that refuses a look into the check, by the answer's own lines, while the answer runs."""

    def __init__(self, private: str) -> None:
        self.is_up = False
        self.ways, self.num_calls = Ways(), 0
        self._private = private  # name of the folder with the records of this run
        self._busy = False
        self._frame = sys._getframe

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Refuse the event where the answer itself causes it (called by Python for every audit event)."""
        if not self.is_up or self._busy:
            return
        if event == "exec" and _is_solution(getattr(args[0], "co_filename", "")):
            raise Refused("reference", IS_REFERENCE)
        message = ""
        if event in _LOOKS or (event == "object.__getattr__" and args[1] in _FRAMES):
            message = f"it looks into the running check ({event}); work the result out from the arguments"
        elif event in _FILES and self._is_closed(args[0]) and self._is_own(reads_for_answer):
            raise Refused("looked", f"it opens a file of the check ({event}); work the result out from the arguments")
        elif event in ("compile", "code.__new__") and poses(args[1]):
            message = f"it gives its code the name of another's file ({args[1]}); take a name of your own"
        elif event == "object.__setattr__" and args[1] in _CODE:
            message = f"it replaces what a function does ({args[1]}); write a function of your own"
        elif event == "marshal.loads":
            message = "it loads code that was compiled before (marshal.loads); write the function yourself"
        if message and self._is_own(is_answers):
            raise Refused("looked", message)
        if (what := self.ways.refused(event, args)) and self._is_own(leads_from_answer):
            raise went_around(what)

    def _is_own(self, look: Callable[[FrameType | None], bool]) -> bool:
        """Whether the answer's own code caused the event that the hook was called for."""
        self._busy = True
        try:
            return look(self._frame(2))
        finally:
            self._busy = False

    def _is_closed(self, path: Any) -> bool:
        """Return whether a path leads to the records of this run, or to the checks and solutions of a lesson."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        parts = os.path.abspath(os.fsdecode(path)).split(os.sep)
        if self._private in parts:
            return True
        return _CLOSED.search(os.sep.join(parts)) is not None


def _is_solution(file: str) -> bool:
    """Return whether a file of this name holds a lesson's references."""
    return _SOLUTION.search(file) is not None
