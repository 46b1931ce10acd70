"""A file that no longer fits in a head is split: 300 lines a file, 60 a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for part in ("distlab", "simulator", "benchmarks", "tools", "lessons")
    for path in (ROOT / part).rglob("*.py")
    if path.name not in ("lesson.py", "START.py")  # prose, whose cells have their own limit
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_functions_are_small(path):
    text = path.read_text()
    assert text.count("\n") <= 300, f"{path} has {text.count(chr(10))} lines; split it at a seam (limit 300)"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{path}:{node.lineno} {node.name} has {lines} lines (limit 60)"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_at_most_seven_parameters_and_two_by_position(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
        total = len(positional) + len(node.args.kwonlyargs)
        assert total <= 7, f"{path}:{node.lineno} {node.name} has {total} parameters (limit 7): group them in a record"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_arguments_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node) or ""
        if "\nArgs:\n" not in doc:
            continue
        section = doc.split("\nArgs:\n")[1].split("\n\n")[0]
        entries = [line for line in section.splitlines() if line.startswith("    ") and not line.startswith("     ")]
        named = {entry.split(":")[0].split("(")[0].strip().lstrip("*") for entry in entries}
        every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        known = {a.arg for a in every} | {a.arg for a in (node.args.vararg, node.args.kwarg) if a}
        assert named <= known, (
            f"{path}:{node.lineno} {node.name} documents {sorted(named - known)}, which it does not take"
        )
