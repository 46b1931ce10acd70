"""Where a call was made: the learner's own line, not torch's and not distlab's.

`find_site` walks up from a frame. The first frame outside torch and the standard library is the line that made the
call; the first one that is outside distlab as well is the line that a learner wrote. `GroupWatch` tells of groups so.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distlab.comm.where.frames import owner_of

_LOOKING = threading.Lock()


# The learner's file and line ("?" where no frame is theirs), and the file and line of distlab that made the call for
# them ("" where they made it). A plain tuple: one is made per call.
Site = tuple[str, int, str, int]


class SiteFinder:
    """Find call sites."""

    def find(self, frame: FrameType | None) -> Site:
        """Return the site of a call that was made from this frame.

        A C++ thread of autograd has no frame of the learner's; then the main thread's place is the answer, which is
        the line that called backward().
        """
        via_file, via_line, seen_main = "", 0, False
        while True:
            while frame is not None:
                file = frame.f_code.co_filename
                owner = owner_of(file)
                if owner in ("user", "package") or file == "<string>":  # as of python -c
                    return file, frame.f_lineno, via_file, via_line
                if owner == "distlab" and not via_file:
                    via_file, via_line = file, frame.f_lineno
                frame = frame.f_back
            main = threading.main_thread().ident
            if seen_main or main is None or main == threading.get_ident():
                return via_file or "?", via_line, "", 0
            frame, seen_main = main_frame(main), True


def main_frame(main: int) -> FrameType | None:
    """Return the frame in which the main thread stands, asked from another thread.

    Before Python 3.12, sys._current_frames makes frame objects while it holds the interpreter's list of threads. A
    garbage collection there may run a finalizer that releases the interpreter lock. Another thread that starts, or asks
    the same, then takes that lock and waits for the list: the process is deadlocked. So collection is off meanwhile.
    """
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(main)
        finally:
            if collects:
                gc.enable()


def is_internal(frame: FrameType | None) -> bool:
    """Tell whether torch itself, and no code above it, made the call that this frame is in.

    The frames of torch.distributed's public functions are passed over; what called them decides.
    """
    public = (os.path.join("distributed", "distributed_c10d.py"), os.path.join("distributed", "c10d_logger.py"))
    while frame is not None and frame.f_code.co_filename.endswith(public):
        frame = frame.f_back
    return frame is not None and owner_of(frame.f_code.co_filename) == "torch"


def blocks_rank() -> bool:
    """Tell whether a wait on this thread stops the rank: on the main one, or while that is in backward()."""
    main = threading.main_thread().ident
    if main is None or main == threading.get_ident():
        return True
    frame = main_frame(main)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class GroupWatch:
    """Tell at which line a group is made or destroyed: ranks wait for each other there, too.

    Args:
        finder: finds the line.
        tell: called with "begun", "made" or "left", and the members and the line.
    """

    def __init__(self, finder: SiteFinder, tell: Callable[..., None]) -> None:
        self.finder, self.tell = finder, tell
        self._real_new, self._real_destroy = c10d._new_group_with_tag, c10d.destroy_process_group

    def install(self) -> None:
        """Put both wrappers in torch's place."""
        c10d._new_group_with_tag = functools.wraps(self._real_new)(functools.partial(self._new))
        destroy = functools.wraps(self._real_destroy)(functools.partial(self._destroy))
        c10d.destroy_process_group = dist.destroy_process_group = destroy

    def restore(self) -> None:
        """Put torch's own functions back."""
        c10d._new_group_with_tag = self._real_new
        c10d.destroy_process_group = dist.destroy_process_group = self._real_destroy

    def _new(self, ranks: Any = None, *args: Any, **named: Any) -> Any:
        if named.get("use_local_synchronization"):  # then only its members meet
            return self._real_new(ranks, *args, **named)
        self._note("begun", ranks)
        try:
            return self._real_new(ranks, *args, **named)
        finally:
            self.tell("made")

    def _destroy(self, group: Any = None) -> Any:
        """Who still uses the group learns only that a connection was closed."""
        if group is None or group in c10d._world.pg_group_ranks:  # what is not a group here is torch's to refuse
            is_all = group is None or group is dist.group.WORLD
            self._note("left", None if is_all else dist.get_process_group_ranks(group))
        return self._real_destroy(group)

    def _note(self, event: str, ranks: Any) -> None:
        site = self.finder.find(sys._getframe(2))
        self.tell(event, f"{'of all ranks' if ranks is None else sorted(ranks)} at {site[0]}:{site[1]}")
