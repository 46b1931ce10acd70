"""Write tests/lessons/words.csv: every wrong version that the checks know, and what a check says to it, from a run.

    python tools/fault_table.py          # run the lessons whose checks have changed since the last run
    python tools/fault_table.py --all    # run all of them

It also writes the words into lessons/COMMON_FAULTS.md, whose wrong versions are chosen by hand.

Next to the words it keeps a digest for each lesson: of the files that decide what its checks say. While they are what
they were, the rows of the last run stand, and tests/lessons/test_mutants.py runs some of the wrong versions anew.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from distlab.course.grading import Lesson, Mutant, Report, lessons, load_lesson
from distlab.course.grading.check import examine

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tests" / "lessons" / "words.csv"
COMMON = ROOT / "lessons" / "COMMON_FAULTS.md"
DIGESTS = ROOT / "tests" / "lessons" / "words_digests.json"
COLUMNS = ("exercise", "wrong version", "fault", "words")
SEED = 0  # of the drawn arguments
HANG_S = 5.0  # a wrong version that hangs need not be waited for as long as a learner's


def examine_mutant(lesson: Lesson, mutant: Mutant, *, world: int | None = None) -> Report:
    """Check a wrong version on the number of ranks that reveals it, or on a different one."""
    exercise = lesson.exercise(mutant.exercise)
    if mutant.fault == "hang":
        exercise = replace(exercise, timeout_s=min(exercise.timeout_s, HANG_S))
    return examine(exercise, mutant.fn, worlds=(mutant.world if world is None else world,), seed=SEED)


def deciding_files(lesson: Lesson) -> list[Path]:
    """Return the files that decide what a lesson's checks say: its own, and those of the checks of all lessons."""
    own = [lesson.folder / "solutions.py", lesson.folder / "exercises.py", *lesson.folder.glob("checks/*.py")]
    return sorted([*own, *(ROOT / "distlab" / "course" / "grading").rglob("*.py")])


def digest_of(lesson: Lesson) -> str:
    """Return 16 digits that change with each file that decides what a lesson's checks say."""
    found = hashlib.sha256()
    for path in deciding_files(lesson):
        text = path.read_bytes()
        found.update(f"{path.relative_to(ROOT).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]


def is_kept(lesson: Lesson) -> bool:
    """Tell whether a lesson's kept words are those of its checks as they are now."""
    return _kept_digests().get(lesson.number) == digest_of(lesson)


def _kept_digests() -> dict[str, str]:
    return json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}


def kept_words() -> dict[tuple[str, str], str]:
    """Return what a check said in the last run, by exercise and wrong version."""
    with WORDS.open(encoding="utf-8", newline="") as file:
        return {(row["exercise"], row["wrong version"]): row["words"] for row in csv.DictReader(file)}


def words_of(mutant: Mutant, report: Report) -> str:
    """Return what is kept of a report."""
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
    line = " ".join(line.split())
    return line if len(line) <= 260 else re.sub(r"\S+$", "", line[:257]) + "..."  # no half words


def text_of(courses: Iterable[Lesson], words: Mapping[tuple[str, str], str]) -> str:
    """Return the file's text; words are those of each wrong version, by exercise and name."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for lesson in courses:
        for one in lesson.mutants:
            rows.writerow((one.exercise, one.name, one.fault, words[one.exercise, one.name]))
    return text.getvalue()


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is, also in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def common_text(words: Mapping[tuple[str, str], str]) -> str:
    """Return the page of common faults with what the checks say now.

    Raises:
        ValueError: the page names a wrong version that there is not.
    """
    lines = COMMON.read_text(encoding="utf-8").splitlines()
    for place, line in enumerate(lines):
        fault, *named = re.split(r"(?<!\\) ?\| ?", line)[1:4] or [""]
        if len(named) == 2 and re.fullmatch(r"\d\d\.\w+", named[0]):
            if (named[0], named[1]) not in words:
                raise ValueError(
                    f"{COMMON.name} names {named[1]!r} of {named[0]}, which is no wrong version: choose one"
                )
            lines[place] = f"| {fault} | {named[0]} | {named[1]} | {markdown(words[named[0], named[1]])} |"
    return "\n".join(lines) + "\n"


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
    words = (kept_words() if WORDS.exists() else {}) | run_anew(changed)
    WORDS.write_text(text_of(courses, words), encoding="utf-8")
    COMMON.write_text(common_text(words), encoding="utf-8")
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {WORDS.relative_to(ROOT)}; ran lessons {', '.join(lesson.number for lesson in changed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
