"""Whose line a frame is, and the stacks that a process writes itself (faulthandler)."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Owner = Literal["torch", "distlab", "python", "package", "user"]

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PYTHON = re.compile(r"/lib/python3[^/]*/|^<frozen|^<string>$")
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_TORCH = re.compile(r"/(?:site|dist)-packages/torch/")
_MACHINERY = re.compile(
    r"distlab/(?:comm/(?:launch/|record/|watch/|standby\.py)|(?:shared_memory|nodes|lab)/)|^<frozen|^<string>$"
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


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
    if _TORCH.search(file) or file.startswith(_torch_folder()):
        return "torch"
    if _PACKAGES.search(file):
        return "package"
    return "python" if file.startswith(_STANDARD) or _PYTHON.search(file) else "user"


@functools.cache
def _torch_folder() -> str:
    """Return where torch lies, which may be its source tree; it is not loaded for this."""
    found = importlib.util.find_spec("torch")
    return os.path.dirname(str(found.origin)) + os.sep if found is not None else "/no torch/"


def is_machinery(file: str) -> bool:
    """Tell whether code only carries calls: it starts or watches ranks, records their calls, or moves their bytes."""
    return _MACHINERY.search(file) is not None


def threads_in(dump: str) -> list[tuple[str, list[Frame]]]:
    """Return the threads of faulthandler's dump: each one's text and its frames, innermost first. Main comes last."""
    blocks = re.split(r"\n\n(?=(?:Current thread|Thread) 0x)", dump.strip())
    return [(block, [Frame(f, int(line), name) for f, line, name in _FRAME.findall(block)]) for block in blocks]


def traceback_lines(frames: Sequence[Frame]) -> list[str]:
    """Write frames, of which the first is the innermost, as a traceback does: innermost last, with source lines."""
    lines = []
    for file, line, name in reversed(frames):
        source = linecache.getline(file, line).strip()
        lines += [f'  File "{file}", line {line}, in {name}', *([f"    {source}"] if source else [])]
    return lines
