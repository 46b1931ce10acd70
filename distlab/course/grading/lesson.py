"""Find a lesson's folder and load it by path: its name, such as 03_data_parallel, cannot be a module's name.

A lesson's modules live in sys.modules as the package `distlab_lesson_03`; inside exercises.py,
`from distlab_lesson_03.checks import averages` works. Ranks cannot import that name, so its functions travel by value.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from distlab.course.grading.exercise import Exercise
from distlab.course.grading.mutant import Mutant, build

INSTALLED = "_course"  # in the installed package: the folder that has lessons/, as a checkout does
_FOLDER = re.compile(r"(\d\d)_\w+")
_loaded: dict[str, tuple[Path, tuple[tuple[str, int], ...]]] = {}  # by package: where it is from, and when written


@dataclass(frozen=True)
class Lesson:
    """A lesson's exercises and what it says about itself.

    Attributes:
        number: two digits.
        folder: where its files are.
        title: a few words.
        minutes: how long it takes.
        needs: numbers of the lessons that come before it.
        aims: what you can do afterwards, a sentence each.
        exercises: in the order in which they are met.
    """

    number: str
    folder: Path
    title: str
    minutes: int
    needs: tuple[str, ...]
    aims: tuple[str, ...]
    exercises: tuple[Exercise, ...]

    @functools.cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """Wrong versions of all exercises, ready to be checked.

        Raises:
            ValueError: an edit does not fit the text of its reference.
        """
        return tuple(
            build(mutant, exercise.name, reference_of(exercise), exercise.imports)
            for exercise in self.exercises
            for mutant in exercise.mutants
        )

    def exercise(self, name: str) -> Exercise:
        """Return the exercise of this name; a ValueError lists those that there are."""
        found = {exercise.name: exercise for exercise in self.exercises}
        if name not in found:
            raise ValueError(f"lesson {self.number} has no exercise {name!r}; it has {', '.join(found)}")
        return found[name]


def at_or_above(start: Path | None = None) -> tuple[Path, ...]:
    """Return a folder, by default the working directory, and all that it is in."""
    here = (start or Path.cwd()).resolve()
    return (here, *here.parents)


def lessons_folder(start: Path | None = None) -> Path:
    """Return the folder that holds the lessons: at or above the working directory, else this package's own.

    The package's own lie next to it in a checkout, and inside it where it was installed.

    Raises:
        ValueError: there is none.
    """
    above, package = at_or_above(start), Path(__file__).resolve().parents[2]
    for parent in (*above, package.parent, package / INSTALLED):
        folder = parent / "lessons"
        if any(_folders(folder)):
            return folder
    raise ValueError(
        f"no folder lessons/ with a lesson in it is at or above {above[0]}, nor next to distlab ({package.parent}); "
        "run this inside a checkout of distlab, or install its wheel, which has the lessons"
    )


def work_beside(lessons: Path) -> Path:
    """Return the default folder of working copies: next to the lessons, or here where they lie inside the package."""
    return (Path.cwd() if lessons.parent.name == INSTALLED else lessons.parent) / "work"


def lessons(folder: Path | None = None) -> tuple[str, ...]:
    """Return the numbers of the lessons that have exercises, in order."""
    return tuple(path.name[:2] for path in _folders(folder or lessons_folder()))


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if _FOLDER.fullmatch(path.name) and (path / "exercises.py").is_file():
                yield path


def load_lesson(name: str | int, folder: Path | None = None) -> Lesson:
    """Load a lesson by its number ("03", 3), its folder's name or the name of one of its exercises ("03.flat").

    It is loaded anew when one of its files has changed.

    Args:
        name: which lesson.
        folder: the folder of all lessons; by default the one that `lessons_folder` finds.

    Raises:
        ValueError: there is no such lesson, or its files do not hold what a lesson needs.
    """
    everywhere = folder or lessons_folder()
    number = lesson_number(name)
    found = next((path for path in _folders(everywhere) if path.name[:2] == number), None)
    if found is None:
        raise ValueError(f"there is no lesson {name}; lessons are {', '.join(lessons(everywhere))}")
    package = _package(number, found.resolve())
    exercises = importlib.import_module(f"{package}.exercises")
    files = sorted(path.stem for path in found.glob("checks/*.py") if path.stem != "__init__")
    checks = [importlib.import_module(f"{package}.checks.{file}") for file in files]
    try:
        return Lesson(
            number=number,
            folder=found.resolve(),
            title=exercises.TITLE,
            minutes=exercises.MINUTES,
            needs=tuple(exercises.NEEDS),
            aims=tuple(exercises.AIMS),
            exercises=tuple(_with_checks(exercise, checks) for exercise in exercises.EXERCISES),
        )
    except AttributeError as error:
        text = f"{found / 'exercises.py'} must define TITLE, MINUTES, NEEDS, AIMS and EXERCISES"
        raise ValueError(f"{text}: {error}") from None


def _with_checks(exercise: Exercise, checks: Sequence[types.ModuleType]) -> Exercise:
    """Return an exercise with what its record leaves out and a file of the lesson's checks defines by its name."""
    own = exercise.name.partition(".")[2]

    def found(given: Any, name: str) -> Any:
        return given if given is not None else next((vars(file)[name] for file in checks if name in vars(file)), None)

    drive = found(exercise.drive, f"drive_{own}")
    if drive is None:
        raise ValueError(f"{exercise.name}: no file of the lesson's checks defines drive_{own}")
    wrong = [mutant for file in checks for mutant in vars(file).get(f"WRONG_{own.upper()}", ())]
    return replace(
        exercise,
        drive=drive,
        judge=found(exercise.judge, f"judge_{own}"),
        budget=found(exercise.budget, f"budget_{own}"),
        on_failure=found(exercise.on_failure, f"failure_{own}"),
        vary=found(exercise.vary, f"vary_{own}"),
        mutants=exercise.mutants or tuple(wrong),
    )


def lesson_number(name: str | int) -> str:
    """Return a lesson's two digits, of '3', 3, '03_data_parallel' or '03.flat'; a ValueError: it has no number."""
    match = re.match(r"(\d{1,2})(?=$|[._])", str(name).strip())
    if match is None:
        raise ValueError(f"{name!r} names no lesson; write its number, such as 03, or an exercise, such as 03.flat")
    return match[1].zfill(2)


def _package(number: str, folder: Path) -> str:
    """Make the lesson's package importable; forget what was loaded when its files have changed."""
    import cloudpickle

    name = f"distlab_lesson_{number}"
    files = sorted([*folder.glob("*.py"), *folder.glob("checks/*.py")])
    state = (folder, tuple((str(path), path.stat().st_mtime_ns) for path in files))
    if _loaded.get(name) == state and name in sys.modules:
        return name
    for module in [module for module in sys.modules if module == name or module.startswith(name + ".")]:
        del sys.modules[module]
    importlib.invalidate_caches()
    package = types.ModuleType(name, f"Lesson {number}, loaded from {folder}.")
    package.__path__ = [str(folder)]
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules[name] = package
    if name not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(package)
    _loaded[name] = state
    return name


def reference_of(exercise: Exercise) -> Callable[..., Any]:
    """Return the exercise's reference: the function that a right answer behaves like.

    Its source names it: "solutions:name" (of the lesson) or "distlab.module:name".

    Raises:
        ValueError: there is no such module or function.
    """
    module_name, _, name = exercise.source.rpartition(":")
    if module_name == "solutions":
        package = f"distlab_lesson_{exercise.lesson}"
        if package not in sys.modules:
            load_lesson(exercise.lesson)
        module_name = f"{package}.{module_name}"
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"exercise {exercise.name}: {exercise.source!r} leads to no function: {error}") from error
    return found  # type: ignore[no-any-return]


def mutant_named(exercise: Exercise, name: str) -> Mutant:
    """Return one of the exercise's wrong versions, as it is written; a ValueError lists those that there are."""
    mutant = next((mutant for mutant in exercise.mutants if mutant.name == name), None)
    if mutant is None:
        names = ", ".join(repr(mutant.name) for mutant in exercise.mutants) or "none"
        raise ValueError(f"exercise {exercise.name} has no mutant {name!r}; it has {names}")
    return mutant


def source_text(fn: Callable[..., Any]) -> str:
    """Return the text of a function, or "" where there is none to read."""
    try:
        return inspect.getsource(inspect.unwrap(fn)).rstrip()
    except (OSError, TypeError):
        return ""
