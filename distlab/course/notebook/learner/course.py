"""The map of the course: what each lesson is for, what it needs, and how far you are."""

from __future__ import annotations

import html
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distlab.course.grading.progress import Entry, copy_in, load_progress, work_folder

COURSE = "COURSE.toml"


@dataclass(frozen=True)
class CourseRow:
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


def rows(lessons: Path, progress: Mapping[str, Entry]) -> list[CourseRow]:
    """Return one row per lesson: those of COURSE.toml, filled in from the notebooks that are built."""
    plan = tomllib.loads((lessons / COURSE).read_text(encoding="utf-8"))["lesson"]
    return [_row(lessons, entry["folder"], entry["can"], progress) for entry in plan]


def course_map(lessons: Path | None = None) -> CourseMap:
    """Return the map of the course, with your progress; a notebook shows it as a table with links."""
    from distlab.course.grading.lesson import lessons_folder

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
    use = "ranks share the GPU where a part needs several" if len(gpus) == 1 else "parts for GPUs use them"
    return f"{here} {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0]}): every lesson runs here; {use}."


class CourseMap:
    """The map, as a table in a notebook and as text elsewhere."""

    def __init__(self, lessons: list[CourseRow], machine: str) -> None:
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
        columns = ("Lesson", "Afterwards you can", "Time", "After", "Exercises passed")
        head = "".join(f'<th scope="col" style="text-align:left">{name}</th>' for name in columns)
        return (
            f"<p>{html.escape(self.machine)}</p><p>{html.escape(self.summary)}</p>"
            f'<table aria-label="The lessons of the course"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(map(_html_row, self.rows))}</tbody></table>"
        )


def _html_row(row: CourseRow) -> str:
    name, done = html.escape(f"{row.number} {row.title}"), html.escape(row.progress)
    if row.exercises:
        number, style = f'max="{len(row.exercises)}" value="{row.passed}"', "width:5em;display:block"
        done = f'<progress {number} style="{style}" aria-hidden="true"></progress>{done}'
    cells = (  # beside JupyterLab's folders 1024 pixels leave some 550: names and goals wrap, numbers stay whole
        (f'<a href="{row.folder}/{row.notebook}">{name}</a>' if row.ready else name, "min-width:7em"),
        (html.escape(row.can), "min-width:13em"),
        (f"{row.minutes} min" if row.minutes else "", "white-space:nowrap"),
        (html.escape(", ".join(row.needs)), "min-width:4em"),
        (done, "white-space:nowrap"),
    )
    grey = "" if row.ready else ' style="opacity:0.65"'
    columns = (f'<td style="text-align:left;{layout}">{cell}</td>' for cell, layout in cells)
    return f"<tr{grey}>{''.join(columns)}</tr>"


def _row(lessons: Path, folder: str, can: str, progress: Mapping[str, Entry]) -> CourseRow:
    """Return a lesson's row, from what the builder wrote into its notebook; without one it is to come."""
    number, _, words = folder.partition("_")
    row = CourseRow(number, folder, words.replace("_", " ").capitalize(), can, ready=False)
    try:
        facts = json.loads((lessons / folder / "lesson.ipynb").read_text(encoding="utf-8"))["metadata"]["distlab"]
    except (OSError, ValueError, KeyError):
        return row
    known = [(name, progress.get(name, Entry())) for name in facts.get("exercises", ())]
    work = work_folder()
    copy = lessons / "lesson.ipynb" if work is None else copy_in(work, folder)
    return replace(
        row,
        title=facts.get("title", row.title),
        ready=True,
        minutes=facts.get("minutes"),
        needs=tuple(map(str, facts.get("needs", ()))),
        exercises=tuple(name for name, _ in known),
        passed=sum(entry.passed for _, entry in known),
        solutions_seen=tuple(name for name, entry in known if entry.solution_seen),
        notebook=copy.name if copy.is_file() else row.notebook,
    )
