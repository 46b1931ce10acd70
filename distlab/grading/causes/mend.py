"""Find where an answer is wrong: the one place of its own text with which another there makes all results right.

An answer may be another algorithm than the reference, so that no known wrong version has its results. Its own text is
tried with one place changed (`places.versions`), on the drawn calls and then on those of another seed. What is
said is what was tried: with this in the place of that, all results were right.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from types import FunctionType
from typing import Any, NamedTuple

from distlab.grading.causes.places import Version, last_call, versions
from distlab.grading.causes.search import Agreed, Drawn, agreed, explained, first_wrong, next_size, part_of, results_of
from distlab.grading.diagnosis.blame import file_of, label
from distlab.grading.exercise import Refused
from distlab.grading.mutant import compiled
from distlab.grading.sealed import is_sealed
from distlab.grading.variation.calls import call_varied
from distlab.grading.variation.draw import Vary
from distlab.grading.variation.near import is_telling, near, parts

BUDGET_S = 1.5  # of a rank's processor time, for all mends of one answer
LIMIT_S = 10.0  # of a batch of them
OTHER_SEED = 1_000_003  # is added to the seed: a mend must hold for other arguments too
MORE_SEEDS = 8  # where results are few whole numbers, truths or texts, which agree by chance
MOST_LOST = 4  # how often the ranks may be lost to a version that keeps them from meeting
MOST_LINES = 60  # of an answer that is mended


class Text(NamedTuple):
    """An answer's own text.

    Attributes:
        function: as a syntax tree, without its docstring; its lines are numbered as in the file.
        file: where it stands, as a learner knows it.
    """

    function: ast.FunctionDef
    file: str

    @property
    def head(self) -> str:
        """The lines before the body: decorators, and what follows "def"."""
        empty = copy.copy(self.function)
        empty.body = [ast.Pass()]
        return ast.unparse(empty).rpartition("\n")[0]


def text_of_answer(fn: Callable[..., Any]) -> Text | None:
    """Return the text of a function that stands by itself, or None: of a class, or in another function."""
    pieces = getattr(getattr(fn, "source", None), "pieces", None)
    try:
        if pieces is not None:
            file, whole = next((name, text) for name, text in reversed(pieces) if name == getattr(fn, "file", ""))
            found = [node for node in ast.parse(whole).body if getattr(node, "name", "") == fn.__name__]
            first, node = 1, found[-1]
        else:
            if not isinstance(fn, FunctionType) or fn.__code__.co_freevars or hasattr(fn, "__wrapped__"):
                return None
            lines, first = inspect.getsourcelines(fn)
            file, node = file_of(fn), ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError, StopIteration, IndexError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef) or (node.end_lineno or 0) - node.lineno > MOST_LINES:
        return None
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass(lineno=node.lineno, col_offset=0)]
    ast.increment_lineno(node, first - 1)
    return Text(node, label(file))


class Versions:
    """An answer of which one of several texts is called; behind the same fence as the answer itself."""

    def __init__(self, fn: Callable[..., Any], texts: Sequence[str]) -> None:
        self.fn, self.texts, self.file = fn, texts, file_of(fn)
        self._now: Callable[..., Any] | None = None

    @property
    def __name__(self) -> str:
        return self.fn.__name__

    def load(self) -> None:
        """Load the answer in this process, where it is not there yet."""
        if (load := getattr(self.fn, "load", None)) is not None:
            load()

    def choose(self, number: int) -> None:
        """Call the text of this number from now on."""
        self._now = compiled(getattr(self.fn, "_fn", None) or self.fn, self.texts[number], self.file)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the text that was chosen."""
        assert self._now is not None
        return self._now(*arguments, **keywords)


def mend_of(fn: Callable[..., Any], drawn: Drawn) -> str:
    """Return in words where an answer is wrong, by a change that makes all results right; "" where none does."""
    from distlab.comm import RankError

    text, ranks = text_of_answer(fn), drawn.ranks
    if text is None:
        return ""
    limit_s = ranks.timeout_s
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        return _Search(fn, drawn, text.head).run(text)
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s


class _Search(NamedTuple):
    fn: Callable[..., Any]
    drawn: Drawn
    head: str

    def run(self, text: Text) -> str:
        """Try one batch of mends after another, and each that holds on the draws of another seed."""
        from distlab.comm import RankError, RankTimeout

        got, wanted, seed, scale = self.drawn.got, self.drawn.wanted, self.drawn.seed, self.drawn.vary.scale
        right = [results_of(wanted, rank) for rank in range(len(wanted))]
        mine = [results_of(got, rank) for rank in range(len(got))] or [[None] * len(one) for one in right]
        results = list(zip(mine, right, strict=True))
        changes: Iterator[Version] = iter(_in_order(text.function, len(wanted)))
        others: dict[int, list[list[Any]]] = {}
        spent_s, size, needed = 0.0, 1, first_wrong(results, scale)
        lost = 0
        while spent_s < BUDGET_S and (batch := list(islice(changes, size))):
            try:
                found, took_s = self.tried(batch, seed, right, needed)
            except RankError as error:  # on some ranks alone a version raises: the ranks are made anew
                lost += 1
                if isinstance(error, RankTimeout) or lost > MOST_LOST:
                    raise
                changes, size = chain(batch if size > 1 else (), changes), max(1, size // 4)
                continue
            spent_s += took_s
            for number, version in enumerate(batch):
                of_ranks = [of_rank[number] for of_rank in found]
                part, _ = explained(of_ranks, results, scale)
                if part is None or (part and _breaks(of_ranks, results, scale)):
                    continue
                others = others or {other: self.right(other) for other in _other_seeds(seed, results)}
                holds = all(self.holds(version, part, other, given) for other, given in others.items())
                if holds and self.holds_on_more(version, part, seed):
                    calls = (1 + len(others)) * len(results[0][0])
                    return _words(text, version, part, calls, len(wanted), is_hidden=is_sealed(self.drawn.reference))
            size = next_size(size, took_s)
        return ""

    def tried(
        self, batch: Sequence[Version], seed: int, given: Sequence[Sequence[Any]], needed: str
    ) -> tuple[list[Any], float]:
        """Make the calls of a seed with each version of the answer, behind the fence that the answer is behind."""
        from distlab.grading.sandbox.guard import drive_on_rank

        drive = functools.partial(_drive, len(batch), self.drawn.vary, seed, self.drawn.reference, given, needed)
        texts = Versions(self.fn, [f"{self.head}\n{textwrap.indent(version.body, '    ')}" for version in batch])
        exercise = self.drawn.exercise
        tried = functools.partial(drive_on_rank, is_looked_at=False)  # once for each version: most calls take less time
        found, took_s = zip(*self.drawn.ranks.run(tried, drive, texts, exercise.memory_limit_bytes), strict=True)
        return list(found), took_s[0]

    def holds(self, version: Version, part: str, seed: int, given: Sequence[Sequence[Any]]) -> bool:
        """Whether a mend makes this part of all results of another seed right."""
        again, _ = self.tried([version], seed, given, part)
        return all(part in of_rank[0] and all(of_rank[0][part]) for of_rank in again)

    def holds_on_more(self, version: Version, part: str, seed: int) -> bool:
        """Whether a mend that was found on one rank is right on more, where the exercise runs on more."""
        from distlab.comm import RankError
        from distlab.grading.fresh import start_ranks

        more = min((world for world in self.drawn.exercise.worlds if world > 1), default=1)
        if self.drawn.ranks.world_size > 1 or more == 1:
            return True
        with start_ranks(more, LIMIT_S) as ranks:
            search = self._replace(drawn=self.drawn._replace(ranks=ranks))
            try:
                return search.holds(version, part, seed, search.right(seed))
            except RankError:
                return False

    def right(self, seed: int) -> list[list[Any]]:
        """Return the reference's results for another seed, on each rank."""
        reference = self.drawn.reference
        made = self.drawn.ranks.run(call_varied, reference, self.drawn.vary, seed, reference)
        return [results_of(made, rank) for rank in range(len(made))]


def _in_order(function: ast.FunctionDef, world_size: int) -> list[Version]:
    """Return the mends, those last that call a collective.

    Left out are those that may keep ranks from meeting, and those that write down the number of ranks.
    """
    last = last_call(function)  # a version that raises on one rank, behind it, keeps no other rank waiting
    found = sorted(versions(function), key=lambda version: (version.risk, version.line <= last))
    number = re.compile(rf"(?<![\w.]){world_size}(?![\w.])")
    had = len(number.findall(ast.unparse(function)))
    if world_size > 1:
        found = [version for version in found if version.risk < 2 and len(number.findall(version.body)) <= had]
    return found


def _other_seeds(seed: int, results: Sequence[tuple[list[Any], list[Any]]]) -> list[int]:
    """Return more seeds for which a mend must hold: many where no drawn digit is in the results."""
    is_told = any(_has_digits(right) for _, want in results for right in want)
    return [seed + OTHER_SEED + more for more in range(1 if is_told else MORE_SEEDS)]


def _has_digits(value: Any) -> bool:
    """Whether there are drawn digits in a result."""
    if isinstance(value, dict):
        return any(map(_has_digits, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_digits, value))
    return value != round(value) if isinstance(value, float) and math.isfinite(value) else is_telling(value)


def _drive(
    count: int,
    vary: Vary,
    seed: int,
    reference: Callable[..., Any],
    given: Sequence[Sequence[Any]],
    needed: str,
    fn: Callable[..., Any],
) -> tuple[list[Agreed], float]:
    """On a rank, make all calls with each version of the answer; fn is the fence around them."""
    texts: Any = fn.__wrapped__  # type: ignore[attr-defined]

    refused: list[int] = []

    @contextlib.contextmanager
    def made(number: int) -> Iterator[Callable[..., Any]]:
        texts.choose(number)
        try:
            yield fn
        finally:
            try:
                fn.look()  # type: ignore[attr-defined]
            except Refused:  # told here, it would be one more vote
                refused.append(number)

    found, took_s = agreed(made, count, vary, seed, reference, given, needed=needed)
    return [{} if number in refused else alike for number, alike in enumerate(found)], took_s


def _breaks(found: Sequence[Agreed], results: Sequence[tuple[list[Any], list[Any]]], scale: float) -> bool:
    """Whether a part that all results have, and that was right in all calls, is not right any more."""
    every = set.intersection(*({name for name, _ in parts(result)} for _, want in results for result in want))
    for part in every:
        pairs = [pair for sides in results for pair in zip(*(part_of(side, part) for side in sides), strict=True)]
        was_right = all(near(mine, right, scale) for mine, right in pairs)
        if was_right and not all(part in of_rank and all(of_rank[part]) for of_rank in found):
            return True
    return False


def _words(text: Text, version: Version, part: str, calls: int, world_size: int, *, is_hidden: bool) -> str:
    """Say which line it is, what was tried there, and what came of it."""
    change = "with one change there" if is_hidden else version.words
    what = f"result{part} is right" if part else "all results are right"
    on = f" on {world_size} ranks" if world_size > 1 else ""
    return f"{text.file}, line {version.line}: {change}, {what} in {calls} drawn calls{on}."
