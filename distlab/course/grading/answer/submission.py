"""An answer to a whole lesson: the learner's functions from a module, a file or a notebook.

`load_submission` executes it in this process, for a lab. `isolated_submission` executes it only inside ranks, under
limits, so that one that hangs or exits while it is loaded ends nothing else.
"""

from __future__ import annotations

import functools
import operator
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from distlab.comm.command import runnable
from distlab.course.grading.answer.source import Source, execute, read_source
from distlab.course.grading.exercise import Exercise, Fault
from distlab.course.grading.lesson import Lesson, reference_of

LOAD_TIMEOUT_S = 20.0
MEMORY_LIMIT_BYTES = 2 << 30


def load_submission(impl: str, lesson: Lesson) -> dict[str, Callable[..., Any]]:
    """Return the learner's functions by exercise name; an exercise without one is left out.

    Args:
        impl: "reference", a dotted module's name, or the path of a .py file or a notebook.
        lesson: whose exercises to look for.

    Raises:
        ValueError: there is no such thing, or it cannot be loaded; one line that says what to do.
    """
    if impl == "reference":
        return {exercise.name: reference_of(exercise) for exercise in lesson.exercises}
    source = read_source(impl)
    try:
        namespace, _ = execute(source, {exercise.function for exercise in lesson.exercises})
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
        raise ValueError(f"{impl} cannot be loaded: {place}{type(error).__name__}: {error}") from error
    found = {exercise.name: namespace.get(exercise.function) for exercise in lesson.exercises}
    return {name: fn for name, fn in found.items() if callable(fn)}


@dataclass
class Submitted:
    """A function of a source, known by name here and loaded in the rank that calls it.

    Attributes:
        source: where it comes from.
        name: the function's name.
        fault: what is wrong with it before it runs, such as that the source has no such function, or None.
    """

    source: Source
    name: str
    fault: Fault | None = None
    _fn: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def file(self) -> str:
        """The file, or the notebook's cell, that defines the function, as a traceback names it."""
        defines = re.compile(rf"^(async +def|def|class) +{self.name}\b|^{self.name} *=", re.MULTILINE)
        return next((name for name, text in reversed(self.source.pieces) if defines.search(text)), self.source.name)

    def load(self) -> None:
        """Load the source once in this process. What it changes while it loads does not count against the function."""
        if self._fn is None:
            self._fn = execute(self.source, [self.name])[0][self.name]

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Load the source once in this process, and call its function."""
        self.load()
        assert self._fn is not None
        return self._fn(*args, **named)


def isolated_submission(impl: str, lesson: Lesson) -> tuple[dict[str, Callable[..., Any]], tuple[str, ...]]:
    """Return a function for every exercise, which ranks load by themselves, and notes on what was left out.

    Raises:
        ValueError: there is no such thing, or its text cannot be read.
    """
    if impl == "reference":
        return load_submission(impl, lesson), ()
    source = read_source(impl)
    found, notes = _look(source, lesson)
    functions: dict[str, Callable[..., Any]] = {}
    for exercise in lesson.exercises:
        verdict = found if isinstance(found, Fault) else found[exercise.name]
        verdict = verdict or Fault("not attempted", _absent(source, exercise, notes))
        fault = verdict if isinstance(verdict, Fault) else None
        functions[exercise.name] = Submitted(source, exercise.function, fault)
    return functions, notes


def _look(source: Source, lesson: Lesson) -> tuple[Fault | dict[str, Fault | bool | None], tuple[str, ...]]:
    """Load the source on a rank and look at each function: a fault, True for none, None where there is no function."""
    from distlab.comm import RankError, RankTimeout
    from distlab.course.grading.diagnosis.blame import fault_of
    from distlab.course.grading.guard import drive_on_rank
    from distlab.course.grading.run import start_ranks

    exercises = [(exercise, reference_of(exercise)) for exercise in lesson.exercises]

    def look() -> Any:
        from distlab.course.grading.answer.signature import first_fault

        namespace, notes = load()
        verdicts: dict[str, Fault | bool | None] = {}
        for exercise, reference in exercises:
            missing = exercise.function not in namespace
            fn = namespace.get(exercise.function)
            verdicts[exercise.name] = None if missing else first_fault(exercise, fn, reference) or True
        return verdicts, notes

    load = functools.partial(execute, source, {exercise.function for exercise in lesson.exercises})
    with start_ranks(1, LOAD_TIMEOUT_S) as ranks:
        try:
            drive = functools.partial(drive_on_rank, is_looked_at=False)  # a file may switch what it likes when loaded
            return ranks.run(drive, operator.call, look, MEMORY_LIMIT_BYTES)[0]  # type: ignore[no-any-return]
        except RankTimeout:
            text = f"{source.name} cannot be loaded: it was still busy after {LOAD_TIMEOUT_S:g} s"
            rule = "a module only defines functions, and runs nothing when it is imported"
            return Fault("not loaded", f"{text}; {rule}"), ()
        except RankError as error:
            first = replace(lesson.exercises[0], on_failure=None)
            fault = fault_of(error, first, Submitted(source, "load"), 1)
            return Fault("not loaded", f"{source.name} cannot be loaded: {fault.message}"), ()
        except (RuntimeError, OSError) as error:
            return Fault("not loaded", f"{source.name} cannot be loaded: {error}"), ()


def _absent(source: Source, exercise: Exercise, notes: tuple[str, ...]) -> str:
    what = "the notebook" if source.kind == "notebook" else source.name
    text = f"{what} has no function {exercise.function} (exercise {exercise.name})"
    broken = [note for note in notes if "syntax error" in note or f"def {exercise.function}(" in note]
    if broken:
        return f"{text}; {'; '.join(broken)}"
    if source.kind == "notebook":
        reset = runnable(f"distlab lesson reset {exercise.lesson}")
        text += f"; `{reset}` brings a fresh copy and keeps yours aside"
    return text
