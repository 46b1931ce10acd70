"""Change one place of the library at a time and see whether the tests nearest to it notice: `make mutations`.

`baseline.json` names a commit and holds mutations that were drawn from it by a seed. Each is kept as a function's name,
the text of one statement (or of the expression after if, while, for and with) and what replaces it, so that it is found
again where files have moved. It is run in a copy of the tree. `by` says what noticed it then: a test, or "time",
"import", "end of the process"; "" stands for one that survived. One that was noticed and now survives is a failure; one
whose text has gone is listed for a person to check.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import psutil
from generate import Mutation, changed_source, find

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
EACH = 25
FILES = 4  # test files that are near
ELSEWHERE = ("architecture", "browser", "lessons", "mutation", "styles")
TEST_S, LIMIT_S = 60, 600  # for one test, and for a mutation's: only a hang reaches them


class Near:
    """The test files of a tree, and how many imports lie between each and a module."""

    def __init__(self, root: Path) -> None:
        self.root, self.faces = root, {}
        inner = [path for package in ("distlab", "simulator") for path in (root / package).rglob("*.py")]
        helpers = {path.stem: path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_")}
        self.paths = {".".join(_dotted(path.relative_to(root))): path for path in inner} | helpers
        self.tests = sorted(path for path in (root / "tests").rglob("test_*.py") if path.parts[-2] not in ELSEWHERE)
        files = {**self.paths, **{str(path): path for path in self.tests}}
        asked = {name: list(_imports(path)) for name, path in files.items()}
        self.faces = {(name, what): module for name in asked for module, what in asked[name]}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for name, pairs in asked.items():
            for module, what in pairs:
                self.importers[self._home(module, what)].add(name)

    def _home(self, module: str, what: str) -> str:
        """Return the module that defines a name, through the faces of packages."""
        for _ in range(5):
            if f"{module}.{what}" in self.paths:
                return f"{module}.{what}"
            if (further := self.faces.get((module, what), module)) == module:
                break
            module = further
        return module

    def files(self, path: Path, function: str) -> list[Path]:
        """Return the nearest test files of a function, nearest first."""
        distance = {name: 0 for name, at in self.paths.items() if at == path}
        reached = list(distance)
        for module in reached:  # grows while it is read
            for importer in sorted(self.importers[module] - set(distance)):
                distance[importer] = distance[module] + 1
                reached.append(importer)
        words = {*path.stem.split("_"), *function.lower().replace(".", "_").split("_")} - {"", "test"}
        names = {part for part in function.split(".") if not part.startswith("_")}

        def rank(test: Path) -> tuple[float, Path]:
            text = test.read_text(encoding="utf-8")
            far = distance.get(str(test), 9) + 4 * (test.parent.name not in path.parts)
            same = bool(words & set(test.stem.split("_")))
            near = 2 * any(name in text for name in names) + same
            return far - near, test

        return sorted(self.tests, key=rank)[:FILES]

    def with_test(self, killer: str) -> list[Path]:
        """Return the file that holds an earlier killer, wherever it stands now."""
        wanted = f"def {killer.split('::')[-1].split('[')[0]}(" if "::" in killer else None
        return [test for test in self.tests if wanted and wanted in test.read_text(encoding="utf-8")][:1]


def _dotted(path: Path) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def take(place: Path) -> Path:
    """Put the files of the working tree in a folder."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def trial(job: tuple[Path, Mutation, list[str]]) -> tuple[str, float]:
    """Make the change in this process's copy of the tree, run tests, take it back; return what noticed it, and seconds.

    What the tests' processes leave comes to this process, which ends it.
    """
    ctypes.CDLL(None).prctl(36, 1)
    tree, mutation, tests = job
    copy = tree.parent / str(os.getpid())
    if not copy.exists():
        shutil.copytree(tree, copy)
    path, place = find(copy, mutation) or (copy, None)
    assert place is not None
    before, start = path.read_text(encoding="utf-8"), time.monotonic()
    try:
        path.write_text(changed_source(before, place, mutation.new), encoding="utf-8")
        return noticed(copy, tests), time.monotonic() - start
    finally:
        path.write_text(before, encoding="utf-8")
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left)


def noticed(copy: Path, tests: list[str]) -> str:
    """Run tests in a copy of the tree; return the first that fails, how else they ended, or ""."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-m", "not soak", "--tb=no", "-rfE"]
    command += ["-p", "no:cacheprovider", f"--timeout={TEST_S}", *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        return "time"
    if failed := re.search(r"^(FAILED|ERROR) (\S+)", said, re.MULTILINE):
        return failed[2] if failed[1] == "FAILED" else "import"
    return "" if process.returncode in (0, 5) else "end of the process"


def run(packages: dict[str, Any], workers: int, most: int) -> list[str]:
    """Run what was noticed once; return a line for each change that now is not."""
    rounds = [rows[k] for k in range(min(EACH, most)) for rows in packages.values() if rows[k]["by"]]
    lost: list[str] = []
    with tempfile.TemporaryDirectory(prefix="m") as place, Pool(workers) as pool:
        tree = take(Path(place) / "tree")
        near, rows, jobs = Near(tree), [], []
        for row in rounds:
            mutation = Mutation(**{key: row[key] for key in ("module", "function", "text", "nth", "new")})
            if found := find(tree, mutation):
                tests = dict.fromkeys([*near.with_test(row["by"]), *near.files(found[0], mutation.function)])
                rows.append(row)
                jobs.append((tree, mutation, [path.relative_to(tree).as_posix() for path in tests]))
            else:
                print(f"gone: {row['module']} {row['function']}: {row['text']!r} (was noticed by {row['by']})")
        for row, (by, took_s) in zip(rows, pool.imap(trial, jobs), strict=True):
            where = f"{row['module']} {row['function']}"
            print(f"{took_s:5.1f} s  {where}: {by or 'survived'}", flush=True)
            if not by:
                lost.append(f"{where}: {row['text']} -> {row['new']} (by {row['by']})")
    return lost


def main() -> int:
    """Compare with the baseline; print what each package's tests noticed then, and what is not noticed any more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--most", type=int, default=EACH, help="run only the first so many of each package")
    given = parser.parse_args()
    packages = json.loads(BASELINE.read_text(encoding="utf-8"))["packages"]
    lost = run(packages, given.workers, given.most)
    for name, rows in packages.items():
        print(f"{name}: {sum(bool(row['by']) for row in rows)} of {len(rows)} were noticed")
    print("".join(f"LOST: {line}\n" for line in lost), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
