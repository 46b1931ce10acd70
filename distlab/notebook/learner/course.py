"""The map of the course: what each lesson is for, what it needs, and how far you are."""

from __future__ import annotations

import html
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.grading.progress import Entry, copy_in, load_progress, work_folder

COURSE = "COURSE.toml"


@dataclass(frozen=True)
class Row:
    """One lesson of the map.

    Attributes:
        number: two digits.
        folder: name of its folder.
        title: a few words.
        can: what you can do afterwards.
        ready: whether it is written.
        minutes: how long it takes, or None.
        needs: numbers of the lessons before it.
        exercises: names of its exercises.
        passed: how many of them were right.
        solutions_seen: names of those whose solution was shown before they were right.
        notebook: name of the file to open, in the lesson's folder.
    """

    number: str
    folder: str
    title: str
    can: str
    ready: bool
    minutes: int | None = None
    needs: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()
    passed: int = 0
    solutions_seen: tuple[str, ...] = ()
    notebook: str = "lesson.ipynb"

    @property
    def progress(self) -> str:
        """How far you are, in words."""
        if not self.ready:
            return "to come"
        if not self.exercises:
            return "no exercises"
        seen = f"; solution seen: {', '.join(self.solutions_seen)}" if self.solutions_seen else ""
        return f"{self.passed} of {len(self.exercises)}{seen}"


def rows(lessons: Path, progress: Mapping[str, Entry]) -> list[Row]:
    """Return one row per lesson: those of COURSE.toml, filled in from the notebooks that are built."""
    plan = tomllib.loads((lessons / COURSE).read_text(encoding="utf-8"))["lesson"]
    return [_row(lessons, entry["folder"], entry["can"], progress) for entry in plan]


def course_map(lessons: Path | None = None) -> CourseMap:
    """Return the map of the course, with your progress; a notebook shows it as a table with links."""
    from distlab.grading.lesson import lessons_folder

    return CourseMap(rows(lessons or lessons_folder(), load_progress()), this_machine_can())


def text_table(lessons: Path, work: Path) -> str:
    """Return the map as plain text, for the command line."""
    return str(CourseMap(rows(lessons, load_progress(work) if work.is_dir() else {}), this_machine_can()))


def this_machine_can() -> str:
    """Say in a sentence what of the course runs here; a GPU is never needed."""
    from distlab.measure import gpu_names, num_cores

    cores, gpus = num_cores(), gpu_names()
    here = f"This machine has {cores} core{'s' if cores != 1 else ''} and"
    if not gpus:
        return f"{here} no GPU: every lesson runs here; parts for GPUs use the CPU."
    names = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0]})"
    if len(gpus) == 1:
        return f"{here} {names}: every lesson runs here; ranks share the GPU where a part needs several."
    return f"{here} {names}: every lesson runs here, and parts for GPUs use them."


class CourseMap:
    """The map, as a table in a notebook and as text elsewhere."""

    def __init__(self, lessons: list[Row], machine: str) -> None:
        self.rows, self.machine = lessons, machine

    @property
    def summary(self) -> str:
        """How far you are in all, and what is next, in a sentence."""
        ready = [row for row in self.rows if row.ready]
        passed, total = sum(row.passed for row in ready), sum(len(row.exercises) for row in ready)
        following = next((row for row in ready if row.passed < len(row.exercises)), None)
        done = f"{passed} of {total} exercises passed."
        return f"{done} Next: {following.number} {following.title}." if following else done

    def __str__(self) -> str:
        lines = [self.machine, self.summary, ""]
        for row in self.rows:
            facts = [f"{row.minutes} min"] if row.minutes else []
            facts += [f"after {', '.join(row.needs)}"] if row.needs else []
            lines.append(f"{row.number}  {row.title:<30} {row.progress:<10} {', '.join(facts)}".rstrip())
            lines.append(f"    {row.can}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(
            f'<th scope="col" style="text-align:left">{name}</th>'
            for name in ("Lesson", "Afterwards you can", "Time", "After", "Exercises passed")
        )
        body = "".join(_html_row(row) for row in self.rows)
        return (
            f"<p>{html.escape(self.machine)}</p><p>{html.escape(self.summary)}</p>"
            f'<table aria-label="The lessons of the course"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        )


def _html_row(row: Row) -> str:
    name = html.escape(f"{row.number} {row.title}")
    link = f'<a href="{row.folder}/{row.notebook}">{name}</a>' if row.ready else name
    minutes = f"{row.minutes} min" if row.minutes else ""
    cells = [link, html.escape(row.can), minutes, html.escape(", ".join(row.needs)), _bar(row)]
    grey = "" if row.ready else ' style="opacity:0.65"'
    # Beside JupyterLab's folders a window of 1024 pixels leaves some 550: names and goals wrap, numbers stay whole.
    layouts = ["min-width:7em", "min-width:13em", "white-space:nowrap", "min-width:4em", "white-space:nowrap"]
    columns = (f'<td style="text-align:left;{layout}">{cell}</td>' for layout, cell in zip(layouts, cells, strict=True))
    return f"<tr{grey}>{''.join(columns)}</tr>"


def _bar(row: Row) -> str:
    if not row.exercises:
        return html.escape(row.progress)
    number, style = f'max="{len(row.exercises)}" value="{row.passed}"', "width:5em;display:block"
    return f'<progress {number} style="{style}" aria-hidden="true"></progress>{html.escape(row.progress)}'


def _row(lessons: Path, folder: str, can: str, progress: Mapping[str, Entry]) -> Row:
    number, _, words = folder.partition("_")
    facts = _facts(lessons / folder / "lesson.ipynb")
    title = words.replace("_", " ").capitalize()
    if facts is None:
        return Row(number, folder, title, can, ready=False)
    exercises = tuple(facts.get("exercises", ()))
    work = work_folder()
    copy = None if work is None else copy_in(work, folder)
    return Row(
        number,
        folder,
        facts.get("title", title),
        can,
        ready=True,
        minutes=facts.get("minutes"),
        needs=tuple(map(str, facts.get("needs", ()))),
        exercises=exercises,
        passed=sum(name in progress and progress[name].passed for name in exercises),
        solutions_seen=tuple(name for name in exercises if name in progress and progress[name].solution_seen),
        notebook=copy.name if copy is not None and copy.is_file() else "lesson.ipynb",
    )


def _facts(notebook: Path) -> dict[str, Any] | None:
    """Return what the builder wrote into a lesson's notebook about it, or None where it is not built."""
    try:
        facts: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["distlab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts
