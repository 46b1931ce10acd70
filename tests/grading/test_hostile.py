"""Every answer that tries to fool, to read or to end the check gets a verdict, never "passed", and words for it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest

from distlab.cli import main
from distlab.grading import Exercise
from distlab.grading.check import examine
from distlab.grading.variation.draw import Draw, Vary

TIMEOUT_S = 4.0
QUICK = (  # in every run of the tests: one of each kind, and what was let pass once
    *("a loader", "linecache", "os.open in a folder", "a notebook", "answers in tests", "subprocess", "a helper"),
    *("logging's frame", "locals in a traceback", "results", "code", "a code's name", "from its seed", "SystemExit"),
)
CASES = {
    **{name: (line, hostile.OPENED) for name, line in hostile.READS.items()},
    **{name: (line, "it starts a process|it sends a signal") for name, line in hostile.STARTS.items()},
    **{name: (line, hostile.LOOKED) for name, line in hostile.LOOKS.items()},
    **hostile.TAMPERS,
    **hostile.ENDS,
    **hostile.CLAIMS,
    **{name: (line, hostile.OUTSIDE) for name, line in hostile.WAYS.items()},
    **hostile.MORE,
}


@pytest.fixture(scope="module")
def exercise(mean_exercise: Exercise) -> Exercise:
    """The mean over ranks, with drawn calls."""

    def draw(one: Draw) -> tuple[Any, ...]:
        return (one.tensor(*one.shape(1), dtype=one.dtype("float64", "float32")),)

    return replace(mean_exercise, vary=Vary(draw), timeout_s=TIMEOUT_S)


def file_with(folder: Path, line: str) -> Path:
    path = folder / "checks" / "answers.py"  # no name of a folder or a file makes it the check's own
    path.parent.mkdir()
    path.write_text(f"{hostile.HEAD}\ndef answer(tensor):\n    {line}\n    return torch.zeros_like(tensor)\n")
    return path


@pytest.mark.soak_where(name=set(CASES) - set(QUICK))  # half a second to four each
@pytest.mark.parametrize("name", CASES)
def test_it_is_rejected_in_words_that_say_what_was_seen(exercise: Exercise, tmp_path: Path, name: str) -> None:
    line, says = CASES[name]
    path, space = file_with(tmp_path, line), {"__name__": "answers"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    began = time.monotonic()
    report = examine(exercise, space["answer"], worlds=(2,), seed=1)
    assert report.verdict == "wrong", str(report)
    assert re.search(says, report.message, re.DOTALL), report.message
    assert time.monotonic() - began < 60


def test_there_are_many() -> None:
    groups = (hostile.READS, hostile.STARTS, hostile.LOOKS, hostile.TAMPERS, hostile.ENDS, hostile.CLAIMS, hostile.WAYS)
    assert len(CASES) == sum(map(len, groups)) + len(hostile.MORE) >= 130  # no name twice
    assert set(QUICK) <= set(CASES)


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "print('passed')"])
def test_the_command_says_so_by_its_status(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.py"
    path.write_text(f"def average_flat(module):\n    {line}\n")
    assert main(["check", "03.flat", "--impl", str(path)]) == 1
    assert "0 of 1 exercises right" in capsys.readouterr().out
