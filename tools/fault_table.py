"""Write lessons/FAULTS.md: every wrong version that the checks know, and what a check says to it, from a run.

    python tools/fault_table.py          # run the lessons whose checks have changed since the last run
    python tools/fault_table.py --all    # run all of them

Next to the table it keeps a digest for each lesson: of the files that decide what its checks say. While they are what
they were, the rows of the last run stand, and tests/lessons/test_mutants.py runs some of the wrong versions anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from varied_axes import AXES, COVERED, coverage

from distlab.grading import Lesson, Mutant, Report, lessons, load_lesson, reference_of
from distlab.grading.check import examine

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "lessons" / "FAULTS.md"
DIGESTS = ROOT / "tests" / "lessons" / "digests_of_faults.json"
SEED = 0  # of the drawn arguments
VARIES = """## What varies

After its own cases, a check calls the answer with arguments that are drawn from a seed, another one each time. Results,
arguments and the state of the process are compared with those of the reference. A number in brackets stands for the
reason, below the table, why the calls do not vary this."""
GENERATED = ROOT / "tests" / "mutation"
PASSES = "passes:"
COUNTS = """## How many

Wrong answers are also generated: one change of the reference each, such as an operator, a number, a dropped statement,
swapped arguments, a dropped `group=` or `clone()`. `make soak` checks all of them; this is the last run that was kept.
Those that are right answers after all are left out of "checked" and stand below with their reason."""
HANG_S = 5.0  # a wrong version that hangs need not be waited for as long as a learner's
HEAD = """# Faults that the checks name

Every exercise is tested with wrong versions of its solution, most of them seen in real code. Each must be rejected with
the words that name its own fault. This table is written by `python tools/fault_table.py`, from a run; times, and which
of several equal ranks spoke first, are left out.
"""


def examine_mutant(lesson: Lesson, mutant: Mutant, *, world: int | None = None) -> Report:
    """Check a wrong version on the number of ranks that reveals it, or on another."""
    exercise = lesson.exercise(mutant.exercise)
    if mutant.fault == "hang":
        exercise = replace(exercise, timeout_s=min(exercise.timeout_s, HANG_S))
    return examine(exercise, mutant.fn, worlds=(mutant.world if world is None else world,), seed=SEED)


def deciding_files(lesson: Lesson) -> list[Path]:
    """Return the files that decide what a lesson's checks say: its own, and those of the checks of all lessons."""
    own = [lesson.folder / "solutions.py", lesson.folder / "exercises.py", *lesson.folder.glob("checks/*.py")]
    return sorted([*own, *(ROOT / "distlab" / "grading").rglob("*.py")])


def digest_of(lesson: Lesson) -> str:
    """Return 16 digits that change with each file that decides what a lesson's checks say."""
    found = hashlib.sha256()
    for path in deciding_files(lesson):
        text = path.read_bytes()
        found.update(f"{path.relative_to(ROOT).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]


def is_kept(lesson: Lesson) -> bool:
    """Tell whether a lesson's rows in the table are those of its checks as they are now."""
    return _kept_digests().get(lesson.number) == digest_of(lesson)


def _kept_digests() -> dict[str, str]:
    return json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}


def kept_words() -> dict[tuple[str, str], str]:
    """Return what the table says that a check says, by exercise and wrong version."""
    rows = (re.split(r"(?<!\\) \| ", line[2:-2]) for line in TABLE.read_text(encoding="utf-8").splitlines())
    return {(row[0], row[1]): row[3] for row in rows if len(row) == 5}


def words_of(mutant: Mutant, report: Report) -> str:
    """Return what the table says of a report."""
    return f"... {mutant.says} ..." if mutant.races else what_it_says(report.message)


def what_it_says(message: str) -> str:
    """Return the first line of a message without what differs from run to run."""
    line = message.strip().splitlines()[0]
    line = re.sub(r"\bfor \d+(\.\d+)? s\b", "", line)
    line = re.sub(r"\d+(\.\d+)?(?= (us|ms)\b)", "...", line)
    line = re.sub(r"(\d\.\d{5})\d+", r"\1...", line)  # float32 rounds as the processor adds
    line = re.sub(r"(it raised \w+: )rank \d+: ", r"\1", line)  # all ranks raise, and any of them may be the first
    line = re.sub(r"^on rank \d+ of (\d+): ", "", line)
    line = re.sub(r"\S*/(?=[\w.]+\.py\b)", "", line)
    line = line.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    line = " ".join(line.split())
    return line if len(line) <= 260 else re.sub(r"\S+$", "", line[:257]) + "..."  # no half words


def table(courses: Iterable[Lesson], words: Mapping[tuple[str, str], str]) -> str:
    """Return the file's text; words are those of each wrong version, by exercise and name."""
    lines = [HEAD.rstrip()]
    for lesson in courses:
        lines += ["", f"## {lesson.number} {lesson.title}", ""]
        lines += ["| exercise | wrong version | ranks | what the check says | seen in |", "|---|---|---|---|---|"]
        for one in lesson.mutants:
            cells = (one.exercise, one.name, str(one.world), words[one.exercise, one.name], one.source)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + how_many() + what_varies()


def how_many() -> str:
    """Return how many wrong answers each exercise has, written by hand and generated, and which are not rejected."""
    found = json.loads((GENERATED / "summary.json").read_text(encoding="utf-8"))
    same = tomllib.loads((GENERATED / "equivalent.toml").read_text(encoding="utf-8"))
    rows = ["", COUNTS, "", "| exercise | by hand | generated | checked | rejected |", "|---|---|---|---|---|"]
    left: list[str] = []
    for number in lessons(ROOT / "lessons"):
        lesson = load_lesson(number, ROOT / "lessons")
        for exercise in lesson.exercises:
            name, row = exercise.name, found[exercise.name]
            by_hand = sum(mutant.exercise == name for mutant in lesson.mutants)
            checked = row["checked"] - row["equivalent"]
            rows.append(f"| {name} | {by_hand} | {row['generated']} | {checked} | {checked - len(row['survived'])} |")
            left += [f"- {name}, line `{change}`: {_why(same, name, change)}" for change in row["survived"]]
    wrong = sum(row["checked"] - row["equivalent"] for row in found.values())
    rows += ["", f"{wrong - len(left)} of {wrong} are rejected. These pass:", "", *(left or ["- none"])]
    rows += ["", "These are right answers:", ""]
    right = [(name, change, why) for name, those in same.items() for change, why in those.items()]
    rows += [f"- {name}, line `{change}`: {why}" for name, change, why in right if not why.startswith(PASSES)]
    return "\n".join(rows) + "\n"


def _why(reasons: dict[str, dict[str, str]], name: str, change: str) -> str:
    return reasons.get(name, {}).get(change, "not looked into yet").removeprefix(PASSES).strip()


def what_varies() -> str:
    """Return the matrix of variation: what the drawn calls of each exercise vary, or why they do not."""
    reasons: list[str] = []
    rows = ["", VARIES, "", f"| exercise | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    for number in lessons(ROOT / "lessons"):
        for exercise in load_lesson(number, ROOT / "lessons").exercises:
            if exercise.vary is None:
                rows.append(f"| {exercise.name} " + "| not yet " * len(AXES) + "|")
                continue
            cells = []
            for cell in coverage(exercise, reference_of(exercise)).values():
                if cell != COVERED and cell not in reasons:
                    reasons.append(cell)
                cells.append(cell if cell == COVERED else f"({reasons.index(cell) + 1})")
            rows.append(f"| {exercise.name} | {' | '.join(cells)} |")
    rows += [""] + [f"{index}. {reason}" for index, reason in enumerate(reasons, start=1)]
    return "\n".join(rows) + "\n"


def run_anew(courses: Iterable[Lesson]) -> dict[tuple[str, str], str]:
    """Check every wrong version of some lessons; return what is said of each."""
    found = {}
    for lesson in courses:
        for mutant in lesson.mutants:
            report = examine_mutant(lesson, mutant)
            if report.verdict != "wrong" or report.fault != mutant.fault or mutant.says not in report.message:
                sys.exit(
                    f"{mutant.exercise}, {mutant.name}: {mutant.fault!r} and {mutant.says!r} expected, got {report}"
                )
            found[mutant.exercise, mutant.name] = words_of(mutant, report)
    return found


def main(arguments: Collection[str]) -> int:
    courses = [load_lesson(number, ROOT / "lessons") for number in lessons(ROOT / "lessons")]
    changed = [lesson for lesson in courses if "--all" in arguments or not is_kept(lesson)]
    digests = {lesson.number: digest_of(lesson) for lesson in courses}  # of the files as they are before the run
    words = (kept_words() if TABLE.exists() else {}) | run_anew(changed)
    TABLE.write_text(table(courses, words), encoding="utf-8")
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}; ran lessons {', '.join(lesson.number for lesson in changed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
