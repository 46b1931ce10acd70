"""How a snippet is tried: it runs on real ranks as printed and once more with a line changed, and both runs are told.

A trial is data. Its judge runs a version of the snippet on the ranks and says in numbers what happened; the same
sentence tells of both versions, so that nothing about a fault is written down beforehand.
"""

from __future__ import annotations

import difflib
import html
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.comm import RankError, Ranks, Records
from distlab.course.grading.lesson import lessons_folder
from distlab.course.grading.progress import copy_in, work_folder
from distlab.course.notebook import predict, show
from distlab.course.notebook.ranks import CellError, in_cells

if TYPE_CHECKING:
    from distlab.course.notebook.prediction import Prediction
    from simulator.viz import Picture

NUM_RANKS, START_S = 4, 60.0
LIMIT_S = 2.0  # after which a snippet counts as hung
NOTHING = float("nan")


class Found(NamedTuple):
    """What a run showed: the number that was asked for, a sentence about the run, and whether it is as it should be."""

    number: float
    sentence: str
    right: bool
    kept: Any = None  # for a picture


class Stand:
    """The four ranks of the page, and the version of a snippet that stands before them now.

    They start at the first trial. After a hang or an error new ones start, so that the next trial finds all four.
    """

    def __init__(self) -> None:
        self.snippet: Callable[..., Any] | None = None
        self.lines: list[tuple[int, str]] = []  # what ranks printed in this run
        self.ranks = Ranks(NUM_RANKS, backend="gloo", echo=lambda rank, line: self.lines.append((rank, line)))

    def run(self, measure: Callable[..., Any], *args: Any) -> list[Any]:
        """Call measure(snippet, *args) on every rank and return what the ranks return."""
        if not self.ranks.pids:
            self.ranks.timeout_s = START_S
            self.ranks.run(_load)
        self.ranks.timeout_s = LIMIT_S
        self.lines.clear()
        return self.ranks.run(measure, self.snippet, *args)

    def ends(self, measure: Callable[..., Any], *args: Any) -> tuple[int, str]:
        """Run where ranks may hang: return how many came back, and who waits for whom."""
        try:
            return len(self.run(measure, *args)), "Nobody waits for anybody."
        except RankError as error:
            return NUM_RANKS - len(error.failures or range(NUM_RANKS)), who(error)

    @property
    def records(self) -> Records:
        """What the ranks called in this run."""
        return self.ranks.records()


STAND = Stand()


def _load() -> None:
    """Import the snippets on a new rank: unpacking this function does, before any limit of time."""


def close() -> None:
    """End the ranks; the next trial starts new ones."""
    STAND.ranks.close()


def who(error: Exception) -> str:
    """Return the lines of an error that say who waits for whom, or else what was raised."""
    lines = [line.strip() for line in in_cells(error).partition("\n--- ")[0].splitlines() if line.strip()]
    return "\n".join([line for line in lines if line.startswith("rank ")][:4] or lines[:2])


class Trial(NamedTuple):
    """One snippet and what is asked of it.

    Attributes:
        printed: the snippet, in our words, with the fault that guides print.
        title: a few words.
        text: the situation.
        asks: for a number, before the run.
        unit: of the number.
        mend: (old, new) texts that make it right.
        because: why, in a sentence; shown after the run.
        lesson: number and heading of the part of a lesson that explains it.
        judge: runs the snippet on the stand and says what happened.
        draw: makes a picture of both runs.
    """

    printed: Callable[..., Any]
    title: str
    text: str
    asks: str
    unit: str
    mend: tuple[tuple[str, str], ...]
    because: str
    lesson: str
    judge: Callable[[Stand], Found]
    draw: Callable[[Found, Found], Picture] | None = None


TRIALS: dict[str, Trial] = {}
ASKED: dict[str, tuple[Callable[..., Any], Prediction]] = {}
TOLD: dict[str, Verdict] = {}


def trial(**facts: Any) -> Callable[[Callable[[Stand], Found]], Trial]:
    """Make a trial of its judge, under the judge's name."""

    def make(judge: Callable[[Stand], Found]) -> Trial:
        return TRIALS.setdefault(judge.__name__, Trial(judge=judge, **facts))

    return make


def source(snippet: Callable[..., Any]) -> str:
    """Return a snippet's text as a cell has it."""
    return textwrap.dedent(inspect.getsource(snippet)).rstrip()


def mended(snippet: Callable[..., Any], mend: Sequence[tuple[str, str]]) -> Callable[..., Any] | None:
    """Return the snippet with its lines changed, or None where they are not there."""
    text = source(snippet)
    for old, new in mend:
        if text.count(old) != 1:
            return None
        text = text.replace(old, new)
    name, names = f"<{snippet.__name__}, mended>", dict(snippet.__globals__)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names[snippet.__name__]  # type: ignore[no-any-return]


def judged(one: Trial, snippet: Callable[..., Any]) -> Found:
    """Run one version before its judge; what cannot be run or judged is told too."""
    STAND.snippet = snippet
    try:
        return one.judge(STAND)
    except RankError as error:
        return Found(NOTHING, who(error), False)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # an edited snippet's result
        return Found(NOTHING, f"What it returned cannot be judged ({type(error).__name__}: {error}).", False)


class Verdict(NamedTuple):
    """A trial's two runs; a notebook shows it as a page, anything else as text."""

    trial: Trial
    compared: str
    printed: Found
    mended: Found
    difference: str

    @property
    def lesson(self) -> tuple[str, str]:
        """The words of the link to a lesson, and where it leads from here."""
        number, _, heading = self.trial.lesson.partition(" ")
        folder = next(path.name for path in lessons_folder().glob(f"{number}_*"))
        work = work_folder()
        copy = None if work is None else copy_in(work, folder)
        name = copy.name if copy is not None and copy.is_file() else "lesson.ipynb"
        return f"Lesson {number}, \u201c{heading}\u201d", f"{folder}/{name}"

    def rows(self) -> list[tuple[str, str]]:
        """What is told, in order: a label and its text."""
        word = {True: "right", False: "wrong"}
        return [
            ("Your prediction", self.compared),
            (f"As printed: {word[self.printed.right]}", self.printed.sentence),
            ("The line that mends it", self.difference),
            (f"With it: {word[self.mended.right]}", self.mended.sentence),
            ("Why", self.trial.because),
        ]

    def __str__(self) -> str:
        told = "\n".join(f"{label}\n{textwrap.indent(text, '    ')}" for label, text in self.rows())
        return f"{told}\n{self.lesson[0]}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        told = "".join(
            f"<dt><b>{label}</b></dt><dd>{_html(text, is_code=text == self.difference)}</dd>"
            for label, text in self.rows()
        )
        words, to = self.lesson
        return f'<dl>{told}</dl><p>Read on: <a href="{to}">{words}</a></p>'


def _html(text: str, *, is_code: bool = False) -> str:
    if not is_code:
        return html.escape(text).replace("\n", "<br>")
    colours = {"-": "#a50026", "+": "#1b7837"}
    lines = (
        f'<span style="color:{colours.get(line[:1], "inherit")}">{html.escape(line)}</span>'
        for line in text.splitlines()
    )
    return f"<pre>{'<br>'.join(lines)}</pre>"


def ask(name: str, snippet: Callable[..., Any]) -> Prediction:
    """Put a snippet on trial and ask for a number first."""
    one = TRIALS[name]
    ASKED[name] = snippet, predict(one.asks, one.unit)
    return ASKED[name][1]


def verdict(name: str) -> Verdict:
    """Run the snippet of the cell above as it stands there, and with its line changed; say what happened.

    Raises:
        CellError: the cell above has not run, or it has an error.
    """
    if name not in ASKED:
        raise CellError("Run the cell above first: it holds the snippet, and asks what you expect of it.")
    snippet, guess = ASKED[name]
    TOLD[name] = told = try_out(TRIALS[name], snippet, guess)
    if told.trial.draw is not None and told.printed.kept is not None and told.mended.kept is not None:
        show(told.trial.draw(told.printed, told.mended))
    return told


def try_out(one: Trial, snippet: Callable[..., Any] | None = None, guess: Prediction | None = None) -> Verdict:
    """Run a trial: the snippet (default: as printed), then the mended one, whose lines stand in the printed text."""
    printed = judged(one, snippet or one.printed)
    before = snippet if snippet is not None and mended(snippet, one.mend) else one.printed
    after = mended(before, one.mend)
    assert after is not None, f"{one.title}: its line is not in its snippet"
    lines = difflib.unified_diff(source(before).splitlines(), source(after).splitlines(), n=1, lineterm="")
    compared = "none" if guess is None else guess.answer
    if guess is not None and printed.number == printed.number:
        compared = guess.compare(printed.number)
    return Verdict(
        one,
        compared,
        printed,
        judged(one, after),
        "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@")),
    )


def cells(name: str) -> list[tuple[str, str]]:
    """Return a trial's cells for the page: its situation, its snippet with the question, its verdict."""
    one = TRIALS[name]
    snippet = f'{source(one.printed)}\n\n\nask("{name}", {one.printed.__name__})'
    return [("markdown", f"### {one.title}\n{one.text}"), ("code", snippet), ("code", f'verdict("{name}")')]


class Table(list[tuple[str, ...]]):
    """The verdicts of this session, a row each."""

    def _repr_html_(self) -> str:
        head, *rows = ("".join(f'<td style="text-align:left">{cell}</td>' for cell in row) for row in self)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
        )


def table() -> Table:
    """Return a row for each snippet: what is printed, what happened, what mends it. Only those on trial have words."""
    rows = [("what is printed", "what happened", "the line that mends it", "where it is explained")]
    for name, one in TRIALS.items():
        if (told := TOLD.get(name)) is None:
            rows.append((one.title, "not on trial in this session", "", ""))
            continue
        added = [line[1:].strip() for line in told.difference.splitlines() if line.startswith("+")]
        words, to = told.lesson
        code = "<br>".join(f"<code>{html.escape(line)}</code>" for line in added)
        rows.append((one.title, _html(told.printed.sentence), code, f'<a href="{to}">{words}</a>'))
    return Table(rows)
