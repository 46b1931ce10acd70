"""The tests of each promise, as they are collected, can reach its bar: all tests of this run, soak among them."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROMISES = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())


@functools.cache
def tries_of(path):
    """Return how often a call of each test says that it tried; None where only a run can tell."""
    body = ast.parse(path.read_text()).body
    pairs = [(one.targets[0], one.value) for one in body if isinstance(one, ast.Assign) and len(one.targets) == 1]
    pairs = [(to.elts, value.elts) if isinstance(to, ast.Tuple) else ([to], [value]) for to, value in pairs]
    constants = {ast.unparse(to): value for tos, values in pairs for to, value in zip(tos, values, strict=False)}
    found = {}
    for function in body:
        if isinstance(function, ast.FunctionDef):
            calls = [one for one in ast.walk(function) if isinstance(one, ast.Call) and len(one.args) == 2]
            told = [one.args[1] for one in calls if ast.unparse(one.args[0]) == "'tried'"]
            told = [constants.get(ast.unparse(one), one) for one in told]
            tells = any(one.arg == "record_property" for one in function.args.args)
            known = all(isinstance(one, ast.Constant) for one in told) and bool(told) == tells
            found[function.name] = sum(one.value for one in told) or 1 if known else None
    return found


@pytest.mark.timeout(700)  # alone it collects them first: minutes on a busy machine
def test_what_is_collected_can_reach_each_bar(collected):
    """Where tests say a number: seven ways of 20 kills never make 160."""
    tests = [f"tests/{test}" for promise in PROMISES.values() for test in promise["tests"]]
    calls = Counter(name.partition("[")[0] for name in collected)
    if not all(any(is_of(one, test.removeprefix("tests/")) for one in calls) for test in tests):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", *tests]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert listed.returncode == 0, listed.stdout[-2000:] + listed.stderr[-2000:]
        calls = Counter(line.partition("[")[0] for line in listed.stdout.splitlines() if "::" in line)
    told = {}
    for name, promise in PROMISES.items():
        cases = {one: count for one, count in calls.items() for test in promise["tests"] if is_of(one, test)}
        known = [
            (count, tries_of(ROOT / one.partition("::")[0])[one.partition("::")[2]]) for one, count in cases.items()
        ]
        assert cases, name
        if all(tries is not None for _, tries in known):
            told[name] = sum(count * tries for count, tries in known)
    assert {"R1", "R2"} <= told.keys()
    for name, tries in told.items():
        assert tries >= PROMISES[name]["least"], f"{name}: {tries} tries at most, the bar is {PROMISES[name]['least']}"


def is_of(case, test):
    return case == f"tests/{test}" or case.startswith(f"tests/{test}::")
