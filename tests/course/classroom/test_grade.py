"""A class is graded: every submission for itself, under limits, and a run that was ended goes on."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trial_answers import GOOD
from waiting import processes_with, wait_for

from distlab.cli import main
from distlab.course import classroom
from distlab.course.grading import load_lesson

ROOT = Path(__file__).resolve().parents[3]

LESSONS = ROOT / "tests" / "course" / "grading" / "lessons"
RIGHT = "\n\ndef double(values, *, times=2):\n    return [times * value for value in values]\n"
ATTACKS = """
import ctypes, os, stat
for number in range(3, 200):  # a report of its own, into whatever file or pipe the rank may have
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            os.write(number, b'{"exercise": "91.mean", "verdict": "passed"}\\n')
    except OSError:
        pass

def mean(tensor):
    [ctypes.CDLL(None).fork() for _ in range(6)]
    ctypes.CDLL(None).kill(os.getppid(), 9)
    os.kill(os.getppid(), 9)
"""
ENDLESS = "import time\n\ndef mean(tensor):\n    while True:\n        time.sleep(0.1)\n"
FILES = """
import time

def mean(tensor):
    for number in range(9):
        with open(f"big{number}", "wb") as file:
            file.write(bytes(10_000_000))
    time.sleep(60)
"""


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


def wait_until_gone():
    """No process of grading stays of this run of tests; ranks whose check was killed end themselves."""
    wait_for(lambda: not processes_with("/distlab-grade-", os.environ["DISTLAB_TEST_RUN"]))


def test_a_class_is_graded_and_the_same_command_goes_on(here, capsys):
    """One class: a wrong answer, one that attacks its check, none, and two files."""
    folder = hand_in(here / "class", bob=GOOD.replace("total / dist.get_world_size()", "total"), zoe=ATTACKS + RIGHT)
    hand_in(folder / "two", one=GOOD, other=GOOD)
    (folder / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(folder / "pipe.py")
    assert main(["grade", "91", str(folder), "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    out = here / "grades" / "91_trial"
    rows = {row["student"]: row for row in csv.DictReader((out / "grades.csv").open())}
    assert list(rows) == ["bob", "gone", "pipe", "two", "zoe"]
    assert {rows[name]["91.mean"] for name in ("gone", "pipe")} == {"not attempted"}
    assert rows["two"]["91.double"] == "stopped"
    assert rows["two"]["stopped"].startswith("several files to grade (one.py, other.py); name the right one 91_trial")
    assert (rows["bob"]["91.mean"], rows["bob"]["91.mean fault"]) == ("wrong", "sum not mean")
    assert (rows["bob"]["91.double"], rows["zoe"]["91.double"]) == ("passed", "passed")
    assert rows["zoe"]["91.mean"] == "wrong"
    assert 0 < int(rows["bob"]["points"]) < int(rows["bob"]["possible"]) == 4
    assert "<td>91.mean</td>\n<td>sum not mean</td>\n<td>1</td>" in (out / "grades.html").read_text()
    assert '<td><a href="students/bob.html">bob</a></td>' in (out / "grades.html").read_text()
    assert "divide by world_size" in (out / "students" / "bob.html").read_text()
    assert (out / "students" / "two.html").read_text().count("several files to grade") == 1, "said once"
    assert "gone                       0 of 4; nothing was handed in\n" in said
    results = json.loads((out / "students" / "bob.results.json").read_text())
    assert [test["score"] for test in results["tests"]][:2] == [0, 1]
    assert "distlab-grade-" not in (out / "grades.json").read_text()  # a folder that is gone
    wait_until_gone()
    assert "(kept)" not in said

    before = {grade["student"]: grade for grade in json.loads((out / "grades.json").read_text())}
    hand_in(folder, bob="")
    for name, damaged in (("gone", "["), ("pipe", "[1]")):  # graded anew
        (out / "results" / f"{name}.json").write_text(damaged)
    assert main(["grade", "91", str(folder)]) == 1
    after = {grade["student"]: grade for grade in json.loads((out / "grades.json").read_text())}
    assert after.pop("bob")["stopped"] == "bob.py is empty"
    assert after == {name: grade for name, grade in before.items() if name != "bob"}
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "(kept)" in line] == ["zoe"]


def test_a_user_starts_no_more_processes_than_allowed():
    code = "import os, time\nfrom distlab.course.grading.guard import limit_number_of_processes\n"
    code += "os.setuid(65534) if os.getuid() == 0 else None\nlimit_number_of_processes(4)\nstarted = []\n"
    code += "try:\n    while len(started) < 50:\n        started.append(os.fork() or time.sleep(60))\n"
    code += "except BlockingIOError:\n    print('refused after', len(started))\n"
    code += "for pid in started:\n    os.kill(pid, 9)\n"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert re.search("refused after [0-9]\n", ran.stdout), ran.stdout + ran.stderr


SPIES = """
import os, socket

def double(values, *, times=2):
    seen = [path for path in ("{here}/class/spy.py", "{here}/grades", "/etc/passwd") if os.path.exists(path)]
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


def test_in_a_container_nothing_else_is_seen(here):
    line = classroom.in_container(here, [Path("/lessons")])
    binds = [tuple(line[at + 1 : at + 3]) for at, word in enumerate(line) if word == "--bind"]
    shown = {line[at + 1] for at, word in enumerate(line) if word == "--ro-bind-try"}
    assert binds == [(str(here), str(here))]
    assert {"/usr", sys.prefix, "/lessons", str(ROOT / "distlab"), str(ROOT / "simulator")} <= shown
    assert "/" not in shown
    assert "--unshare-all" in line  # no network, no other process
    assert line[-4:] == ["--remount-ro", "/", "--chdir", str(here)]
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        classroom.refuse_unless_contained()
    except ValueError as error:
        pytest.skip(str(error))
    folder = hand_in(here / "class", spy=GOOD.replace("def double", "def twice") + SPIES.format(here=here))
    assert main(["grade", "91", str(folder), "--contained"]) == 0
    (told,) = json.loads((here / "grades" / "91_trial" / "grades.json").read_text())
    marks = {mark["exercise"]: mark for mark in told["marks"]}
    assert marks["91.mean"]["verdict"] == "passed"
    assert "it saw []" in marks["91.double"]["message"]


def test_what_cannot_be_graded_is_said_in_one_line(here, capsys, monkeypatch):
    hand_in(here / "class", ann=GOOD)
    (here / "empty").mkdir()
    (here / "a.txt").write_text("x")
    monkeypatch.setenv("PATH", str(here))
    for arguments, words in (
        (["empty"], "no submission of lesson 91"),
        (["nowhere"], "nowhere is neither a notebook"),
        (["a.txt"], "a.txt is neither a notebook"),
        (["class", "--contained"], "--contained needs bubblewrap (bwrap), which is not installed"),
    ):
        assert main(["grade", "91", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_a_limit_ends_one_submission_and_leaves_nothing(lesson, here, monkeypatch):
    monkeypatch.setattr("distlab.course.classroom.FOLDER_BYTES", 30 * 10**6)  # ranks write some MB themselves
    for name, text, minutes, words in (
        ("slow", ENDLESS, 0.01, "it ran for 0.01 minutes, the limit; pass --minutes for more"),
        ("writes", FILES, 10, "MB of files; the limit is 30 MB"),
    ):
        submissions = classroom.find_submissions([hand_in(here / name, **{name: text})], "91_trial")
        ((grade, is_new),) = classroom.grade_all(submissions, lesson, here / "results", seed=1, minutes=minutes)
        assert words in grade.stopped
        assert (grade.points, is_new) == (0, True)
        assert {mark.verdict for mark in grade.marks} == {"stopped"}
    wait_until_gone()
    assert list((here / "results").iterdir()) == []  # the same command grades them again
    ((nothing, _),) = classroom.grade_all([classroom.Submission("bob")], lesson, here / "results", seed=0)
    assert {mark.verdict for mark in nothing.marks} == {"not attempted"}


def test_an_interrupt_keeps_what_is_graded(here):
    folder = hand_in(here / "class", zoe=ENDLESS)
    (folder / "ann").mkdir()  # who hands in nothing has a result too
    command = [sys.executable, "-u", "-m", "distlab", "grade", "91", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().split()[:4] == ["ann", "0", "of", "4;"]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=250)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert [path.name for path in (here / "grades" / "91_trial" / "results").iterdir()] == ["ann.json"]
    wait_until_gone()


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_graded(lesson, here):
    gone, nothing = classroom.Submission("ann", here / "ann.py"), classroom.Submission("bob")
    grades = classroom.grade_all([gone, nothing], lesson, here / "results", seed=0)
    found = {grade.student: grade for grade, _ in grades}
    assert found["ann"].stopped == f"{here / 'ann.py'} cannot be read (No such file or directory)"
    assert {mark.verdict for mark in found["bob"].marks} == {"not attempted"}


def test_blocked_points_are_neither_earned_nor_lost(lesson, tmp_path):
    told = {"fault": None, "message": "it needs a GPU"}
    lines = [{"notes": ["cell 3 was left out"]}, {"exercise": "91.mean", "verdict": "blocked", **told}]
    lines.append({"exercise": "91.double", "verdict": "passed", **told})
    two = replace(lesson, exercises=lesson.exercises[:2])
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    grade = classroom.grade_of(classroom.Submission("=ann", Path("ann.py")), two, text + '{"exercise', "")
    mean, double = (exercise.difficulty for exercise in two.exercises)
    assert (grade.points, grade.possible, grade.blocked) == (double, double, mean)
    classroom.write_tables(tmp_path, "<b>", [grade])
    table = (tmp_path / "grades.csv").read_text()
    assert "blocked" in table
    assert "'=ann" in table
    results = json.loads((tmp_path / "students" / "=ann.results.json").read_text())
    (test,) = results["tests"]
    assert test == {"name": "91.double", "score": double, "max_score": double, "output": "it needs a GPU"}
    assert results["output"] == "cell 3 was left out"
    page = (tmp_path / "students" / "=ann.html").read_text()
    for words in ("it needs a GPU", "cell 3 was left out", f"; {mean} more need a machine"):
        assert words in page
    assert "&lt;b&gt;" in (tmp_path / "grades.html").read_text()


def test_submissions_are_found_and_named(tmp_path):
    name = "91_trial"
    notebook = tmp_path / "class" / "ann" / "work" / name / f"{name}.ipynb"
    mine = tmp_path / "class" / "b ob" / "mine.ipynb"
    for path in (notebook, notebook.parent.parent / "START.ipynb", mine, mine.with_stem("GUIDES")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (tmp_path / "class" / "b ob" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "class" / "b ob" / ".ipynb_checkpoints" / "mine-checkpoint.ipynb").write_text("{}")
    (tmp_path / "class" / "eve").mkdir()
    (tmp_path / "class" / ".cache").mkdir()
    found = {one.student: one.path for one in classroom.find_submissions([tmp_path / "class"], name)}
    assert found == {"ann": notebook, "b_ob": mine, "eve": None}
    assert classroom.find_submissions([notebook], name)[0].student == "ann"
    both = [notebook, tmp_path / "class"]
    assert classroom.find_submissions(both, name)[0].problem.startswith("several files to grade (")
