"""One warm pool of ranks for the whole run of tests, and proof that no process is left at its end."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest
from hypothesis import HealthCheck, settings
from waiting import processes_with

from distlab.comm.command import put_on_path
from distlab.comm.launch import fork_client
from distlab.comm.launch.fork_client import shut_down

if TYPE_CHECKING:
    from on_device.ranks import Machine

    from distlab.comm import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests run on a different device or backend: `-m equality --device cuda --backend gloo`, `--backend gloo`."""
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where equality tests put their tensors")
    parser.addoption(
        "--backend",
        default=None,
        choices=("gloo", "nccl", "shared"),
        help="of their ranks; default: as for users. On the CPU also of the ranks that a test starts itself",
    )


MARK = "DISTLAB_TEST_RUN"
Pool = tuple[str | None, int]  # what a set of living ranks is known by: the backend that nobody names, and how many
# What ranks of tests import. Loaded where they are forked, it takes its second once, not in each of a thousand ranks.
TECHNIQUES = (
    *(f"distlab.{name}" for name in ("checkpoint", "collectives", "compression", "context_parallel", "data_parallel")),
    *(f"distlab.{name}" for name in ("data", "elastic", "expert_parallel", "hybrid", "large_batch", "loading")),
    *(f"distlab.{name}" for name in ("models", "pipeline", "profile", "sharding", "tensor_parallel")),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    "torch.distributed.optim",  # it compiles optimizers for TorchScript: half a second
)
# A run that a shell put in the background ignores interrupts, and all that it starts would too: tests send some.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules.setdefault("rfc3987_syntax", None)  # nbformat's checker of addresses loads for 1.2 s: no test has any
# Property tests repeat the same examples each run, and are not timed: the machine is shared.
# A busy machine draws slowly: how long that takes is no fact of what is tested.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
put_on_path()  # messages write commands as they are where the lessons are read


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever the tests start goes after the last one."""
    value = os.environ[MARK] = uuid.uuid4().hex
    yield
    shut_down()
    deadline = time.monotonic() + 60
    while (left := processes_with(f"{MARK}={value}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left after the tests: {[(p.pid, p.cmdline()) for p in left]}"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Load all test files without looking for garbage: what they make stays, and is left out of later looks too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# A worker has one file at a time: begun last, these would run on alone.
LONGEST = ("test_mutants.py", "test_bodies.py", "test_equal.py", "test_panel.py", "test_wheel.py", "test_zoo.py")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `soak_where` names, begin with the longest."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("on_ranks"):
            item.fixturenames.append("ranks")  # type: ignore[attr-defined]
        for mark in item.iter_markers("soak_where"):
            given = item.callspec.params  # type: ignore[attr-defined]
            if all(given[name] in values for name, values in mark.kwargs.items()):
                item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", autouse=True)
def _loaded_once(no_process_left: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "PRELOAD", (*TECHNIQUES, *fork_client.PRELOAD))
        yield


@pytest.fixture(scope="session")
def _pools(no_process_left: None) -> Iterator[dict[Pool, Ranks]]:
    pools: dict[Pool, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


# A gloo group has threads that wake up a hundred times a second, also when nobody uses it any more.
MANY_THREADS = 10


@pytest.fixture
def ranks(request: pytest.FixtureRequest, _pools: dict[Pool, Ranks], _machine: Machine | None) -> Callable[[int], Any]:
    """Make `ranks(world_size).run(fn, *args)` call fn on that many living ranks; a failed set is replaced.

    Ranks on which earlier tests have left many groups are replaced too. With --device their tensors lie on a GPU.
    """
    if _machine is not None:
        return partial(_ranks_or_skip, _machine)

    from distlab.comm import Ranks  # loads torch, which many tests do without

    def of_size(world_size: int) -> Ranks:
        for key, pool in list(_pools.items()):
            if _is_crowded(pool):
                pool.close()
                del _pools[key]
        wanted = os.environ.get("DISTLAB_BACKEND"), world_size
        if wanted not in _pools:
            _pools[wanted] = Ranks(world_size, timeout_s=200)  # of a call: a busy machine stays far below it
        return _pools[wanted]

    return of_size


@pytest.fixture(scope="session")
def _machine(request: pytest.FixtureRequest, no_process_left: None) -> Iterator[Machine | None]:
    kind, backend = request.config.getoption("--device"), request.config.getoption("--backend")
    if kind == "cpu" and backend != "nccl":
        yield None
        return
    from on_device.ranks import Machine

    machine = Machine(kind, backend)
    yield machine
    machine.close()


def _ranks_or_skip(machine: Machine, world_size: int) -> Any:
    from on_device.ranks import NotHere

    try:
        return machine.ranks(world_size)
    except NotHere as error:
        pytest.skip(str(error))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Let a test marked `on_ranks(n)` run on each of n living ranks, so that it asserts where it computes."""
    if (mark := pyfuncitem.get_closest_marker("on_ranks")) is None:
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in wanted}
    pyfuncitem.funcargs["ranks"](*mark.args or [given["world_size"]]).run(partial(pyfuncitem.obj, **given))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test have its backend and device.

    On the CPU, ranks for which a test names no backend have that of --backend; in tests of gloo itself they have gloo.
    With --device cuda, a test's own process works on the GPU too, and with it one process's oracle.
    """
    if item.config.getoption("--device") == "cpu":
        backend = "gloo" if item.get_closest_marker("gloo") else item.config.getoption("--backend")
        with pytest.MonkeyPatch.context() as patch:
            if backend is not None:
                patch.setenv("DISTLAB_BACKEND", backend)
            return (yield)
    import torch
    from on_device.mode import OnDevice, prepare

    prepare()
    with OnDevice(torch.device(item.config.getoption("--device"), 0)):
        return (yield)


def _is_crowded(pool: Ranks) -> bool:
    with contextlib.suppress(psutil.Error):  # a rank that has ended is replaced by its pool
        return any(psutil.Process(pid).num_threads() > MANY_THREADS for pid in pool.pids[:1])
    return False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Send functions of test modules to the ranks by value: ranks cannot import them by name."""
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)
