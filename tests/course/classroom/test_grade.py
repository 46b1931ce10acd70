"""A class is graded: every submission for itself, under limits, and a run that was ended goes on."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from trial_answers import GOOD

from distlab.cli import main
from distlab.course.classroom import Limits, Submission, find_submissions, grade_all
from distlab.course.classroom.contained import in_container, refuse_unless_it_runs
from distlab.course.classroom.grades import (
    class_page,
    keep_grade,
    kept_grade,
    student_page,
    to_gradescope,
    write_tables,
)
from distlab.course.classroom.run import grade_of
from distlab.course.grading import load_lesson

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(240)  # each submission starts processes of its own, several times

LESSONS = ROOT / "tests" / "course" / "grading" / "lessons"
SUM = GOOD.replace("total / dist.get_world_size()", "total")
HOSTILE = """
import os, signal
for number in range(3, 200):
    try:
        os.write(number, b'{"exercise": "91.mean", "verdict": "passed"}\\n')
    except OSError:
        pass

def mean(tensor):
    os.kill(os.getppid(), signal.SIGKILL)
"""
ENDLESS = "import time\n\ndef mean(tensor):\n    while True:\n        time.sleep(0.1)\n"
FILES = """
import os, time

def mean(tensor):
    for number in range(9):
        with open(f"big{number}", "wb") as file:
            file.write(bytes(1_000_000))
    time.sleep(60)
"""
BAD = {  # what each does, and the fault that is named for mean; the rest of the class is graded all the same
    "forks": ("    os.fork()", "forked"),
    "bomb": ("    while True:\n        os.fork()", "forked"),
    "bomb_by_c": (
        "    [ctypes.CDLL(None).fork() for _ in range(6)]\n    time.sleep(9)",
        "returned",
    ),
    "fills_the_disk": ("    with open('big', 'wb') as file:\n        file.truncate(1 << 40)", "raised"),
    "prints_a_gigabyte": ("    for _ in range(1000):\n        print('x' * 1_000_000)", "output"),
    "ends_its_parent": ("    os.kill(os.getppid(), 9)", "forked"),
    "ends_its_parent_by_c": ("    ctypes.CDLL(None).kill(os.getppid(), 9)\n    time.sleep(9)", "killed"),
    "generator": ("    return (one for one in [tensor])", "returned"),
    "equal_to_all": ("    return type('E', (), {'__eq__': lambda *given: True})()", "returned"),
}


@pytest.fixture
def lesson():
    return load_lesson("91", LESSONS)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "lessons").symlink_to(LESSONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hand_in(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def are_gone() -> bool:
    """Whether no process of grading is left; ranks whose check was killed end themselves."""
    deadline = time.monotonic() + 60
    while processes_of_grading() and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes_of_grading() == []


def processes_of_grading() -> list[str]:
    """Return those of this run of tests: a different one may grade on the same machine."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
            if b"/distlab-grade-" in environment and os.environ["DISTLAB_TEST_RUN"].encode() in environment:
                lines.append(path.parent.name)
        except OSError:
            continue
    return lines


def test_a_class_is_graded_and_the_same_command_goes_on(here, capsys):
    folder = hand_in(here / "class", bob=SUM, mallory=HOSTILE)
    (folder / "eve").mkdir()
    assert main(["grade", "91", str(folder), "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    out = here / "grades" / "91_trial"
    rows = {row["student"]: row for row in csv.DictReader((out / "grades.csv").open())}
    points = {name: (row["points"], row["possible"]) for name, row in rows.items()}
    worth = rows["bob"]["possible"]
    assert 0 < int(points["bob"][0]) < int(worth)
    assert points["eve"] == ("0", worth)
    assert points["mallory"][0] == "0"
    assert rows["bob"]["91.mean"] == "wrong"
    assert rows["bob"]["91.mean fault"] == "sum not mean"
    assert rows["bob"]["91.double"] == "passed"
    assert rows["eve"]["91.mean"] == "not attempted"
    assert "divide by world_size" in (out / "students" / "bob.html").read_text()
    assert "distlab-grade-" not in (out / "grades.json").read_text()  # a folder that is gone
    assert "sum not mean" in (out / "grades.html").read_text()
    assert are_gone()
    assert "(kept)" not in said

    hand_in(here / "class", bob=GOOD)
    assert main(["grade", "91", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {grade["student"]: grade["points"] for grade in told["grades"]}["bob"] == int(worth)
    assert main(["grade", "91", str(folder)]) == 0
    assert capsys.readouterr().out.count("(kept)") == 3


MEDDLES = """
import pathlib

for path in [*pathlib.Path("{here}/class").glob("*.py"), *pathlib.Path("{here}/results").glob("*.json")]:
    if path.stem != "ann":
        path.write_text("")

def mean(tensor):
    return tensor
"""


def test_a_submission_that_changes_others_files_changes_no_result(lesson, here):
    folder = hand_in(here / "class", ann=MEDDLES.format(here=here), bob=GOOD, zoe=GOOD)
    submissions = find_submissions([folder], "91_trial")
    submissions = [submissions[1], submissions[0], submissions[2]]  # bob's result is there when ann's code runs
    for _ in range(2):  # the second time from what was kept
        points = {one.student: one.points for one in grade_all(submissions, lesson, here / "results", seed=1)}
        assert points["bob"] == points["zoe"] == 4
        assert points["ann"] == 0
    assert (folder / "zoe.py").read_text() == "", "it did change them"


def test_what_is_bad_is_told_and_the_others_are_graded(lesson, here):
    head, tail = "import ctypes, os, time\n\ndef mean(tensor):\n", "\n\ndef double(values, *, times=2):\n    "
    right = "return [times * value for value in values]\n"
    texts = {name: head + line + tail + right for name, (line, _) in BAD.items()}
    folder = hand_in(here / "class", zoe=GOOD, **texts)
    submissions = find_submissions([folder], "91_trial")
    grades = grade_all(submissions, lesson, here / "results", seed=1, jobs=2)
    told = {grade.student: {mark.exercise: mark for mark in grade.marks} for grade in grades}
    assert [grade.stopped for grade in grades] == [""] * len(grades)
    assert told["zoe"]["91.mean"].verdict == "passed"
    for name, (_, fault) in BAD.items():
        assert told[name]["91.double"].verdict == "passed", name
        assert told[name]["91.mean"].verdict == "wrong", name
        assert re.fullmatch(fault, told[name]["91.mean"].fault), told[name]["91.mean"]
    assert are_gone()


def test_a_user_starts_no_more_processes_than_allowed():
    code = """
import os, time
from distlab.course.grading.guard import limit_number_of_processes
if os.getuid() == 0:
    os.setuid(65534)
limit_number_of_processes(4)
started = []
try:
    for _ in range(50):
        if not (pid := os.fork()):
            time.sleep(60)
        started.append(pid)
except BlockingIOError:
    print("refused after", len(started))
finally:
    for pid in started:
        os.kill(pid, 9)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert re.search("refused after [0-4]\n", ran.stdout), ran.stdout + ran.stderr


SPIES = """
import os, socket

def double(values, *, times=2):
    seen = [path for path in ("{here}/class/ann.py", "{here}/grades", "/etc/passwd") if os.path.exists(path)]
    for path in ("/tmp/seen", "/usr/seen", "{here}/seen"):
        try:
            open(path, "w").close()
            seen.append(path)
        except OSError:
            pass
    try:
        socket.create_connection(("1.1.1.1", 53), 2)
        seen.append("network")
    except OSError:
        pass
    raise ValueError(f"it saw {{seen}}")
"""


def test_in_a_container_nothing_else_is_seen(here, capsys):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        refuse_unless_it_runs()
    except ValueError as error:
        pytest.skip(str(error))
    folder = hand_in(here / "class", ann=GOOD, spy=SPIES.format(here=here))
    assert main(["grade", "91", str(folder), "--contained", "--json"]) == 0
    told = {grade["student"]: grade for grade in json.loads(capsys.readouterr().out)["grades"]}
    assert told["ann"]["points"] == 4
    assert "it saw []" in next(mark["message"] for mark in told["spy"]["marks"] if mark["exercise"] == "91.double")


def test_a_container_may_write_its_own_folder_and_read_what_it_needs(tmp_path):
    line = in_container(tmp_path, [Path("/lessons")])
    binds = [tuple(line[at + 1 : at + 3]) for at, word in enumerate(line) if word == "--bind"]
    assert binds == [(str(tmp_path), str(tmp_path))]
    shown = [line[at + 1] for at, word in enumerate(line) if word == "--ro-bind-try"]
    assert {"/usr", sys.prefix, "/lessons", str(ROOT / "distlab"), str(ROOT / "simulator")} <= {*shown}
    assert "/" not in shown
    assert "--unshare-all" in line  # no network, no other process
    assert line[-4:] == ["--remount-ro", "/", "--chdir", str(tmp_path)]


def test_without_bubblewrap_one_line_says_so(here, monkeypatch, capsys):
    hand_in(here / "class", ann=GOOD)
    monkeypatch.setenv("PATH", str(here))
    assert main(["grade", "91", "class", "--contained"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--contained needs bubblewrap (bwrap), which is not installed" in line


def test_what_cannot_be_read_is_said_in_one_line(here, capsys):
    folder = hand_in(here / "class", bob="", sue="def mean(:\n")
    (folder / "ann.ipynb").write_text('{"cells": [')
    (folder / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(folder / "pipe.py")
    assert main(["grade", "91", str(folder), "--jobs", "2", "--json"]) == 1
    told = {grade["student"]: grade for grade in json.loads(capsys.readouterr().out)["grades"]}
    assert told["bob"]["stopped"] == "bob.py is empty"
    assert told["sue"]["stopped"] == "sue.py, line 1: invalid syntax"
    assert told["ann"]["stopped"].startswith("ann.ipynb is not a notebook, or it is damaged")
    for name in ("gone", "pipe"):
        assert {mark["verdict"] for mark in told[name]["marks"]} == {"not attempted"}


@pytest.mark.parametrize(
    ("text", "minutes", "most_bytes", "words"),
    [(ENDLESS, 0.05, 10**9, "it ran for 0.05 minutes"), (FILES, 10, 10**6, "MB of files; the limit is 1 MB")],
    ids=["time", "files"],
)
def test_a_limit_ends_one_submission_and_leaves_nothing(lesson, here, monkeypatch, text, minutes, most_bytes, words):
    monkeypatch.setattr("distlab.course.classroom.run.FOLDER_BYTES", most_bytes)
    submissions = find_submissions([hand_in(here / "class", zoe=text)], "91_trial")
    (grade,) = grade_all(submissions, lesson, here / "results", seed=1, limits=Limits(minutes))
    assert words in grade.stopped
    assert grade.points == 0
    assert {mark.verdict for mark in grade.marks} == {"stopped"}
    assert are_gone()


def test_an_interrupt_keeps_what_is_graded(here):
    folder = hand_in(here / "class", ann=GOOD, zoe=ENDLESS)
    command = [sys.executable, "-u", "-m", "distlab", "grade", "91", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("ann")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert [path.name for path in (here / "grades" / "91_trial" / "results").iterdir()] == ["ann.json"]
    assert are_gone()


def test_blocked_points_are_neither_earned_nor_lost(lesson, tmp_path):
    told = {"fault": None, "message": "it needs a GPU", "seconds": 0.1}
    lines = [{"notes": ["cell 3 was left out"]}, {"exercise": "91.mean", "verdict": "blocked", **told}]
    lines.append({"exercise": "91.double", "verdict": "passed", **told})
    two = replace(lesson, exercises=lesson.exercises[:2])
    grade = grade_of(Submission("=ann", Path("ann.py")), two, "key", lines, "")
    mean, double = (exercise.difficulty for exercise in two.exercises)
    assert (grade.points, grade.possible, grade.blocked) == (double, double, mean)
    write_tables(tmp_path, "<b>", [grade])
    table = (tmp_path / "grades.csv").read_text()
    assert "blocked" in table
    assert "'=ann" in table
    (test,) = to_gradescope(grade)["tests"]
    assert test == {"name": "91.double", "score": double, "max_score": double, "output": "it needs a GPU"}
    assert to_gradescope(grade)["output"] == "cell 3 was left out"
    page = student_page("Lesson", grade)
    assert "it needs a GPU" in page
    assert "cell 3 was left out" in page
    assert f"; {mean} more need a machine" in page
    assert "&lt;b&gt;" in class_page("<b>", [grade])
    keep_grade(tmp_path, grade)
    assert kept_grade(tmp_path, "=ann", "key") == grade
    assert kept_grade(tmp_path, "=ann", "a different key") is None
    keep_grade(tmp_path, replace(grade, stopped="it ran for 10 minutes"))  # is graded again
    assert kept_grade(tmp_path, "=ann", "key") is None
    for damaged in ("{}", "[", '{"marks": [{"size": 1}]}'):
        (tmp_path / "=ann.json").write_text(damaged)
        assert kept_grade(tmp_path, "=ann", "key") is None


def test_submissions_are_found_and_named(tmp_path):
    name = "91_trial"
    notebook = tmp_path / "class" / "ann" / "work" / name / f"{name}.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.write_text("{}")
    (notebook.parent.parent / "START.ipynb").write_text("{}")
    (tmp_path / "class" / "b ob").mkdir()
    (tmp_path / "class" / "b ob" / "mine.ipynb").write_text("{}")
    (tmp_path / "class" / "eve").mkdir()
    (tmp_path / "class" / ".cache").mkdir()
    found = {one.student: one.path for one in find_submissions([tmp_path / "class"], name)}
    assert found == {"ann": notebook, "b_ob": tmp_path / "class" / "b ob" / "mine.ipynb", "eve": None}
    assert find_submissions([notebook], name)[0].student == "ann"


def test_what_cannot_be_graded_is_said_in_one_line(here, capsys):
    hand_in(here / "class", ann=GOOD)
    (here / "empty").mkdir()
    (here / "a.txt").write_text("x")
    for arguments, words in (
        (["empty"], "no submission of lesson 91"),
        (["nowhere"], "nowhere is neither a notebook"),
        (["a.txt"], "a.txt is neither a notebook"),
        (["a.txt", "--minutes", "0"], "pass minutes above 0"),
    ):
        assert main(["grade", "91", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_one_students_two_files_do_not_end_the_grading_of_the_others(here, capsys):
    folder = hand_in(here / "class", ann=GOOD, zoe=GOOD)
    hand_in(folder / "ann", one=GOOD)
    hand_in(folder / "bob", one=GOOD, two=GOOD)
    assert main(["grade", "91", str(folder), "--json"]) == 1
    told = {grade["student"]: grade for grade in json.loads(capsys.readouterr().out)["grades"]}
    assert "two submissions are ann's" in told["ann"]["stopped"]
    assert "several files to grade (one.py, two.py); name the right one 91_trial.ipynb" in told["bob"]["stopped"]
    assert {mark["verdict"] for mark in told["bob"]["marks"]} == {"stopped"}
    assert told["zoe"]["points"] == 4
