"""A file that no longer fits in a head is split: 300 lines of code a file, 60 lines a function."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("distlab", "simulator", "benchmarks", "tools", "lessons")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_of(part: str) -> list[Path]:
    """Return the part's files of Python, without the lessons' prose, whose cells have their own limit."""
    return [path for path in sorted((ROOT / part).rglob("*.py")) if path.name not in ("lesson.py", "START.py")]


def lines_of_code(path: Path, nodes: list[ast.stmt]) -> int:
    """Count the lines that hold code: not those that are empty, comments or docstrings."""
    held = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = enumerate(path.read_text().splitlines(), start=1)
    return sum(bool(row.strip()) and not row.strip().startswith("#") and number not in held for number, row in rows)


@pytest.mark.parametrize("part", PARTS)
def test_files_are_small(statements, part):
    lines = {path: lines_of_code(path, statements(path)) for path in files_of(part)}
    assert sum(lines.values()) > 300, f"{part} has no files"
    wrong = [f"{path} has {n} lines of code; split it at a seam (limit 300)" for path, n in lines.items() if n > 300]
    assert not wrong, "\n".join(wrong)


def problems(node: Function) -> list[str]:
    """Return what is wrong with a function: its length, its parameters, an argument that it documents and lacks."""
    lines, doc = node.end_lineno - node.lineno + 1, ast.get_docstring(node) or ""
    found = [f"has {lines} lines (limit 60)"] * (lines > 60)
    every = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    total = len([name for name in every if name not in ("self", "cls")])
    if not node.name.startswith("_"):
        found += [f"has {total} parameters (limit 7): group them in a record"] * (total > 7)
    if "\nArgs:\n" in doc:
        entries = re.findall(r"^    (?! )\**([^:(]*)", doc.split("\nArgs:\n")[1].split("\n\n")[0], re.MULTILINE)
        unknown = {*entries} - {*every, *(a.arg for a in (node.args.vararg, node.args.kwarg) if a)}
        found += [f"documents {sorted(unknown)}, which it does not take"] * bool(unknown)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_functions_are_small_and_have_the_arguments_that_they_document(statements, part):
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {problem}"
        for path in files_of(part)
        for node in statements(path)
        if isinstance(node, Function)
        for problem in problems(node)
    ]
    assert not wrong, "\n".join(wrong)
