"""Writes the pages of all faults that the checks name: one for each lesson, and one of how the checks are tested.

What a check says stands in tests/lessons/words.csv (`tools/fault_table.py` keeps it), the ranks and the origin of each
wrong version in the lesson. DISTLAB_DOCS_LESSONS chooses lessons, such as 09_*: a short build for tests.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from distlab.grading import Lesson, lessons, load_lesson, reference_of

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools"))
from fault_table import kept_words, markdown  # noqa: E402
from varied_axes import AXES, COVERED, coverage  # noqa: E402

FOLDER = "docs/faults"
PASSES = "passes:"
INDEX = """# Faults that the checks name

Every exercise is tested with wrong versions of its solution, most of them seen in real code. Each must be rejected with
the words that name its own fault. The words are those of the last run that was kept; times, and which of several equal
ranks spoke first, are left out. [The faults that a learner meets most](../../lessons/COMMON_FAULTS.md) have a page.

```{toctree}
:maxdepth: 1
"""
HEADS = "| exercise | wrong version | ranks | what the check says | seen in |\n|---|---|---|---|---|"
CHECKS = """# How the checks are tested

## Generated wrong answers

Wrong answers are also generated: one change of the reference each, such as an operator, a number, a dropped statement,
swapped arguments, a dropped `group=` or `clone()`. `make soak` checks all of them; this is the last run that was kept.
Those that are right answers after all are left out of "checked" and stand below with their reason.

| exercise | by hand | generated | checked | rejected |
|---|---|---|---|---|"""
VARIES = """## What varies

After its own cases, a check calls the answer with arguments that are drawn from a seed, a different one each time.
Results, arguments and the state of the process are compared with those of the reference. A number in brackets stands
for the reason, below the table, why the calls do not vary this.
"""


def page(lesson: Lesson, words: dict[tuple[str, str], str]) -> str:
    """Return a lesson's page: every wrong version that its checks know."""
    rows = [
        (one.exercise, one.name, str(one.world), words[one.exercise, one.name], one.source) for one in lesson.mutants
    ]
    lines = ["| " + " | ".join(map(markdown, row)) + " |" for row in rows]
    return "\n".join([f"# {lesson.number} {lesson.title}: faults", "", HEADS, *lines]) + "\n"


def checks(root: Path, courses: list[Lesson]) -> str:
    """Return the page of how the checks are tested: what is generated, and what the drawn calls vary."""
    found = json.loads((root / "tests/mutation/summary.json").read_text(encoding="utf-8"))
    same = tomllib.loads((root / "tests/mutation/equivalent.toml").read_text(encoding="utf-8"))
    return "\n".join([CHECKS, *generated(courses, found, same), "", VARIES, *varied(courses)]) + "\n"


def generated(courses: list[Lesson], found: dict[str, Any], same: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield how many wrong answers each exercise has, and which of the generated ones are not rejected."""
    passed: list[str] = []
    right: list[str] = []
    wrong = 0
    for lesson in courses:
        for name in (exercise.name for exercise in lesson.exercises):
            row, reasons = found[name], same.get(name, {})
            by_hand = sum(mutant.exercise == name for mutant in lesson.mutants)
            checked = row["checked"] - row["equivalent"]
            wrong += checked
            yield f"| {name} | {by_hand} | {row['generated']} | {checked} | {checked - len(row['survived'])} |"
            for change in row["survived"]:
                why = reasons.get(change, "not looked into yet").removeprefix(PASSES).strip()
                passed.append(f"- {name}, line `{change}`: {why}")
            listed = [(change, why) for change, why in reasons.items() if not why.startswith(PASSES)]
            right += [f"- {name}, line `{change}`: {why}" for change, why in listed]
    yield from ("", f"{wrong - len(passed)} of {wrong} are rejected. These pass:", "", *(passed or ["- none"]))
    yield from ("", "These are right answers:", "", *(right or ["- none"]))


def varied(courses: list[Lesson]) -> Iterator[str]:
    """Yield the table of what the drawn calls of each exercise vary, and the reasons why they do not."""
    reasons: list[str] = []
    yield f"| exercise | {' | '.join(AXES)} |"
    yield "|---" * (len(AXES) + 1) + "|"
    for exercise in (exercise for lesson in courses for exercise in lesson.exercises):
        cells = []
        for cell in coverage(exercise, reference_of(exercise)).values():
            reason = cell or "not yet"
            if reason != COVERED and reason not in reasons:
                reasons.append(reason)
            cells.append(COVERED if reason == COVERED else f"({reasons.index(reason) + 1})")
        yield f"| {exercise.name} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{index}. {reason}" for index, reason in enumerate(reasons, start=1))


def pages(root: Path) -> dict[str, str]:
    """Return every page by its name."""
    every = [load_lesson(number, root / "lessons") for number in lessons(root / "lessons")]
    chosen = os.environ.get("DISTLAB_DOCS_LESSONS", "*")
    courses = [lesson for lesson in every if lesson.folder.match(chosen)]
    words = kept_words()
    names = [*(lesson.number for lesson in courses), "checks"]
    index = INDEX + "\n" + "\n".join(names) + "\n```\n"
    return {lesson.number: page(lesson, words) for lesson in courses} | {
        "checks": checks(root, courses),
        "index": index,
    }


def _write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    wanted = {folder / f"{name}.md": text for name, text in pages(Path(app.srcdir)).items()}
    for path in set(folder.glob("*.md")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx looks for sources."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
