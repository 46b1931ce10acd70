"""Change one place of the library at a time and see whether the tests nearest to it notice: `make mutations`.

    python tests/mutation/library.py            # go on with the baseline until every mutation of it has been run
    python tests/mutation/library.py --again    # whether the tree of today notices what the baseline's tests noticed

`baseline.json` names a commit and holds mutations that were drawn from it by a seed. Each is kept as a function's name,
the text of one statement (or of the expression after if, while, for and with) and what replaces it, so that it is found
again where files have moved. It is run in a copy of the tree. `by` says what noticed it: a test, or "time", "import",
"end of the process"; "" stands for one that survived, and null for one that was not run yet. With --again, one that was
noticed and now survives is a failure; one whose text has gone is listed for a person to check.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import psutil
from generate import SEED, Mutation, changed_source, draw, find

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
EACH = 25
FILES = 4  # test files that are near
ELSEWHERE = ("architecture", "browser", "lessons", "mutation", "styles")
TEST_S, LIMIT_S = 60, 600  # for one test, and for a mutation's: only a hang reaches them
PACKAGES = {  # precision and large_batch share a row: together they are as long as the next small one
    **{name: (f"distlab/{name}",) for name in ("collectives", "data_parallel", "compression", "sharding")},
    **{name: (f"distlab/{name}",) for name in ("tensor_parallel", "pipeline", "context_parallel", "expert_parallel")},
    "precision and large_batch": ("distlab/precision", "distlab/large_batch"),
    **{name: (f"distlab/{name}",) for name in ("hybrid", "comm", "plan/schedules", "grading", "measure")},
    **{name: (name,) for name in ("simulator/engine", "simulator/memory")},
}


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


def take(commit: str | None, place: Path) -> Path:
    """Put the files of a commit in a folder, or those of the working tree as they are."""
    place.mkdir()
    if commit:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(place)], input=packed, check=True)
        return place
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


def load() -> dict[str, Any]:
    """Read the baseline, or begin one at the commit of now."""
    if BASELINE.exists():
        return dict(json.loads(BASELINE.read_text(encoding="utf-8")))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as place:
        tree = take(commit.stdout.strip(), Path(place) / "tree")
        drawn = {name: draw(tree, folders, name, EACH) for name, folders in PACKAGES.items()}
    import torch

    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": SEED,
        "packages": {name: [asdict(one) | {"by": None} for one in rows] for name, rows in drawn.items()},
    }


def save(record: dict[str, Any]) -> None:
    """Write the baseline, a mutation a line."""
    head = {key: value for key, value in record.items() if key != "packages"}
    rows = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in mutations) + "\n]"
        for name, mutations in record["packages"].items()
    ]
    text = json.dumps(head, indent=1)[:-2] + ',\n "packages": {\n' + ",\n".join(rows) + "\n}}\n"
    BASELINE.with_suffix(".new").write_text(text, encoding="utf-8")
    BASELINE.with_suffix(".new").replace(BASELINE)


def run(record: dict[str, Any], again: bool, workers: int, most: int) -> list[str]:
    """Run what is to be run; return a line for each change that was noticed once and now is not."""
    rounds = [rows[k] for k in range(min(EACH, most)) for rows in record["packages"].values() if k < len(rows)]
    lost: list[str] = []
    with tempfile.TemporaryDirectory(prefix="m") as place, Pool(workers) as pool:
        tree = take(None if again else record["commit"], Path(place) / "tree")
        near, rows, jobs = Near(tree), [], []
        for row in rounds:
            mutation = Mutation(**{key: row[key] for key in ("module", "function", "text", "nth", "new")})
            if bool(row["by"]) is not again or (not again and row["by"] is not None):
                continue
            if found := find(tree, mutation):
                files = near.files(found[0], mutation.function)
                tests = [
                    path.relative_to(tree).as_posix()
                    for path in dict.fromkeys([*near.with_test(row["by"] or ""), *files])
                ]
                rows.append(row)
                jobs.append((tree, mutation, tests))
            else:
                print(f"gone: {row['module']} {row['function']}: {row['text']!r} (was noticed by {row['by']})")
        for row, (by, took_s) in zip(rows, pool.imap(trial, jobs), strict=True):
            where = f"{row['module']} {row['function']}"
            print(f"{took_s:5.1f} s  {where}: {by or 'survived'}", flush=True)
            if again and not by:
                lost.append(f"{where}: {row['text']} -> {row['new']} (by {row['by']})")
            elif not again:
                row["by"] = by
                save(record)
    return lost


def main() -> int:
    """Go on with the baseline, or compare with it; print what each package's tests noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run what was noticed once, on the tree of now")
    parser.add_argument("--workers", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--most", type=int, default=EACH, help="run only the first so many of each package")
    given = parser.parse_args()
    record = load()
    lost = run(record, given.again, given.workers, given.most)
    for name, rows in record["packages"].items():
        done = [row["by"] for row in rows if row["by"] is not None]
        print(f"{name}: {sum(map(bool, done))} of {len(done)} noticed, {len(rows) - len(done)} not run yet")
    print("".join(f"LOST: {line}\n" for line in lost), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
