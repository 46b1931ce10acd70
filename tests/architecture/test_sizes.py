"""A file that no longer fits in a head is split: 300 lines of code a file, 60 lines a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("distlab", "simulator", "benchmarks", "tools", "lessons")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_of(part: str) -> list[Path]:
    """Return the part's files of Python, without the lessons' prose, whose cells have their own limit."""
    return [path for path in sorted((ROOT / part).rglob("*.py")) if path.name not in ("lesson.py", "START.py")]


def lines_of_code(path: Path) -> int:
    """Count the lines that hold code: not those that are empty, comments or docstrings."""
    text = path.read_text()
    held = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = enumerate(text.splitlines(), start=1)
    return sum(bool(row.strip()) and not row.strip().startswith("#") and number not in held for number, row in rows)


@pytest.fixture
def functions_of(statements):
    """Make `functions_of(part)` return each function of the part, after the file and line where it stands."""
    return lambda part: [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
        for path in files_of(part)
        for node in statements(path)
        if isinstance(node, Function)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_files_are_small(part):
    lines = {path: lines_of_code(path) for path in files_of(part)}
    assert sum(lines.values()) > 300, f"{part} has no files"
    wrong = [f"{path} has {n} lines of code; split it at a seam (limit 300)" for path, n in lines.items() if n > 300]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", PARTS)
def test_functions_are_small(functions_of, part):
    lines = {place: node.end_lineno - node.lineno + 1 for place, node in functions_of(part)}
    wrong = [f"{place} has {number} lines (limit 60)" for place, number in lines.items() if number > 60]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", PARTS)
def test_at_most_seven_parameters(functions_of, part):
    wrong = []
    for place, node in functions_of(part):
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        total = len(positional) + len(node.args.kwonlyargs)
        if total > 7 and not node.name.startswith("_"):
            wrong.append(f"{place} has {total} parameters (limit 7): group them in a record")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", PARTS)
def test_documented_arguments_exist(functions_of, part):
    wrong = []
    for place, node in functions_of(part):
        doc = ast.get_docstring(node) or ""
        if "\nArgs:\n" not in doc:
            continue
        section = doc.split("\nArgs:\n")[1].split("\n\n")[0]
        entries = [line for line in section.splitlines() if line.startswith("    ") and not line.startswith("     ")]
        named = {entry.split(":")[0].split("(")[0].strip().lstrip("*") for entry in entries}
        every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        known = {a.arg for a in every} | {a.arg for a in (node.args.vararg, node.args.kwarg) if a}
        if not named <= known:
            wrong.append(f"{place} documents {sorted(named - known)}, which it does not take")
    assert not wrong, "\n".join(wrong)
