"""What the extension puts into a notebook: %%ranks, which runs a cell on ranks that stay alive; names of lessons."""

from __future__ import annotations

import contextlib
import linecache
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from distlab.course.notebook.ranks import CellError, advise, explain, holdings, name_cells, of_ranks, take
from simulator.units import counted

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib.figure import Figure

    from distlab.comm import Ranks, Records
    from simulator.viz import Picture

TIMEOUT_S = 60.0
USAGE = "%%ranks 4, %%ranks [0,2], %%ranks 4 [0,2], %%ranks --push a,b"
_WORD = re.compile(
    r"""\s+
    | --push [ =]\s* (?P<push> [a-z_]\w* (?:\s*,\s* [a-z_]\w*)*) (?![,\w])
    | \[ (?P<chosen> \s*\d+\s* (?:,\s*\d+\s*)*) \]
    | (?P<size> [1-9]\d*) (?![^\s\[])""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)


class Line(NamedTuple):
    """What a %%ranks line asks for.

    Attributes:
        size: how many ranks, or None: those that run already.
        chosen: ranks that execute the cell, or None: all.
        push: names to copy from the notebook into the ranks first.
    """

    size: int | None = None
    chosen: tuple[int, ...] | None = None
    push: tuple[str, ...] = ()


def read_line(text: str) -> Line:
    """Read the arguments of %%ranks; a ValueError says what cannot be read, and what can stand there."""
    line, at = Line(), 0
    while at < len(text):
        if (found := _WORD.match(text, at)) is None:
            raise ValueError(f"%%ranks cannot read {' '.join(text[at:].split())!r}; write one of: {USAGE}")
        if names := found["push"]:
            line = line._replace(push=tuple(name.strip() for name in names.split(",")))
        elif ranks := found["chosen"]:
            line = line._replace(chosen=tuple(sorted({int(rank) for rank in ranks.split(",")})))
        elif size := found["size"]:
            line = line._replace(size=int(size))
        at = found.end()
    return line


@magics_class
class RanksMagics(Magics):
    """The notebook's ranks: one set at a time, made by the first %%ranks and kept until the number changes."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.notebook = shell
        self.ranks: Ranks | None = None
        self.records: Records | None = None

    @cell_magic("ranks")  # type: ignore[arg-type]
    def cell(self, line: str, cell: str) -> None:
        """Execute the cell on every rank; what they print comes after `[rank r]`, and the last expression's value too.

        %%ranks 4 starts four ranks, or uses the four that run; [0,2] means those two alone; --push a,b copies names of
        the notebook first. A cell ends after a minute.
        """
        try:
            self._run(read_line(line), cell)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _run(self, wanted: Line, cell: str) -> None:
        """Run a cell as its line asks for; a ValueError: the line asks for what cannot be; a CellError: it failed."""
        from distlab.comm import RankError

        known = self.notebook.user_ns
        name = f"<ranks In[{len(known.get('In', ' ')) - 1}]>"
        source = f"\n{cell}"  # lines count as they do in the notebook, where %%ranks is the first
        _compile(source, name)
        if missing := [one for one in wanted.push if one not in known]:
            raise ValueError(f"--push {missing[0]}: the notebook has no name {missing[0]!r}")
        ranks = self._ranks(wanted)
        failed, shown = "", list[str | None]()
        with _interrupt_of(ranks):
            try:
                if wanted.push:
                    ranks.run(take, {one: known[one] for one in wanted.push})
                shown = ranks.execute(source, wanted.chosen, name=name)
            except RankError as error:
                failed = name_cells(explain(str(error), known, kept=bool(ranks.pids)), self.notebook)
        with contextlib.suppress(RuntimeError):
            self.records = ranks.records()
        if failed:
            raise CellError(failed)
        for rank, value in zip(wanted.chosen or range(ranks.world_size), shown, strict=True):
            for line in (value or "").splitlines() if not cell.rstrip().endswith(";") else ():
                print(f"[rank {rank}] {line}")

    @line_magic("ranks")  # type: ignore[arg-type]
    def status(self, line: str) -> None:
        """Say how many ranks run, their process numbers and what they hold; `%ranks stop` ends them."""
        word = line.strip()
        if word == "stop":
            print(self.stop())
        elif word:
            raise UsageError(f"%ranks cannot read {word!r}; write %ranks or %ranks stop (a whole cell begins %%ranks)")
        elif self.ranks is None or not self.ranks.pids:
            print("no ranks are running; a cell that begins with %%ranks 4 starts four")
        else:
            pids = ", ".join(map(str, self.ranks.pids))
            print(f"{counted(self.ranks.world_size, 'rank')} running, processes {pids}")
            for rank, names in enumerate(self.ranks.run(holdings)):
                print(f"[rank {rank}] holds {', '.join(names) or 'nothing yet'}")

    def stop(self) -> str:
        """End the ranks; return what was done, in words."""
        running, self.ranks = self.ranks, None
        if running is None or not running.pids:
            return "no ranks are running"
        running.close()
        return f"{counted(running.world_size, 'rank')} ended"

    def _ranks(self, wanted: Line) -> Ranks:
        from distlab.comm import Ranks

        current = self.ranks
        size = wanted.size or (current.world_size if current is not None else None)
        if size is None:
            raise ValueError("no ranks are running yet; say how many, such as %%ranks 4")
        if wanted.chosen is not None and wanted.chosen[-1] >= size:
            raise ValueError(f"there is no rank {wanted.chosen[-1]}: ranks are 0 to {size - 1}")
        if current is not None and current.world_size == size:
            return current
        fresh = Ranks(size, timeout_s=TIMEOUT_S)
        if current is not None and current.pids:
            print(f"({self.stop()}; starting {size})")
        self.ranks = fresh
        return fresh


def _compile(source: str, name: str) -> None:
    """Find a syntax error before any rank gets the cell."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        compile(source, name, "exec")
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        raise CellError(f"{lines}\n\nNo rank got this cell; ranks that run keep their variables.") from None


@contextlib.contextmanager
def _interrupt_of(ranks: Ranks) -> Iterator[None]:
    """Let the first interrupt of the kernel stop the ranks, which then say where they stood; the second is Python's."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        ranks.interrupt()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def last_records() -> Records:
    """Return what the ranks of the last %%ranks cell called of torch.distributed, also where it failed.

    Raises:
        RuntimeError: no %%ranks cell has run.
    """
    from IPython import get_ipython

    shell = get_ipython()
    magics = None if shell is None else shell.magics_manager.registry.get("RanksMagics")
    if magics is None or magics.records is None:
        raise RuntimeError("no records: run a %%ranks cell first")
    records: Records = magics.records
    return records


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register %%ranks, add the names that are not defined yet, and start loading torch for the ranks."""
    if "torch" not in sys.modules:
        print("Loading PyTorch, here and for the ranks. The first time takes about five seconds.", flush=True)
    from distlab.comm import RankError, warm
    from distlab.comm.command import put_on_path
    from distlab.course.grading import check
    from distlab.course.grading.answer.source import names_for_functions
    from distlab.course.notebook.prediction import predict
    from distlab.course.notebook.stuck import hint, solution

    put_on_path()  # so that `!distlab lab 03` runs in a cell
    warm()  # first: the fork server loads torch while this process does
    shell.register_magics(RanksMagics)
    shell.set_custom_exc((RankError, KeyboardInterrupt, NameError), _show_short)  # type: ignore[no-untyped-call]
    own = {"check": check, "predict": predict, "hint": hint, "solution": solution}
    for name, value in (names_for_functions() | own | {"show": show, "last_records": last_records}).items():
        shell.user_ns.setdefault(name, value)


def _show_short(shell: InteractiveShell, kind: type, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    """Show a RankError of `run` or `Ranks` by its text: the ranks' own tracebacks, not those of the launcher."""
    if isinstance(error, NameError):
        advise(shell, kind, error, trace, tb_offset)
    elif (text := of_ranks(error, trace, shell)) is None:  # an interrupt of anything else
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    else:
        shell.showtraceback((CellError, CellError(text), None))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the ranks; names stay."""
    if (magics := shell.magics_manager.registry.get("RanksMagics")) is not None:
        magics.stop()


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
