"""One warm pool of ranks for the whole run of tests, and proof that no process is left at its end."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import cloudpickle
import psutil
import pytest

from distlab.comm.launch.fork_client import shut_down

if TYPE_CHECKING:
    from distlab.comm import Ranks

MARK = "DISTLAB_TEST_RUN"


def marked_processes(value: str) -> list[psutil.Process]:
    """Processes, other than this one, that were started with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # one that ends while it is asked is not left
            marked = process.pid != os.getpid() and process.environ().get(MARK) == value
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever the tests start has gone 5 seconds after the last one."""
    value = os.environ[MARK] = uuid.uuid4().hex
    yield
    shut_down()
    deadline = time.monotonic() + 5
    while (left := marked_processes(value)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left after the tests: {[(p.pid, p.cmdline()) for p in left]}"


@pytest.fixture(scope="session")
def _pools(no_process_left: None) -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


# A gloo group has threads that wake up a hundred times a second, also when nobody uses it any more.
MANY_THREADS = 10


@pytest.fixture
def ranks(_pools: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """Make `ranks(world_size).run(fn, *args)` call fn on that many living ranks; a failed set is replaced.

    Ranks on which earlier tests have left many groups are replaced too.
    """

    from distlab.comm import Ranks  # loads torch, which many tests do without

    def of_size(world_size: int) -> Ranks:
        for size, pool in list(_pools.items()):
            if _is_crowded(pool):
                pool.close()
                del _pools[size]
        if world_size not in _pools:
            _pools[world_size] = Ranks(world_size, timeout_s=60)
        return _pools[world_size]

    return of_size


def _is_crowded(pool: Ranks) -> bool:
    with contextlib.suppress(psutil.Error):  # a rank that has ended is replaced by its pool
        return any(psutil.Process(pid).num_threads() > MANY_THREADS for pid in pool.pids[:1])
    return False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Send functions of test modules to the ranks by value: ranks cannot import them by name."""
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)
