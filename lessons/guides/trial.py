"""How a snippet is tried: it runs on real ranks as printed and once more mended, and both runs are told alike.

A snippet is written once: as printed it lacks lines that end in `# +`, mended those in `# -`. Its docstring is told
before and after. The function under it runs on every rank, and finds in numbers what happened.
"""

import difflib
import html
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.comm import RankError, Ranks
from distlab.comm.launch.fork_client import preload
from distlab.course.grading.lesson import lessons_folder
from distlab.course.grading.progress import copy_in, work_folder
from distlab.course.notebook import in_cells, predict, show
from distlab.course.notebook.ranks import CellError
from distlab.course.notebook.stuck import Note

NUM_RANKS, START_S, LIMIT_S = 4, 60.0, 2.0  # after LIMIT_S a snippet counts as hung
LINES: list[str] = []  # what ranks printed in the last run
RANKS = Ranks(NUM_RANKS, backend="gloo", echo=lambda rank, line: LINES.append(line))
SCRIPT = Ranks(1, joined=False, echo=lambda rank, line: LINES.append(line))  # one process, as a script is
PART = '<b>{}</b><pre style="margin:0 0 0.8em;white-space:pre-wrap">{}</pre>'
WORDS = re.compile(r"(.*?)\. (.*)\nAsks: (.*) \[(.*)\] Lesson (\d\d): (.*)\.\nWhy: (.*)")


class Found(NamedTuple):
    """What a run showed: the number that was asked for, a sentence, whether all is well, and what a picture needs."""

    number: float
    sentence: str
    right: bool
    kept: Any = None


class Trial(NamedTuple):
    """One snippet, what its docstring says of it, and how it is judged."""

    snippet: Callable[..., Any]
    versions: tuple[str, str]  # as printed, mended
    words: tuple[str, ...]  # title, situation, question, unit, lesson, heading, why
    measure: Callable[[Callable[..., Any]], Any]  # runs a version on a rank; what rank 0 finds counts
    told: Callable[[list[Any], str], Found] | None = None  # says it instead, from all results, and also after a hang
    fault: str = "wrong"
    draw: Callable[[Found, Found], Any] | None = None  # a picture of both
    ranks: Ranks = RANKS

    @property
    def difference(self) -> str:
        """The lines that mend it, marked with - and +, and the lines around them."""
        lines = list(difflib.unified_diff(*(text.splitlines() for text in self.versions), n=1, lineterm=""))
        return "\n".join(line for line in lines[2:] if not line.startswith("@@"))

    @property
    def link(self) -> str:
        """The link to the lesson that explains it, to the learner's copy where there is one."""
        number, heading, work = *self.words[4:6], work_folder()
        for folder in lessons_folder().glob(f"{number}_*"):  # a student copy may lack it
            copy = copy_in(work or folder, folder.name)
            place = f"{folder.name}/{copy.name if copy.is_file() else 'lesson.ipynb'}"
            return f'<a href="{place}">Lesson {number}</a>, {heading}'
        return f"Lesson {number}, {heading}"


TRIALS: dict[str, Trial] = {}
ASKED: dict[str, tuple[Callable[..., Any], Any]] = {}
HAPPENED: dict[str, str] = {}  # to the snippets of this session, as they stood


def trial(snippet: Callable[..., Any], **facts: Any) -> Callable[[Callable[..., Any]], Trial]:
    """Put a snippet on trial, under the name of the function that measures it."""
    head, _, body = inspect.getsource(snippet).rstrip().split('"""')
    lines = [head.rstrip(), *body.splitlines()[1:]]
    printed = "\n".join(line.removesuffix("  # -") for line in lines if not line.endswith("  # +"))
    mended = "\n".join(line.removesuffix("  # +") for line in lines if not line.endswith("  # -"))
    words = WORDS.fullmatch(inspect.getdoc(snippet) or "").groups()  # type: ignore[union-attr]
    return lambda fn: TRIALS.setdefault(fn.__name__, Trial(snippet, (printed, mended), words, fn, **facts))


def made(one: Trial, text: str) -> Callable[..., Any]:
    """Make a function of a version's text."""
    exec(compile(text, f"<{one.snippet.__name__}>", "exec"), names := {**one.snippet.__globals__})
    return names[one.snippet.__name__]  # type: ignore[no-any-return]


def everyone(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    dist.all_gather_object(values := [None] * NUM_RANKS, value)
    return values


def judged(one: Trial, snippet: Callable[..., Any]) -> Found:
    """Run one version and say what happened. After a hang or an error the next run has new ranks."""
    ranks = one.ranks
    if not ranks.pids:
        preload("simulator.viz", "torch.distributed.fsdp", "torch.utils.data", "distlab.tensor_parallel")
        ranks.timeout_s = START_S
        ranks.run(Found, 0, "all snippets are imported", True)
    ranks.timeout_s = LIMIT_S
    LINES.clear()
    try:
        results = ranks.run(one.measure, snippet)
        return one.told(results, "") if one.told else results[0]
    except RankError as error:
        stuck = error.failures or {*re.findall(r"rank \d+ waits in (?!no)", str(error))} or range(ranks.world_size)
        back = ranks.world_size - len(stuck)
        return one.told([], who(error)) if one.told else Found(back, f"Ranks back: {back}.\n{who(error)}", False)


def close() -> None:
    """End the ranks; the next trial starts new ones."""
    RANKS.close()
    SCRIPT.close()


def who(error: Exception) -> str:
    """Return the lines of an error that say who waits for whom, or what was raised."""
    text = re.sub(r"\n {4,}", " ", in_cells(error).partition("\n--- ")[0]).replace(f"{lessons_folder()}/", "")
    lines = re.findall(r"^ *(rank \d+(?: waits in (?!no)|: | of \d+ raised).*)", text, re.MULTILINE)
    kinds = {line.split(" ", 2)[2]: line for line in reversed(lines)}  # of ranks that wait alike the first
    return "\n".join(reversed(kinds.values())) or text


def ask(name: str, snippet: Callable[..., Any]) -> Any:
    """Put the snippet of a cell on trial and ask for a number first."""
    ASKED[name] = snippet, predict(*TRIALS[name].words[2:4])
    return ASKED[name][1]


def verdict(name: str) -> Note:
    """Run the snippet of the cell above as it stands there, and mended; say what happened."""
    if name not in ASKED:
        raise CellError("Run the cell above first: it holds the snippet, and asks what you expect of it.")
    one, (snippet, guess) = TRIALS[name], ASKED[name]
    first, then = judged(one, snippet), judged(one, made(one, one.versions[1]))
    HAPPENED[name] = first.sentence
    if one.draw is not None and first.kept and then.kept:
        show(one.draw(first, then))
    words = ["right" if found.right else one.fault for found in (first, then)]
    told = {"Your prediction": guess.compare(first.number), f"As it stands above: {words[0]}": first.sentence}
    told |= {"What mends it": one.difference, f"Mended: {words[1]}": then.sentence, "Why": one.words[6]}
    page = "".join(PART.format(label, html.escape(text)) for label, text in told.items())
    return Note("\n".join(f"{label}\n{text}" for label, text in told.items()), page=f"{page}<p>{one.link}</p>")


def cells(names: str) -> Iterator[tuple[str, str, str]]:
    """Yield kind, text and trial of the cells of some trials: each situation, snippet and verdict."""
    for name, one in ((name, TRIALS[name]) for name in names.split()):
        yield "markdown", f"### {one.words[0]}\n{one.words[1]}", name
        yield "code", f'{one.versions[0]}\n\n\nask("{name}", {one.snippet.__name__})', name
        yield "code", f'verdict("{name}")', name


def table() -> Note:
    """Return a row for each snippet, made from this session's runs, and end the ranks."""
    close()
    rows = [("<b>What is printed</b>", "<b>What happened</b>", "<b>What mends it</b>", "<b>Lesson</b>")]
    for name, one in TRIALS.items():
        changed = "\n".join(line for line in one.difference.splitlines() if line[:1] in "+-")
        happened = html.escape(HAPPENED.get(name, "not on trial in this session"))
        rows.append((one.words[0], happened, f"<code>{html.escape(changed)}</code>", one.link))
    lines = ("".join(f'<td style="text-align:left;white-space:pre-wrap">{cell}</td>' for cell in row) for row in rows)
    return Note("\n".join(": ".join(row[:2]) for row in rows), page="<table><tr>" + "<tr>".join(lines) + "</table>")
