"""`pytest -p tests.one_queue --queue FOLDER tests/one_queue.py`: take files of tests from a queue that processes share.

Each process collects only the files that it runs. With pytest-xdist each process collects all: with nothing cached that
is half a minute of processor time, four times. tools/side_by_side.py fills the queue and starts the processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LIST, TAKEN = "files", "taken"  # a line per file; a folder with one empty file per line that a process has taken


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--queue", type=Path, help="folder of the queue from which files of tests are taken")


FOLDERS: dict[Path, pytest.Collector] = {}


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path: Path) -> Iterator[None]:
    """Keep each folder's node from one collection to the next: the fixtures of its conftest.py are known by it."""
    made = yield
    return None if made is None else FOLDERS.setdefault(path, made)


def files_of(queue: Path) -> Iterator[str]:
    """Take one file after the other, in their order, until none is left; no other process gets it."""
    for place, file in enumerate((queue / LIST).read_text(encoding="utf-8").splitlines()):
        try:
            (queue / TAKEN / str(place)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield file


class Notes:
    """What is known of a process should it die in a test: which test that is, and which have failed."""

    def __init__(self, queue: Path) -> None:
        self.now, self.failed = (queue / f"{os.getpid()}.{what}" for what in ("now", "failed"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now.write_text(nodeid, encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failed.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext}\n")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Collect and run the files that this process takes; the first collection found nothing."""
    queue: Path | None = session.config.getoption("--queue")
    if queue is None:
        return None
    session.config.pluginmanager.register(Notes(queue))
    batches = (list(items) for file in files_of(queue) if (items := session.perform_collect([file])))
    total, items = 0, next(batches, [])
    while items:
        total += len(items)
        following: list[pytest.Item] = []
        for item, after in zip(items, [*items[1:], None], strict=True):
            if after is None:  # what stays set up after the last test depends on what comes next
                following = next(batches, [])
                after = following[0] if following else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        items = following
    session.testscollected = total
    return True
