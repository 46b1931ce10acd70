"""What a notebook says of its ranks: the names that they hold; what went wrong, the cause and the cell's line first.

It needs no IPython: `take` and `holdings` are called inside a rank.
"""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
import types
from collections.abc import Mapping, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distlab.comm.where.frames import owner_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

ENDED = "The ranks have ended, and their variables with them; the next %%ranks cell starts new ones."
KEPT = "The ranks are still there, with their variables."
ADVICE = "Run the cells above this one first, in the menu: Run > Run All Above Selected Cell."
WIDTH = 100  # characters that a cell's output shows in a line, in a window of 1280 pixels
STOPPED = "You stopped the ranks. This is where each one stood:"
_CELL_FILE = re.compile(r"(/[^\s\"()]*ipykernel_\d+/\d+\.py)(?::(\d+))?|<ranks (In\[\d+\])>(?::(\d+))?")
_FRAME = re.compile(r'^  File "([^"]+)", line \d+', re.MULTILINE)
_NAME = re.compile(r"raised NameError: name '(\w+)' is not defined")
GIVEN = ("rank", "world_size", "torch", "dist")  # names that a rank begins with


def take(values: Mapping[str, object]) -> None:
    """Put these names into the namespace in which a rank's cells run."""
    sys.modules["__main__"].__dict__.update(values)


def holdings() -> list[str]:
    """Return the names that cells have made on this rank, each with what it is."""
    return [
        f"{name} ({_describe(value)})"
        for name, value in sys.modules["__main__"].__dict__.items()
        if not name.startswith("_")
        and name not in GIVEN
        and not isinstance(value, types.ModuleType)
        and not getattr(value, "__module__", "").startswith("distlab.comm")  # what a rank itself is made of
    ]


def _describe(value: object) -> str:
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if shape is not None:
        return f"{kind} {list(shape)}"
    if isinstance(value, bool | int | float):
        return repr(value)
    return f"{kind} of {len(value)}" if isinstance(value, Sized) else kind


class CellError(RuntimeError):
    """A %%ranks cell failed; shown as its text alone, without the frames of the notebook's machinery."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def explain(text: str, notebook_names: Mapping[str, object], *, kept: bool = False) -> str:
    """Shorten the text of a RankError for a notebook, and add what helps; kept: whether the ranks live on."""
    if text.startswith("the call was interrupted"):
        text = text.replace("the call was interrupted", STOPPED, 1)
    lines = [shorten(text)]
    missing = _NAME.search(text)
    if missing and missing[1] in notebook_names and not missing[1].startswith("_"):
        name = missing[1]
        lines += ["", f"{name} is in the notebook; ranks are processes of their own. Copy it: %%ranks --push {name}"]
    return "\n".join([*lines, "", KEPT if kept else ENDED])


def advise(shell: InteractiveShell, kind: type, error: NameError, trace: Any, tb_offset: Any = None) -> None:
    """Show a NameError, and below it what to do where cells were left out, or a restart has taken what they made."""
    error.add_note(f"No cell that has run since this kernel began has made the name {error.name!r}. {ADVICE}")
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Advise from a kernel's start, before a notebook's own extension is there: `make lessons` starts kernels so."""
    shell.set_custom_exc((NameError,), advise)  # type: ignore[no-untyped-call]


def shorten(text: str) -> str:
    """Leave out the frames inside torch and the standard library, where the learner's own are there."""
    if all(_is_foreign(file) for file in _FRAME.findall(text)):
        return text
    kept, hidden = [], False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        hidden = _is_foreign(frame[1]) if frame else hidden and line.startswith("    ") and bool(line.strip())
        if not hidden:
            kept.append(line)
    return "\n".join(kept)


def of_ranks(error: BaseException, trace: TracebackType | None, shell: InteractiveShell) -> str | None:
    """Return the text of a RankError, or of an interrupt of ranks (a check has some); None for any other interrupt.

    Its last line names the notebook's line from which ranks were called, if it is known.
    """
    frames = traceback.extract_tb(trace)
    text = shorten(str(error))
    if isinstance(error, KeyboardInterrupt):
        if not any(frame.filename.endswith("distlab/comm/launch/ranks.py") for frame in frames):
            return None
        stood = shorten("\n".join(getattr(error, "__notes__", ())))
        text = f"{STOPPED}\n\n{stood}\n\nThey have ended." if stood else "You stopped the ranks. They have ended."
    own = [frame for frame in frames if not _is_foreign(frame.filename) and "/distlab/" not in frame.filename]
    text += f"\n\ncalled in line {own[-1].lineno} of {own[-1].filename}" if own else ""
    return name_cells(text, shell)


def name_cells(text: str, shell: InteractiveShell) -> str:
    """Say "your cell, line 8" for a line of the cell that has just run, and "In[3], line 8" for a line of others."""
    newest = f"In[{len(shell.user_ns.get('In', ' ')) - 1}]"

    def name(match: re.Match[str]) -> str:
        file, line = match[1], match[2] or match[4]
        known = shell.compile.format_code_name(file) if file else None
        cell = match[3] or (known[1] if known else file)
        return f"{'your cell' if cell == newest else cell}{f', line {line}' if line else ''}"

    return _CELL_FILE.sub(name, text)


def in_cells(error: BaseException) -> str:
    """Return an error's text with this notebook's cells in place of the kernel's files: "In[3], line 8".

    A line that is longer than a cell's output is wide goes on below, further to the right.
    """
    from IPython import get_ipython

    shell = get_ipython()
    text = str(error) if shell is None else name_cells(str(error), shell)
    return "\n".join(_folded(line) for line in text.splitlines())


def _folded(line: str) -> str:
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    folded = textwrap.wrap(line, WIDTH, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
    return "\n".join(folded) or line


def _is_foreign(file: str) -> bool:
    return owner_of(file) in ("torch", "package", "python")
