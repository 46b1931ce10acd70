"""Change one place of the library at a time and see whether the tests nearest to it notice: `make mutations`.

    python tests/mutation/library.py            # go on with the baseline until every mutation of it has been run
    python tests/mutation/library.py --doubtful # first forget what survived or was noticed by time: on a quiet machine
    python tests/mutation/library.py --again    # whether the tree of today notices what the baseline's tests noticed

`baseline.json` names a commit and holds mutations that were drawn from it by a seed. Each is kept as a function's name,
the text of one statement (or of the expression after if, while, for and with) and what replaces it, so that it is found
again where files have moved. It is run in a copy of the tree, in a process group of its own, with limits of time and
memory. `by` says what noticed it: a test, or "time", "import", "end of the process"; "" stands for one that survived,
and null for one that was not run yet. With --again, one that was noticed and now survives is a failure; one whose text
has gone is listed for a person to check.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from changes import SEED, Mutation, draw, find
from trials import FILE_S, Worker

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
EACH = 25
FILES = 6  # test files that are near
ELSEWHERE = ("architecture", "browser", "lessons", "mutation", "styles")
BUDGET_S, LONGEST_S = 10.0, 6.0  # for a mutation's tests, and for one of them
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

    def files(self, path: Path, function: str, killer: str = "") -> list[Path]:
        """Return the nearest test files of a function, nearest first, and before them that of an earlier killer."""
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

        wanted = f"def {killer.split('::')[-1].split('[')[0]}(" if "::" in killer else None
        first = [test for test in self.tests if wanted and wanted in test.read_text(encoding="utf-8")]
        return list(dict.fromkeys([*first[:1], *sorted(self.tests, key=rank)]))[:FILES]


def _dotted(path: Path) -> tuple[str, ...]:
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def clean_times(workers: list[Worker], files: Iterable[Path], kept: Path) -> dict[str, float]:
    """Return how long each test takes that passes on the tree as it is; files of one folder run in one process.

    They are kept in a file, so that a run that goes on does not measure once more.
    """
    times: dict[str, float] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    files = set(files) - {Path(name.split("::")[0]) for name in times}
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(set(files)):
        if len(folders[path.parent]) >= FILES:
            folders[path] = folders.pop(path.parent)  # a full one gets a name of its own
        folders[path.parent].append(path)

    def measure(worker: Worker, together: list[Path]) -> None:
        rows = worker.ask(together, [], 60 + 4 * FILE_S * len(together))["rows"]
        bad = {name for name, outcome, _ in rows if outcome in ("failed", "import")}
        times.update({name: seconds for name, outcome, seconds in rows if outcome == "passed" and name not in bad})
        print(
            "".join(f"left out, since it fails without a change: {name}\n" for name in sorted(bad)), end="", flush=True
        )

    share(workers, [(measure, together) for together in folders.values()])
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(times, indent=0), encoding="utf-8")
    return times


def share(workers: list[Worker], jobs: list[tuple[Any, Any]]) -> None:
    """Give the jobs, in their order, to the workers that are free."""
    free = list(workers)

    def one(job: tuple[Any, Any]) -> None:
        worker = free.pop()
        try:
            job[0](worker, job[1])
        finally:
            free.append(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(one, jobs))


def chosen(files: list[str], times: dict[str, float], killer: str) -> list[str]:
    """Choose tests within the budget: of near files more cases than of far ones, and the earlier killer first."""
    ranked = []
    for far, file in enumerate(files):
        turns: dict[str, int] = defaultdict(int)
        for name in (name for name in times if name.startswith(f"{file}::")):
            base = name.split("[")[0]
            first = name.split("::")[-1] == killer.split("::")[-1]
            ranked.append((not first, far + turns[base], far, name))
            turns[base] += 1
    taken, left = [], BUDGET_S
    for first, _, far, name in sorted(ranked, key=lambda row: row[:3]):
        if times[name] <= min(left, LONGEST_S) or not first:
            left -= times[name]
            taken.append((first, far, name))
    return [name for _, _, name in sorted(taken, key=lambda row: row[:2])]


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


def run(record: dict[str, Any], again: bool, workers: int, most: int) -> list[str]:
    """Run what is to be run; return a line for each change that was noticed once and now is not."""
    rounds = [rows[k] for k in range(min(EACH, most)) for rows in record["packages"].values() if k < len(rows)]
    rows = [row for row in rounds if (row["by"] if again else row["by"] is None)]
    lost: list[str] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="m") as place:
        tree = take(None if again else record["commit"], Path(place) / "tree")
        near, todo = Near(tree), []
        for row in rows:
            mutation = Mutation(**{key: row[key] for key in ("module", "function", "text", "nth", "new")})
            if found := find(tree, mutation):
                files = near.files(found[0], mutation.function, row["by"] or "")
                todo.append((row, mutation, [path.relative_to(tree).as_posix() for path in files]))
            else:
                print(f"gone: {row['module']} {row['function']}: {row['text']!r} (was noticed by {row['by']})")
        for number in range(workers):
            (Path(place) / str(number)).mkdir()
        ready = [Worker(tree, Path(place) / str(number)) for number in range(workers)]
        kept = Path(place) / "times.json" if again else ROOT / "build" / "mutation" / f"{record['commit']}.json"
        times = clean_times(ready, {Path(file) for _, _, files in todo for file in files}, kept)

        def one(worker: Worker, job: tuple[dict[str, Any], Mutation, list[str]]) -> None:
            row, mutation, files = job
            wanted = chosen(files, times, row["by"] or "")
            limit_s = 45 + 4 * sum(times[name] for name in wanted)  # only a hang reaches it, also on a busy machine
            start = time.monotonic()
            by = worker.noticed(tree, mutation, [Path(file) for file in files], wanted, limit_s)
            took_s, where = time.monotonic() - start, f"{row['module']} {row['function']}"
            with lock:
                print(f"{took_s:5.1f} s  {where}: {by or 'survived'}", flush=True)
                if again and not by:
                    lost.append(f"{where}: {row['text']} -> {row['new']} (by {row['by']})")
                elif not again:
                    row["by"] = by
                    row["tests"] = len(wanted)
                    save(record)

        share(ready, [(one, job) for job in todo])
        for worker in ready:
            worker.process.stdin.close()  # type: ignore[union-attr]
            worker.process.wait()
    return lost


def main() -> int:
    """Go on with the baseline, or compare with it; print what each package's tests noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run what was noticed once, on the tree of now")
    parser.add_argument("--doubtful", action="store_true", help="run once more what survived or was noticed by time")
    parser.add_argument("--workers", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--most", type=int, default=EACH, help="run only the first so many of each package")
    given = parser.parse_args()
    record = load()
    if not given.again:
        save(record)
    for row in (row for rows in record["packages"].values() for row in rows):
        row["by"] = None if given.doubtful and row["by"] in ("", "time") else row["by"]
    lost = run(record, given.again, given.workers, given.most)
    for name, rows in record["packages"].items():
        done = [row["by"] for row in rows if row["by"] is not None]
        print(f"{name}: {sum(map(bool, done))} of {len(done)} noticed, {len(rows) - len(done)} not run yet")
    print("".join(f"LOST: {line}\n" for line in lost), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
