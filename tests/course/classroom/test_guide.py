"""The instructors' guide: its times are the lessons', its answers what its code prints, its weeks have all lessons."""

import csv
import importlib.util
import re
from pathlib import Path

from distlab.course.classroom import FOLDER_BYTES
from distlab.course.grading import Exercise, lessons
from distlab.course.grading.guard import MAX_FILE_BYTES
from distlab.course.grading.run import MAX_OUTPUT_BYTES

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "lessons" / "INSTRUCTORS.md").read_text(encoding="utf-8")


def test_times_points_and_answers_are_up_to_date():
    spec = importlib.util.spec_from_file_location("instructor_guide", ROOT / "tools" / "instructor_guide.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.filled(GUIDE) == GUIDE, "run python tools/instructor_guide.py"
    questions = re.findall(r"^\*\*(\d+)\.\*\*", GUIDE, re.MULTILINE)
    assert questions == [str(number) for number in range(1, len(questions) + 1)]
    assert GUIDE.count("```python") == GUIDE.count("```text") == len(questions)


def test_each_plan_of_weeks_has_every_lesson():
    for heading in ("## Five weeks", "## Ten weeks"):
        section = GUIDE.split(heading)[1].split("\n## ")[0]
        assert set(re.findall(r"\b(\d\d)\b", section)) == set(lessons(ROOT / "lessons"))


def test_faults_that_it_warns_of_are_of_exercises_that_exist():
    with (ROOT / "tests" / "lessons" / "words.csv").open(encoding="utf-8", newline="") as file:
        exercises = {row["exercise"] for row in csv.DictReader(file)}
    named = re.findall(r"\b(\d\d\.[a-z_0-9]+)\b", GUIDE.split("## What students get wrong")[1].split("\n## ")[0])
    assert named
    assert [name for name in named if name not in exercises] == []


def test_it_says_that_limits_are_no_security_boundary():
    assert "under limits that stop accidents, not attackers" in GUIDE
    assert "Grade work that you do not trust in a container." in GUIDE
    section = GUIDE.split("### In a container")[1].split("\n## ")[0]
    assert "--contained" in section
    assert "Not prevented without `--contained`" in section
    assert "Not prevented with it either" in section


def test_the_limits_that_it_names_are_the_real_ones():
    memory, files = Exercise.__dataclass_fields__["memory_limit_bytes"].default, FOLDER_BYTES
    text = f"{memory >> 30} GiB of memory per rank, a time limit, files of at most {MAX_FILE_BYTES >> 20} MiB and "
    text += f"{files >> 30} GiB in all, {MAX_OUTPUT_BYTES // 10**6} MB of output, no new processes."
    assert text in " ".join(GUIDE.split())
