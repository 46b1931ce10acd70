"""Put the magics and the names that lessons use into a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register %%ranks, add the names that are not defined yet, and start loading torch for the ranks."""
    if "torch" not in sys.modules:
        print("Loading PyTorch, here and for the ranks. The first time takes about five seconds.", flush=True)
    from distlab.comm import RankError, warm
    from distlab.comm.command import put_on_path
    from distlab.course.notebook.magics.magic import RanksMagics

    put_on_path()  # so that `!distlab lab 03` runs in a cell
    warm()  # first: the fork server loads torch while this process does
    shell.register_magics(RanksMagics)
    shell.set_custom_exc((RankError, KeyboardInterrupt), _show_short)  # type: ignore[no-untyped-call]
    for name, value in _names().items():
        shell.user_ns.setdefault(name, value)


def _show_short(shell: InteractiveShell, kind: type, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    """Show a RankError of `run` or `Ranks` by its text: the ranks' own tracebacks, not those of the launcher."""
    from distlab.course.notebook.magics.trouble import (
        ENDED_TOO,
        STOPPED,
        CellError,
        called_from,
        is_in_ranks,
        name_cells,
        shorten,
        stopped_check,
    )

    text = shorten(str(error))
    if isinstance(error, KeyboardInterrupt):
        if line := stopped_check(error, trace, shell):
            shell.showtraceback((CellError, CellError(line), None))
            return
        if not is_in_ranks(trace):  # an interrupt of anything else
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
            return
        stood = "\n".join(getattr(error, "__notes__", ()))
        text = f"{STOPPED}\n\n{shorten(stood)}\n\n{ENDED_TOO}" if stood else f"You stopped the ranks. {ENDED_TOO}"
    text = "\n".join([text, *called_from(trace)])
    shell.showtraceback((CellError, CellError(name_cells(text, shell)), None))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the ranks; names stay."""
    from distlab.course.notebook.magics.magic import stop_ranks

    stop_ranks(shell)


def _names() -> dict[str, Any]:
    from distlab.course.grading import check
    from distlab.course.grading.answer.source import names_for_functions
    from distlab.course.notebook.display import show
    from distlab.course.notebook.learner.prediction import predict
    from distlab.course.notebook.learner.stuck import hint, solution
    from distlab.course.notebook.magics.magic import last_records

    own = {"check": check, "predict": predict, "hint": hint, "solution": solution}
    return names_for_functions() | own | {"show": show, "last_records": last_records}
