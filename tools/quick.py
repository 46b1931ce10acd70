"""Run the gates, then the tests of what a change touches: those nearest to it in the import graph, for a minute.

    .venv/bin/python tools/quick.py          # everything since this branch left main, committed or not
    .venv/bin/python tools/quick.py HEAD~1   # since an earlier commit

A test file is near when it imports a changed module, less near when it imports a module that leads to one. It is a
first answer, not the last one: `make test` runs every test.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

import gates
import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("distlab", "simulator")
TESTS = ROOT / "tests"
ELSEWHERE = (TESTS / "architecture", TESTS / "browser")  # a gate; two minutes of a browser
MOST_FILES = 40
LIMIT_S = 50  # gates and the end of the last test come on top: 90 s in all
SIDE_BY_SIDE = ("--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder")


def changed_files(base: str | None) -> list[Path]:
    """Return the files that differ from the base, and those that git does not know yet."""
    if base is None:
        left = _git("merge-base", "HEAD", "main") or _git("merge-base", "HEAD", "origin/main")
        base = left[0] if left else "HEAD"
    names = {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}
    return [ROOT / name for name in sorted(names)]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def module_of(path: Path) -> str | None:
    """Return a file's module name, or None where it belongs to neither package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if path.suffix != ".py" or parts[0] not in PACKAGES:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Return every module that a file may import, wherever in it: `from a import b` names a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def near_tests(changed: Iterable[Path]) -> list[Path]:
    """Return the test files that the change reaches, the nearest first."""
    changed = set(changed)
    direct = {name for path in changed if (name := module_of(path)) is not None}
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    wide = set().union(*(graph.find_downstream_modules(name) for name in direct & graph.modules))
    direct |= {path.stem for path in changed if path.is_relative_to(TESTS)}  # what tests share
    found, rooms = {}, {path.parent.name for path in changed}
    for path in TESTS.rglob("test_*.py"):
        if not any(path.is_relative_to(folder) for folder in ELSEWHERE):
            imports = imports_of(path)
            near = bool(path in changed or path.parent / "conftest.py" in changed or imports & direct)
            if near or imports & wide:
                found[path] = not near, path.parent.name not in rooms, path
    return sorted(found, key=found.__getitem__)


def lessons_of(changed: Iterable[Path]) -> list[str]:
    """Return the numbers of the lessons whose files changed."""
    folders = {path.relative_to(ROOT).parts[1] for path in changed if path.is_relative_to(ROOT / "lessons")}
    return sorted(name[:2] for name in folders if name[:2].isdigit())


def run_tests(what: str, arguments: list[str], limit_s: float) -> bool:
    """Run tests until the limit; return whether those that ran passed."""
    print(f"{what}:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = [f"--junitxml={results}", "--session-timeout", f"{limit_s:g}", "-m", "not soak", *SIDE_BY_SIDE]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode in (0, 5):  # 5: none was chosen
            return True
        if not results.is_file():
            return False
        suites = ElementTree.parse(results).getroot().iter("testsuite")
        wrong = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    if not wrong:
        print(f"{limit_s:g} s are over, and no test failed; make test runs those that are left")
    return not wrong


def main() -> int:
    """Run the gates, and the tests of what has changed since the base named on the command line."""
    base = sys.argv[1] if len(sys.argv) > 1 else None
    sys.argv[1:] = []
    failed = gates.main()
    changed = [path for path in changed_files(base) if path.exists()]
    tests, lessons = near_tests(changed), lessons_of(changed)
    limit_s = LIMIT_S / max(1, bool(tests) + bool(lessons))
    if not tests and not lessons:
        print(f"no test is near the {len(changed)} changed files; make test runs them all")
    if tests:
        chosen = [str(path.relative_to(ROOT)) for path in tests[:MOST_FILES]]
        failed |= not run_tests(f"the {len(chosen)} nearest of {len(tests)} files of tests", chosen, limit_s)
    if lessons:
        names = " or ".join(f"{number}." for number in lessons)
        failed |= not run_tests(f"exercises of lessons {', '.join(lessons)}", ["tests/lessons", "-k", names], limit_s)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
