"""What the extension puts into a notebook, and what a notebook says of its ranks: what they hold, what went wrong.

It needs no IPython to be imported: `take` and `holdings` are called inside a rank.
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
    from matplotlib.figure import Figure

    from simulator.viz import Picture

ENDED = "The ranks have ended, and their variables with them; the next %%ranks cell starts new ones."
KEPT = "The ranks are still there, with their variables."
WIDTH = 100  # characters that a cell's output shows in a line, in a window of 1280 pixels
STOPPED = "You stopped the ranks. This is where each one stood:"
_CELL_FILE = re.compile(r"(/[^\s\"()]*ipykernel_\d+/\d+\.py)(?::(\d+))?|<ranks (In\[\d+\])>(?::(\d+))?")
_FRAME = re.compile(r'^  File "([^"]+)", line \d+', re.MULTILINE)
_NAME = re.compile(r"raised NameError: name '(\w+)' is not defined")
GIVEN = ("rank", "world_size", "torch", "dist")  # names that a rank begins with


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register %%ranks, add the names that are not defined yet, and start loading torch for the ranks."""
    if "torch" not in sys.modules:
        print("Loading PyTorch, here and for the ranks. The first time takes about five seconds.", flush=True)
    from distlab.comm import RankError, warm
    from distlab.comm.command import put_on_path
    from distlab.course.grading import check
    from distlab.course.grading.answer.source import names_for_functions
    from distlab.course.notebook.magic import RanksMagics, last_records
    from distlab.course.notebook.prediction import predict
    from distlab.course.notebook.stuck import hint, solution

    put_on_path()  # so that `!distlab lab 03` runs in a cell
    warm()  # first: the fork server loads torch while this process does
    shell.register_magics(RanksMagics)
    shell.set_custom_exc((RankError, KeyboardInterrupt), _show_short)  # type: ignore[no-untyped-call]
    own = {"check": check, "predict": predict, "hint": hint, "solution": solution}
    for name, value in (names_for_functions() | own | {"show": show, "last_records": last_records}).items():
        shell.user_ns.setdefault(name, value)


def _show_short(shell: InteractiveShell, kind: type, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    """Show a RankError of `run` or `Ranks` by its text: the ranks' own tracebacks, not those of the launcher."""
    text = of_ranks(error, trace, shell)
    if text is None:  # an interrupt of anything else
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    else:
        shell.showtraceback((CellError, CellError(text), None))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the ranks; names stay."""
    from distlab.course.notebook.magic import stop_ranks

    stop_ranks(shell)


def show(picture: Picture | Figure, words: str = "") -> None:
    """Display a Picture of `simulator.viz`, or a figure with the words that say what it shows; they stand below it.

    Raises:
        ValueError: there are no words: a picture without words says nothing to those who cannot see it.
    """
    from IPython.display import display

    from simulator.viz import Picture

    shown = picture if isinstance(picture, Picture) else Picture(picture, words)
    shown = shown._replace(words=words or shown.words)
    if not shown.words.strip():
        raise ValueError("show(figure, words) needs the words that say what the figure shows")
    display(shown)  # type: ignore[no-untyped-call]


def take(values: Mapping[str, object]) -> None:
    """Put these names into the namespace in which a rank's cells run."""
    sys.modules["__main__"].__dict__.update(values)


def holdings() -> list[str]:
    """Return the names that cells have made on this rank, each with what it is."""
    names = sys.modules["__main__"].__dict__
    return [
        f"{name} ({_describe(value)})"
        for name, value in names.items()
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
