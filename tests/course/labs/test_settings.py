"""Flags from a dataclass: types, limits, help, and one line for a mistake."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import nbformat
import pytest
from lab_on_ranks import KEPT

from distlab.cli.course import find_lab, load_settings, read_flags
from distlab.course.grading import load_lesson
from distlab.course.grading.progress import MARKER, change_entry, now
from distlab.course.lab import CommonSettings, flag
from distlab.course.lab.settings import parse, parser_of, what_is_run


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Measure something.

    Attributes:
        sizes: bytes of
            the messages.
        rate: a share of the whole, 100 %.
        kind: which one.
        file: what to read.
        quick: do less.
    """

    sizes: tuple[int, ...] = flag((8, 1024), least=1, size=True)
    rate: float = flag(0.5, least=0, most=1)
    kind: Literal["one", "other"] = "one"
    file: Path | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        if len(self.sizes) < 2:
            raise ValueError(f"--sizes has {len(self.sizes)} sizes; pass two or more")


def test_every_type_is_read():
    line = "--sizes 1,4KiB,1.5MB,2GiB --rate 1 --kind other --file a/b.txt --quick --impl x.ipynb --trace out"
    settings = parse(Settings, line.split(), "lab")
    assert settings.sizes == (1, 4096, 1_500_000, 2 << 30)
    assert (settings.rate, settings.kind, settings.file, settings.quick) == (1.0, "other", Path("a/b.txt"), True)
    assert (settings.impl, settings.trace, settings.device, settings.limit_s) == ("x.ipynb", Path("out"), "auto", 300.0)
    assert parse(Settings, [], "lab") == Settings()
    assert what_is_run(Settings()) == what_is_run(Settings(impl="a.py", trace=Path("b"), json=True, device="cpu"))
    assert what_is_run(Settings()) != what_is_run(Settings(rate=0.25)), "of what changes a number"


def test_a_mistake_is_one_line_and_exit_status_2_and_the_help_is_the_docstring(capsys):
    for line, message in KEPT["mistakes"].items():
        with pytest.raises(SystemExit) as left:
            parse(Settings, line.split(), "lab 03")
        told = capsys.readouterr().err
        assert (left.value.code, told.count("\n"), told[:8]) == (2, 1, "lab 03: ")
        assert message in told
    with pytest.raises(SystemExit):
        parse(Settings, ["--help"], "lab")
    told = " ".join(capsys.readouterr().out.split())
    for words in ("Measure something.", "bytes of the messages (default 8,1024)", "folder for each rank's trace"):
        assert words in told
    assert "a share of the whole, 100 % (default 0.5)" in told


def test_your_own_answers_that_have_not_passed_are_told(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "01_ranks_and_messages"
    folder.mkdir()
    (tmp_path / MARKER).touch()
    script = find_lab("01")[1]
    nbformat.write(nbformat.v4.new_notebook(), folder / "01_ranks_and_messages.ipynb")
    monkeypatch.chdir(folder)
    exercises = [exercise.name for exercise in load_lesson("01").exercises]
    left = "not passed yet: 01.ping_pong, 01.fit, 01.gather, 01.repair. "
    for names, told in ((["01.shift"], left), (exercises, "")):
        for name in names:
            change_entry(name, lambda entry: replace(entry, attempts=1, first_passed=now()), folder)
        num_ranks, settings, given = read_flags("01", script, ["--ranks", "2", "--impl", "mine", "--laps", "3"])
        assert (num_ranks, settings.laps, given) == (2, 3, ["--impl", "mine", "--laps", "3"])
        said = capsys.readouterr().err
        assert (told in said, "distlab check 01" in said) == (True, bool(told))
        assert "01.shift" not in said


def test_each_lab_has_few_settings_and_explains_each():
    for number in ("01", "03", "09"):
        settings = load_settings(*find_lab(number))
        assert len(fields(settings)) - len(fields(CommonSettings)) <= 7
        told = {one.dest for one in parser_of(settings, "lab")._actions if one.help and one.help[:9] != " (default"}
        assert {entry.name for entry in fields(settings)} <= told
        assert parse(settings, [], "lab") == settings()
