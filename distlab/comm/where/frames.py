"""Whose line a frame is: of a call that is just made, and in the stacks that a process writes itself (faulthandler).

`find_site` walks up from a frame. The first frame outside torch and the standard library is the line that made the
call; the first one that is outside distlab as well is the line that a learner wrote.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

Owner = Literal["torch", "distlab", "python", "package", "user"]

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PYTHON = re.compile(r"/lib/python3[^/]*/|^<frozen|^<string>$")
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_TORCH = re.compile(r"/(?:site|dist)-packages/torch/")
_MACHINERY = re.compile(
    r"distlab/(?:comm/(?:(?:launch|record|watch|nodes|shared_memory)/|standby\.py)|course/lab/)|^<frozen|^<string>$"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LOOKING = threading.Lock()

# The learner's file and line ("?" where no frame is theirs), and the file and line of distlab that made the call for
# them ("" where they made it). A plain tuple: one is made per call.
Site = tuple[str, int, str, int]


class Frame(NamedTuple):
    """A function under way: its file, its line, its name."""

    file: str
    line: int
    function: str


@functools.lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """Return whose the code of a file is: torch's, distlab's, Python's own, a different package's, or the user's."""
    if file.startswith(_OURS) or "/distlab/comm/" in file:  # also of a different copy of distlab
        return "distlab"
    torch = importlib.util.find_spec("torch")  # where it lies, perhaps its source tree; it is not loaded for this
    if _TORCH.search(file) or (torch is not None and file.startswith(os.path.dirname(str(torch.origin)) + os.sep)):
        return "torch"
    if _PACKAGES.search(file):
        return "package"
    return "python" if file.startswith(_STANDARD) or _PYTHON.search(file) else "user"


def is_machinery(file: str) -> bool:
    """Tell whether code only carries calls: it starts or watches ranks, records their calls, or moves their bytes."""
    return _MACHINERY.search(file) is not None


def find_site(frame: FrameType | None) -> Site:
    """Return the site of a call that was made from this frame.

    A C++ thread of autograd has no frame of the learner's; then the main thread's place is the answer, which is the
    line that called backward().
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
    """Return the frame in which the main thread stands, asked from a different thread.

    Before Python 3.12, sys._current_frames makes frame objects while it holds the interpreter's list of threads. A
    garbage collection there may run a finalizer that releases the interpreter lock. A thread that starts, or asks
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


def threads_in(dump: str) -> list[tuple[str, list[Frame]]]:
    """Return the threads of faulthandler's dump: each one's text and its frames, innermost first. Main comes last."""
    blocks = re.split(r"\n\n(?=(?:Current thread|Thread) 0x)", dump.strip())
    return [(block, [Frame(f, int(line), name) for f, line, name in _FRAME.findall(block)]) for block in blocks]


def traceback_lines(frames: Sequence[Frame]) -> list[str]:
    """Write frames, of which the first is the innermost, as a traceback does: innermost last, with source lines."""
    summaries = [traceback.FrameSummary(*frame) for frame in reversed(frames)]
    return "".join(traceback.format_list(summaries)).splitlines()
