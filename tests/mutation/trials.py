"""Trials of changed code: a copy of the tree, and a server that runs tests in it, each time in a fork of its own.

A fork begins with torch and pytest, which take seconds to load, and without the library, which it takes from the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from changes import Mutation, changed_source, find

FILE_S = 8.0  # so long the tests of a file are timed
MEMORY = 8 << 30
# Loaded once, before each trial's fork: what tests import, without the library.
LOADED = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "hypothesis", "psutil")
LOADED += ("torch.distributed.tensor.parallel", "torch.distributed.optim", "cloudpickle", "pytest", "matplotlib.pyplot")


class Watch:
    """A plugin of pytest: run the wanted tests in their order, or each file for some seconds, and write what came."""

    def __init__(self, wanted: list[str], out: Path) -> None:
        self.wanted, self.out, self.spent, self.item_s = wanted, out, defaultdict(float), 0.0

    def write(self, *row: Any) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.wanted:
            place = {name: at for at, name in enumerate(self.wanted)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
            return
        count: dict[str, int] = defaultdict(int)
        for item in items:  # the first case of each test comes before the second of any
            base = item.nodeid.split("[")[0]
            item.turn, count[base] = count[base], count[base] + 1
        items.sort(key=lambda item: item.turn)
        items.sort(key=lambda item: str(item.path))

    def pytest_runtest_setup(self, item: Any) -> None:
        if not self.wanted and self.spent[item.path] > FILE_S:
            import pytest

            pytest.skip("timed long enough")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.item_s = report.duration + (self.item_s if report.when != "setup" else 0.0)
        if report.failed:
            self.write(report.nodeid, "failed", self.item_s)
        elif report.when == "call":
            self.write(report.nodeid, report.outcome, self.item_s)

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.spent[item.path] += self.item_s

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(report.nodeid, "import", 0.0)


def serve(copy: Path) -> None:
    """Run the trials that are asked for, one JSON line each."""
    ctypes.CDLL(None).prctl(36, 1)  # what a trial's processes leave comes to this process, which ends it
    sys.path[0] = str(copy)
    os.chdir(copy)
    os.setpriority(os.PRIO_PROCESS, 0, 10)
    for name in LOADED:
        importlib.import_module(name)
    import psutil

    for line in sys.stdin:
        ask, out = json.loads(line), copy.parent / "said"
        out.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            _trial(ask["files"], ask["wanted"], out)
        end, code = time.monotonic() + ask["limit_s"], None
        while code is None and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else time.sleep(0.02)
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
        rows = [json.loads(row) for row in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
        print(json.dumps({"code": code, "rows": rows}), flush=True)


def _trial(files: list[str], wanted: list[str], out: Path) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    quiet = os.open(out.with_name("output"), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    code = 3
    try:
        stop = ["-x"] if wanted else []
        code = int(
            pytest.main([*stop, "-m", "not soak", "--rootdir", os.getcwd(), *files], plugins=[Watch(wanted, out)])
        )
    finally:
        sys.stdout.flush()
        os._exit(code)


class Worker:
    """A copy of the tree and the server that runs trials in it."""

    def __init__(self, tree: Path, place: Path) -> None:
        self.copy = place / "t"
        shutil.copytree(tree, self.copy)
        (place / "tmp").mkdir()
        env = os.environ | {"PYTHONPATH": str(self.copy), "OMP_NUM_THREADS": "1", "TMPDIR": str(place / "tmp")}
        command = [sys.executable, __file__, str(self.copy)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, files: Iterable[Path], wanted: list[str], limit_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        ask = {"files": [str(path) for path in files], "wanted": wanted, "limit_s": limit_s}
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def noticed(
        self, tree: Path, mutation: Mutation, files: list[Path], wanted: list[str], limit_s: float
    ) -> str | None:
        """Make the change, run the tests, take it back; return what noticed it, "" for nothing."""
        found = find(tree, mutation)
        assert found is not None
        path = self.copy / found[0].relative_to(tree)
        before = path.read_text(encoding="utf-8")
        compiled = Path(importlib.util.cache_from_source(str(path)))
        try:
            compiled.unlink(missing_ok=True)  # two versions of a second, of one length, would be taken for the same
            path.write_text(changed_source(before, found[1], mutation.new), encoding="utf-8")
            said = self.ask(files, wanted, limit_s)
        finally:
            path.write_text(before, encoding="utf-8")
            compiled.unlink(missing_ok=True)
        return verdict(said)


def verdict(said: dict[str, Any]) -> str:
    """Return what noticed a change."""
    for name, outcome, _ in said["rows"]:
        if outcome in ("failed", "import"):
            return str(name) if outcome == "failed" else "import"
    if said["code"] is None:
        return "time"
    if said["code"] in (0, 5):
        return ""
    return "import" if not said["rows"] else "end of the process"


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
