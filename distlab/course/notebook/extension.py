"""Put the magics and the names that lessons use into a notebook, and show a picture with its words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib.figure import Figure

    from simulator.viz import Picture


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
    from distlab.course.notebook.ranks import CellError, of_ranks

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
