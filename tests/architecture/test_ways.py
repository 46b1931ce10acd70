"""CONTRIBUTING's ways through the code: at most five files each, and the imports lead from each to the next."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 5


def documented_ways() -> dict[str, list[tuple[str, str | None]]]:
    """Return the files of each way, with the module in brackets where the next file is met."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## Three ways through the code\n")[1].split("\n## ")[0]
    ways = {}
    for part in section.split("### ")[1:]:
        steps = re.findall(r"^\d\. `([\w/.]+\.py)`(?: \[`([\w.]+)`\])?:", part, re.M)
        ways[part.splitlines()[0]] = [(file, meeting or None) for file, meeting in steps]
    return ways


def path_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(path: Path) -> set[Path]:
    """Return the files that a file imports; a name taken from a package's face also leads to the file it comes from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("distlab", "simulator"):
            for alias in node.names:
                found |= sources(path_of(node.module), alias.name)
    return found


def sources(file: Path, name: str) -> set[Path]:
    """Return the files through which a name is reached: the one it is taken from and, if that is a face, further."""
    found = {file}
    if file.name == "__init__.py":
        submodule = file.parent / f"{name}.py"
        if submodule.exists():
            found.add(submodule)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
                found |= sources(path_of(node.module), name)
    return found


def test_there_are_three_ways():
    assert list(documented_ways()) == ["A gradient to the wire", "A plan to its picture", "An answer to its verdict"]


@pytest.mark.parametrize("way", documented_ways())
def test_each_file_leads_to_the_next(way):
    steps = documented_ways()[way]
    assert 2 <= len(steps) <= MAX_FILES, f"{way!r} has {len(steps)} files; at most {MAX_FILES}"
    for (one, meeting), (other, _) in pairwise(steps):
        first, second = ROOT / one, ROOT / other
        assert first.is_file(), f"{way!r} names {one}, which does not exist"
        assert second.is_file(), f"{way!r} names {other}, which does not exist"
        if meeting is not None:
            place = path_of(meeting)
            assert place in imported(first), f"{one} no longer uses {meeting}"
            assert place in imported(second), f"{other} no longer uses {meeting}"
        else:
            linked = second in imported(first) or first in imported(second)
            assert linked, f"{way!r}: neither {one} nor {other} imports the other; correct CONTRIBUTING.md or the code"


def test_each_plain_file_is_shown_in_a_lesson():
    shown = set().union(*(imported(path) for path in ROOT.glob("lessons/*/lesson.py")))
    plain = {path for path in ROOT.glob("distlab/*/plain.py") if path.parent.name != "comm"}  # that one reads pickles
    assert len(plain) > 7
    assert not plain - shown
