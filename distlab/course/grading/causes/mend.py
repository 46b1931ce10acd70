"""Find where an answer is wrong: the one place of its own text where a change makes all results right.

An answer may be a different algorithm than the reference, so that no known wrong version has its results. Its own text
is tried with one place changed (`places.versions`), on the drawn calls and then on those of a second seed. What is said
is what was tried: with this in the place of that, all results were right.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import signal
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.course.grading.causes.places import Version, last_call, versions
from distlab.course.grading.diagnosis.blame import file_of, label
from distlab.course.grading.diagnosis.values import is_telling, near
from distlab.course.grading.exercise import Exercise, Fault, Refused
from distlab.course.grading.mutant import compiled
from distlab.course.grading.sealed import is_sealed
from distlab.course.grading.variation.calls import DrawnCalls, outcome

if TYPE_CHECKING:
    from distlab.comm import Ranks

BUDGET_S = 2.0  # of a rank's processor time, for all mends of one answer: a busy machine changes no verdict
BATCH_S = 0.2  # of that, for the mends that are tried together
ONE_S = 0.3  # of that, for one of them: a changed condition may make a loop without end
MOST = 64  # mends of a batch
LIMIT_S = 10.0  # of a batch, in all
OTHER_SEED = 1_000_003  # is added to the seed: a mend must hold for other arguments too
MORE_SEEDS = 8  # where results are few whole numbers, truths or texts, which agree by chance
MOST_LOST = 2  # how often the ranks may be lost to a version that keeps them from meeting
MOST_LINES = 60  # of an answer that is mended
Results = list[dict[str, Any]]  # for each rank what comes of each call by name: see `outcome`


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
        fields = dict(ast.iter_fields(self.function)) | {"body": [ast.Pass()]}
        return ast.unparse(ast.fix_missing_locations(ast.FunctionDef(**fields))).rpartition("\n")[0]


def text_of_answer(fn: Callable[..., Any]) -> Text | None:
    """Return the text of a function that stands by itself, or None: of a class, or in a function."""
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
    if pieces is None:
        node.decorator_list = []  # none has put anything in the function's place
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass(lineno=node.lineno, col_offset=0)]
    ast.increment_lineno(node, first - 1)
    return Text(node, label(file))


class Versions:
    """An answer of which one of several texts is called; behind the same fence as the answer itself."""

    def __init__(self, fn: Callable[..., Any], texts: Sequence[str]) -> None:
        self.fn, self.texts, self.file, self.__name__ = fn, texts, file_of(fn), fn.__name__
        self.load = getattr(fn, "load", None)  # of an answer that is not in this process yet
        self._now: Callable[..., Any] | None = None

    def choose(self, number: int) -> Callable[..., Any]:
        """Call the text of this number from now on."""
        self._now = compiled(getattr(self.fn, "_fn", None) or self.fn, self.texts[number], self.file)
        return self._now

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the text that was chosen, by default the first."""
        return (self._now or self.choose(0))(*arguments, **keywords)


def mend_of(
    fn: Callable[..., Any], exercise: Exercise, calls: DrawnCalls, wanted: Sequence[dict[str, Any]], ranks: Ranks
) -> str:
    """Return in words where an answer is wrong, by a change that makes all results right; "" where none does.

    Args:
        fn: the answer.
        exercise: what it answers.
        calls: that were drawn.
        wanted: what came of them with the reference, on each rank.
        ranks: that make them.
    """
    from distlab.comm import RankError

    text, limit_s = text_of_answer(fn), ranks.timeout_s
    if text is None:
        return ""
    ranks.timeout_s = min(limit_s, LIMIT_S)
    try:
        return _Search(fn, exercise, calls.bare(), ranks, text).run(results_of(wanted))
    except (RankError, RuntimeError, OSError):
        return ""
    finally:
        ranks.timeout_s = limit_s


class _Search(NamedTuple):
    fn: Callable[..., Any]
    exercise: Exercise
    calls: DrawnCalls
    ranks: Ranks
    text: Text

    def run(self, wanted: Results) -> str:
        """Try one batch of mends after the other, and each that is right on the draws of other seeds."""
        from distlab.comm import RankError, RankTimeout

        changes: Iterator[Version] = iter(in_order(self.text.function, len(wanted)))
        spent_s, size, lost = 0.0, 1, 0
        others: list[tuple[DrawnCalls, Results]] = []
        more = 1 if is_telling(wanted) else MORE_SEEDS
        more_calls = [self.calls.bare(self.calls.seed + OTHER_SEED + number) for number in range(more)]
        while spent_s < BUDGET_S and (batch := list(islice(changes, size))):
            try:
                are_right, took_s = self.tried(batch, self.calls, wanted)
            except RankError as error:  # on some ranks alone a version raises: the ranks are made anew
                lost += 1
                if isinstance(error, RankTimeout) or lost > MOST_LOST:
                    raise
                changes, size = chain(batch if size > 1 else (), changes), max(1, size // 4)
                continue
            spent_s += took_s
            for version in (version for version, is_right in zip(batch, are_right, strict=True) if is_right):
                others = others or [(calls, results_of(self.ranks.run(calls, calls.reference))) for calls in more_calls]
                if all(self.tried([version], *more)[0][0] for more in others) and self.passes(version):
                    change = "with one change there" if is_sealed(self.calls.reference) else version.words
                    num_calls, n = (1 + len(others)) * len(wanted[0]), self.ranks.world_size
                    told = f"all results are right in {num_calls} drawn calls" + f" on {n} ranks" * (n > 1)
                    return f"{self.text.file}, line {version.line}: {change}, {told}."
            size = max(1, min(MOST, 4 * size, int(BATCH_S * size / max(took_s, 1e-3))))
        return ""

    def tried(self, batch: Sequence[Version], calls: DrawnCalls, wanted: Results) -> tuple[list[bool], float]:
        """Say which versions of the answer make all calls right, behind the fence that the answer is behind."""
        from distlab.course.grading.guard import drive_on_rank

        drive = functools.partial(_drive, len(batch), calls, wanted)
        texts = Versions(self.fn, list(map(self.text_of, batch)))
        fenced = functools.partial(drive_on_rank, is_looked_at=False)  # once for each version: most calls take less
        of_ranks, took_s = zip(*self.ranks.run(fenced, drive, texts, self.exercise.memory_limit_bytes), strict=True)
        return [all(votes) for votes in zip(*of_ranks, strict=True)], took_s[0]

    def text_of(self, version: Version) -> str:
        return f"{self.text.head}\n{textwrap.indent(version.body, '    ')}"

    def passes(self, version: Version) -> bool:
        """Whether the exercise's own check finds no fault: wrong calls may give right results, as one rank may."""
        from distlab.course.grading.run import fresh_ranks, judge, run_world

        worlds = {self.ranks.world_size, min((world for world in self.exercise.worlds if world > 1), default=1)}
        fn = Versions(self.fn, [self.text_of(version)])

        def is_right(ranks: Ranks) -> bool:
            run = run_world(self.exercise, self.exercise.drive, fn, ranks)  # type: ignore[arg-type]
            return not isinstance(run, Fault) and judge(self.exercise, run, fn, ranks)[0] is None

        with fresh_ranks(sorted(worlds), LIMIT_S) as sets:
            return all(map(is_right, sets))


def results_of(run: Sequence[dict[str, dict[str, Any]]]) -> Results:
    """Return what comes of each call on each rank."""
    return [{name: outcome(call) for name, call in made.items()} for made in run]


def in_order(function: ast.FunctionDef, world_size: int) -> list[Version]:
    """Return the mends, those last that call a collective.

    Left out are those that may keep ranks from meeting, and those that write down the number of ranks.
    """
    last = last_call(function)  # a version that raises on one rank, behind it, keeps no other rank waiting
    found = sorted(versions(function), key=lambda version: (version.risk, version.line <= last))
    number = re.compile(rf"(?<![\w.]){world_size}(?![\w.])")
    had = len(number.findall(ast.unparse(function)))
    return [one for one in found if world_size == 1 or (one.risk < 2 and len(number.findall(one.body)) <= had)]


def _drive(count: int, calls: DrawnCalls, wanted: Results, fn: Callable[..., Any]) -> tuple[list[bool], float]:
    """On a rank, make all calls with each version of the answer until one is wrong; fn is the fence around them.

    Say which versions are right, and how much of the processor's time that took.
    """
    import torch
    import torch.distributed as dist

    texts: Any = fn.__wrapped__  # type: ignore[attr-defined]
    mine, begun, all_reduce = wanted[dist.get_rank()], time.thread_time(), dist.all_reduce

    def all_agree(is_right: bool) -> bool:
        vote = torch.tensor(int(is_right))
        if dist.get_world_size() > 1:
            all_reduce(vote, dist.ReduceOp.MIN)
        return bool(vote)

    def are_right(number: int) -> bool:
        texts.choose(number)
        try:
            with _limited():
                each = calls.each(fn)
                return all(all_agree(near(outcome(call), mine[name], calls.vary.scale)) for name, call, *_ in each)
        except (Exception, Refused):  # the other ranks may wait for this one's vote
            return all_agree(False)
        finally:
            with contextlib.suppress(Refused):
                fn.look()  # type: ignore[attr-defined]

    return [are_right(number) for number in range(count)], time.thread_time() - begun


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise in this process where what follows takes too long, and let nothing warn."""

    def stop(number: int, frame: Any) -> None:
        raise RuntimeError("a change made a call that does not end")

    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, ONE_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
