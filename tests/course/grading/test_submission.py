"""Answers of a whole lesson come from a module, a file or a notebook, whatever state that is in."""

import json
from datetime import datetime

import pytest
from trial_answers import GOOD

from distlab.cli import main
from distlab.course.grading import load_submission
from distlab.course.grading.answer.source import read_source
from distlab.course.grading.answer.submission import isolated_submission
from distlab.course.grading.progress import MARKER, record_of

NO_ALL_REDUCE = GOOD.replace("    dist.all_reduce(total)\n", "")


@pytest.fixture
def folder(tmp_path, lesson, monkeypatch):
    (tmp_path / "lessons").symlink_to(lesson.folder.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def notebook(path, *cells):
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    text = {"cell_type": "markdown", "source": ["# Title", "def mean(): this is text"]}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [text, *code]}))
    return str(path)


def run(capsys, *arguments):
    code = main(["check", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("kind", ["reference", "file", "package", "notebook"])
def test_answers_from_everywhere(folder, capsys, kind):
    (folder / "answers_of_mine.py").write_text(GOOD)
    package = folder / "package_of_mine" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "answers.py").write_text("from . import __name__ as own\n" + GOOD)
    impl = {
        "reference": "reference",
        "file": "answers_of_mine.py",
        "package": "package_of_mine.inner.answers",
        "notebook": notebook(folder / "a.ipynb", "%load_ext distlab.course.notebook", *GOOD.split("\n\n")),
    }[kind]
    code, out, err = run(capsys, "91", "--impl", impl)
    assert (code, err) == (0, "")
    assert out.count("Correct.") == 3
    assert "3 of 3 exercises right." in out


def test_one_exercise_and_json(folder, capsys):
    (folder / "answers.py").write_text(NO_ALL_REDUCE)
    code, out, _ = run(capsys, "91.mean", "--impl", "answers.py", "--json")
    assert code == 1
    data = json.loads(out)
    assert (data["lesson"], data["passed"], data["total"]) == ("91", 0, 1)
    assert data["reports"][0]["fault"] == "not communicated"
    assert run(capsys, "91", "--exercise", "double", "--impl", "answers.py")[0] == 0
    cell = "def mean(tensor):\n    total = tensor.clone()\n    return total.no_such_thing()\n"
    code, out, _ = run(capsys, "91.mean", "--impl", notebook(folder / "mine.ipynb", "x = 1", cell))
    assert code == 1
    assert "AttributeError: 'Tensor' object has no attribute 'no_such_thing'" in out
    assert "at mine.ipynb, code cell 2, line 3, in mean: return total.no_such_thing()" in out


def test_notebook_runs_what_the_functions_need_and_nothing_else(folder, lesson):
    impl = notebook(
        folder / "a.ipynb",
        "%matplotlib inline\nimport math\nimport no_such_package_at_all as unused",
        "%%ranks 4\nraise RuntimeError('not for here')",
        "FACTOR = 2\nTABLE = {'a': [1, -2]}\nopened = open('/no/such/file')\nraise SystemExit(5)",
        "files = !ls\nprint?\n!rm -rf everything\n"
        "def double(values, *, times=FACTOR):\n    return [times * v for v in values]",
        "def mean(tensor:\n    broken",
        "mean = check('91.mean', mean).function",
    )
    functions, notes = isolated_submission(impl, lesson)
    assert any("code cell 5 has" in note and "syntax error in its line 1" in note for note in notes)
    assert len(notes) == 1, "what no function needs is not run"
    assert functions["91.double"]([1.0]) == [2.0]
    assert "has no function mean" in functions["91.mean"].fault.message
    assert "syntax error" in functions["91.mean"].fault.message
    loaded = load_submission(impl, lesson)
    assert (set(loaded), loaded["91.double"]([3.0], times=3)) == ({"91.double"}, [9.0])


def test_what_a_notebook_lacks_is_told(folder, capsys):
    stub = "def double(values, *, times=2):\n    raise NotYet('91.double')\n"
    code, out, _ = run(capsys, "91", "--impl", notebook(folder / "a.ipynb", stub, "mean = 3"))
    assert code == 1
    assert "91.double is yours to write" in out
    assert "got a int" in out
    code, out, _ = run(capsys, "91.mean", "--impl", notebook(folder / "a.ipynb", "x = 1"))
    assert code == 1
    assert "Not yet attempted. the notebook has no function mean (exercise 91.mean); `distlab lesson reset 91`" in out


DAMAGED = [
    ("gone.ipynb", None, "there is no file gone.ipynb"),
    ("gone.py", None, "there is no file gone.py"),
    ("no_such_module", None, "there is no module no_such_module"),
    ("not a module", None, "there is no module"),
    ("empty.ipynb", b"  \n", "empty.ipynb is empty"),
    ("half.ipynb", b'{"cells": [', "is not a notebook, or it is damaged"),
    ("list.ipynb", b"[]", "is not a notebook, or it is damaged"),
    ("cells.ipynb", b'{"cells": [3]}', "is not a notebook, or it is damaged"),
    ("kind.ipynb", b'{"cells": [{"cell_type": "code"}]}', "is not a notebook, or it is damaged"),
    ("bytes.ipynb", b"\xff\xfe\x00", "cannot be read"),
    ("text.txt", b"hello", "neither a .py file nor a notebook"),
    ("syntax.py", b"x = 1\ndef mean(:", "syntax.py, line 2: "),
    ("null.py", b"x = 1\x00", "null.py"),
    ("deep.ipynb", b"[" * 100_000, "deep.ipynb is not a notebook, or it is damaged (RecursionError"),
]


def test_what_cannot_be_read_is_one_line(folder, capsys):
    for name, data, says in DAMAGED:
        if data is not None:
            (folder / name).write_bytes(data)
        code, out, err = run(capsys, "91", "--impl", name)
        assert (code, out) == (2, ""), name
        assert says in err
        assert len(err.splitlines()) == 1
    for arguments, says in MISTAKES.items():
        code, out, err = run(capsys, *arguments.split())
        assert (code, out) == (2, "")
        assert says in err


MISTAKES = {
    "17": "there is no lesson 17; lessons are 91",
    "x": "names no lesson",
    "91 --exercise nothing": "lesson 91 has no exercise '91.nothing'; it has",
    "91 --exercise 03.flat": "exercise 03.flat is not of lesson 91",
}
BAD_AT_LOADING = {
    "hangs": ("while True:\n    pass\n", "was still busy after"),
    "exits": ("import sys\nsys.exit(3)\n", "exited with status 3"),
    "is killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "sends signal 9 to process"),
    "starts a process": ("import os\nos.system('true')\n", "starts a process"),
    "needs what is missing": ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
}


@pytest.mark.parametrize("how", BAD_AT_LOADING)
def test_a_file_that_misbehaves_while_it_is_loaded(folder, capsys, monkeypatch, how):
    text, says = BAD_AT_LOADING[how]
    if "busy" in says:
        monkeypatch.setattr("distlab.course.grading.answer.submission.LOAD_TIMEOUT_S", 3.0)
    (folder / "answers.py").write_text(text + GOOD)
    code, out, _ = run(capsys, "91", "--impl", "answers.py")
    assert (code, out.count("answers.py cannot be loaded: ")) == (1, 1)
    assert says in out
    assert out.count("Wrong, as above.") == 2


def test_default_is_the_working_copy_and_progress_is_kept(folder, capsys):
    code, _, err = run(capsys, "91")
    assert code == 2
    assert "there is no working copy of lesson 91 yet: `distlab lesson start` makes one" in err
    copy = folder / "work" / "91_trial"
    copy.mkdir(parents=True)
    (folder / "work" / MARKER).touch()
    notebook(copy / "91_trial.ipynb", *GOOD.split("\n\n"))
    code, out, _ = run(capsys, "91.double", "--impl", "mine")
    assert (code, "91_trial.ipynb" in out) == (0, True)
    saved = datetime.fromtimestamp((copy / "91_trial.ipynb").stat().st_mtime)
    assert f"91_trial.ipynb, saved at {saved:%H:%M:%S} (save again to check what you see now)" in out
    code, out, _ = run(capsys, "91.double")
    assert (code, "1 of 1 exercises right." in out) == (0, True)
    assert record_of(copy).exercises["91.double"].passed
    assert "not kept" not in out
    assert "not kept" not in run(capsys, "91.double", "--impl", "work/91_trial/91_trial.ipynb")[1]


def test_a_folder_is_no_answer(folder):
    for name in ("a.ipynb", "91_trial"):
        (folder / name).mkdir()
        with pytest.raises(ValueError, match=rf"{name} is a folder; pass .* such as {name}/{name}.ipynb"):
            read_source(name)


def test_reading_executes_nothing(folder):
    text = "raise RuntimeError('executed')\n"
    package = folder / "package_that_runs"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    (package / "answers.py").write_text(text)
    (folder / "a.py").write_text(text)
    assert [read_source(impl).kind for impl in ("package_that_runs.answers", "a.py")] == ["module", "file"]


def test_loading_in_this_process_tells_what_went_wrong(folder, lesson):
    (folder / "a.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ValueError, match=r"a.py cannot be loaded: .*a.py, line 2: SystemExit: 3"):
        load_submission("a.py", lesson)
    assert set(load_submission("reference", lesson)) == {"91.mean", "91.double", "91.repair"}
