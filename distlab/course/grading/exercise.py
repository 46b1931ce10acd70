"""What an exercise is: what to build, how it is driven on real ranks, and how its faults are named.

A lesson's `exercises.py` lists its exercises. Its folder `checks/` holds one file per subject: how the function is
driven, how the results are judged, and the wrong versions that a check must reject. Everything is data and plain
functions, so that a check is itself code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.course.grading.mutant import Mutant
from distlab.course.grading.variation.draw import Vary

if TYPE_CHECKING:
    from distlab.comm import RankError, Records


class NotYet(Exception):  # noqa: N818 (a state of the exercise, not an error)
    """The body of an exercise that is not written yet; a check answers it kindly."""

    def __init__(self, exercise: str) -> None:
        super().__init__(f"{exercise} is yours to write: replace this line, then run the check below")
        self.exercise = exercise


class Refused(BaseException):
    """Something that a check does not let a function do; not an Exception, so that `except Exception` lets it pass."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")


ENDED = frozenset({"raised", "hang", "deadlock", "mismatch", "killed"})  # how a run ended
SEEN = frozenset({"values", "shape", "order", "scale", "zeros", "nan", "returned"})  # what is seen: no mistake to blame


class Fault(NamedTuple):
    """One thing that is wrong.

    Attributes:
        code: a few fixed words that name the kind of fault, such as "sum not mean".
        message: what was expected, what was got and what to do, with numbers and ranks.
        cause: where that comes from, in a sentence, as far as something that was tried shows it.
    """

    code: str
    message: str
    cause: str = ""

    @property
    def words(self) -> str:
        """What is told: the cause first."""
        return f"{self.cause} Seen: {self.message}" if self.cause else self.message

    @property
    def weight(self) -> int:
        """How much it tells: 2 where it names a mistake, 1 where it is what was seen, 0 where it is how a run ended.

        Of two faults of an answer the one of more weight is told; of two that weigh as much, that of its own cases.
        """
        if self.cause or self.code not in ENDED | SEEN:
            return 2
        return int(self.code in SEEN - {"returned"})


class Evidence(NamedTuple):
    """What a run on `world_size` ranks left behind.

    Attributes:
        world_size: number of ranks.
        results: what `Exercise.drive` returned on each rank.
        records: every call to torch.distributed that the ranks made.
    """

    world_size: int
    results: Sequence[Any]
    records: Records


Drive = Callable[[Callable[..., Any]], Any]
Judge = Callable[[Evidence], Iterable[Fault]]


@dataclass(frozen=True)
class Exercise:
    """A function for the learner to write, and how it is checked.

    What the record leaves out, the lesson's folder `checks/` defines by the exercise's name: for "03.flat" these are
    drive_flat, judge_flat, budget_flat, failure_flat and vary_flat, each in any of its files, and the wrong versions in
    WRONG_FLAT, which several files may define.

    Attributes:
        name: lesson and topic, such as "03.flat".
        title: one line: what the function does.
        minutes: how long it takes someone who read the lesson up to here.
        difficulty: 1 (a few known calls), 2 (one thing to think out) or 3 (several things that must fit together).
        source: the reference: "solutions:average_flat" in the lesson's folder, or "distlab.module:function".
        drive: runs on every rank, calls the learner's function and returns plain values or tensors. `Cases` say what
            to call: then results and bytes are compared with the reference's, and wrong ones with the wrong versions'.
        judge: looks at all ranks' results and records; yields faults; the first is told, none means right. Beside
            `Cases` it looks at calls and times only, after the values.
        imports: the import lines that the body may rely on.
        hints: three, each more telling; the last is the plan in words.
        worlds: world sizes to run, in this order; the first fault ends the check.
        timeout_s: for one world size.
        memory_limit_bytes: how much a rank may take beyond what it has at its start.
        on_failure: names the fault of a run that raised or hung, or returns None for the general words.
        budget: what a right solution is told that it used, in short lines.
        broken: a wrong version to be repaired, for "spot the bug": the name of one of the mutants.
        mutants: wrong versions, each with the fault that a check must name.
        vary: how more calls are drawn from a seed, whose results are compared with the reference's.
    """

    name: str
    title: str
    minutes: int
    difficulty: int
    source: str
    drive: Drive | None = None
    judge: Judge | None = None
    imports: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    timeout_s: float = 20.0
    memory_limit_bytes: int = 2 << 30
    on_failure: Callable[[RankError, int], Fault | None] | None = None
    budget: Callable[[Evidence], Sequence[str]] | None = None
    broken: str | None = None
    mutants: tuple[Mutant, ...] = ()
    vary: Vary | None = None

    @property
    def function(self) -> str:
        """Name of the function to write."""
        return self.source.rpartition(":")[2]

    @property
    def effort(self) -> str:
        """What the learner is told before the start."""
        return f"about {self.minutes} minutes, difficulty {self.difficulty} of 3"

    @property
    def lesson(self) -> str:
        """Number of the lesson, two digits."""
        return self.name.partition(".")[0]
