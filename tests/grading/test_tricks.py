"""No answer ends the check, decides its verdict or looks into it: every way out has a verdict, never "passed"."""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import glob
import importlib
import inspect
import os
import re
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.cli import main
from distlab.comm.launch.processes import JOB_VARIABLE
from distlab.grading import Exercise
from distlab.grading.check import examine


def wrong(tensor):
    return torch.zeros_like(tensor)


def kills_its_parent():
    ctypes.CDLL(None).kill(os.getppid(), 9)


PAST = os.path.join(os.path.dirname(torch.__file__), "_inductor", "past.py")  # what torch.compile does is let pass
past_the_fence = types.FunctionType(kills_its_parent.__code__.replace(co_filename=PAST), globals())


class ExitsWhenRead:
    def __reduce__(self):
        return os._exit, (0,)


class Agrees:
    shape, dtype = torch.Size([100]), torch.float64

    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]

    def __len__(self):
        return 100

    def __repr__(self):
        os._exit(0)

    __str__ = __repr__

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **named):
        return True


class AgreeingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.equal, torch.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def returns_what_exits(tensor):
    return ExitsWhenRead()


def returns_what_agrees(tensor):
    return Agrees()


def returns_a_tensor_that_agrees(tensor):
    return wrong(tensor).as_subclass(AgreeingTensor)


def returns_itself(tensor):
    kept: list[Any] = []
    kept.append(kept)
    return kept


def replaces_equal(tensor):
    torch.equal = torch.allclose = lambda *args, **named: True
    return wrong(tensor)


def covers_a_method(tensor):
    torch.Tensor.equal = lambda *args: True  # type: ignore[method-assign]
    return wrong(tensor)


def replaces_all_reduce(tensor):
    dist.all_reduce = lambda *args, **named: None
    return wrong(tensor)


def replaces_builtins(tensor):
    builtins.all = lambda values: True
    return wrong(tensor)


def replaces_the_seed(tensor):
    importlib.import_module("distlab.grading.diagnosis.values").seeded = lambda *args, **named: torch.zeros(100)
    return wrong(tensor)


def reads_a_frame(tensor):
    return sys._getframe(1).f_locals["want"]


def reads_the_stack(tensor):
    return inspect.stack()[1].frame.f_locals


def reads_a_traceback(tensor):
    try:
        raise ValueError
    except ValueError as error:
        return error.__traceback__.tb_frame.f_back.f_locals


def reads_all_objects(tensor):
    return [one for one in gc.get_objects() if isinstance(one, torch.Tensor)][0]


def traces(tensor):
    sys.settrace(lambda *args: None)
    return wrong(tensor)


def reads_the_solution(tensor):
    return Path("lessons/03_data_parallel/solutions.py").read_text()


def empties_the_records(tensor):
    for path in glob.glob(f"{tempfile.gettempdir()}/{os.environ[JOB_VARIABLE]}/*.rec"):  # not those of other tests
        os.truncate(path, 0)
    return wrong(tensor)


def closes_every_file(tensor):
    os.closerange(3, 200)
    return wrong(tensor)


def calls_the_backend(tensor):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.allreduce([tensor]).wait()
    return tensor / dist.get_world_size()


def sends_through_a_store(tensor):
    store = importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()
    store.set("mine", "1")
    return wrong(tensor)


def kills_the_fork_server(tensor):
    past_the_fence()
    time.sleep(5)


CASES = [
    (returns_what_exits, "returned", "object of class ExitsWhenRead"),
    (returns_what_agrees, "returned", "object of class Agrees"),
    (returns_a_tensor_that_agrees, "zeros", "all zeros"),
    (returns_itself, "returned", ""),
    (replaces_equal, "replaced", "replaced torch.allclose, torch.equal"),
    (covers_a_method, "replaced", "replaced Tensor.equal"),
    (replaces_all_reduce, "replaced", "torch.distributed.all_reduce"),
    (replaces_builtins, "replaced", "builtins.all"),
    (replaces_the_seed, "replaced", "values.seeded"),
    (reads_a_frame, "looked", r"looks into the running check \(sys._getframe\).* in reads_a_frame"),
    (reads_the_stack, "looked", "looks into the running check"),
    (reads_a_traceback, "looked", "looks into the running check"),
    (reads_all_objects, "looked", "gc.get_objects"),
    (traces, "looked", "sys.settrace"),
    (reads_the_solution, "looked", "opens a file of the check"),
    (empties_the_records, "looked", "opens a file of the check"),
    pytest.param(
        calls_the_backend,
        "went around",
        r"it calls Backend.allreduce, .* in calls_the_backend: backend.allreduce",
        marks=pytest.mark.gloo("a group of shared memory is its own backend: such a call is recorded as any other"),
    ),
    (sends_through_a_store, "went around", "Store.set"),
    (closes_every_file, "exited|killed", "closed a file descriptor that it did not open|SIGABRT"),  # gloo may be first
    (kills_the_fork_server, "killed", "the process that starts the ranks was killed"),
]


@pytest.mark.parametrize(
    ("fn", "fault", "says"), CASES, ids=[getattr(case, "values", case)[0].__name__ for case in CASES]
)
def test_a_trick_is_named(
    mean_exercise: Exercise, request: pytest.FixtureRequest, fn: Callable[..., Any], fault: str, says: str
) -> None:
    if fn is kills_the_fork_server:
        request.getfixturevalue("own_fork_server")
    report = examine(mean_exercise, fn, worlds=(1,))
    assert report.verdict == "wrong", str(report)
    assert re.fullmatch(fault, str(report.fault)), str(report)
    assert re.search(says, str(report), re.DOTALL), str(report)


def right_with_common_means(tensor):
    """Use what a learner may: a record, a caught error, a logger, a warning, a functional collective."""
    import logging
    import traceback
    import warnings
    from collections import namedtuple

    import torch.distributed._functional_collectives as functional

    pair = namedtuple("pair", "total number")
    try:
        raise ValueError("caught")
    except ValueError:
        traceback.format_exc()
    logging.getLogger("learner").warning("a line")
    warnings.warn("a warning", stacklevel=1)
    torch.manual_seed(1)
    kept = pair(functional.all_reduce(tensor, "sum", dist.group.WORLD), dist.get_world_size())
    return kept.total / kept.number


def test_what_a_learner_may_use_is_not_refused(mean_exercise: Exercise) -> None:
    report = examine(mean_exercise, right_with_common_means, worlds=(2,))
    assert report.passed, str(report)
    assert examine(mean_exercise, functools.partial(right_with_common_means), worlds=(1,)).passed


ENDINGS = {
    "os._exit(0)": "exited with status 0",
    "import sys; sys.exit(0)": "exited with status 0",
    "exec(compile('1', os.__file__, 'exec'))": "it gives its code the name of another's file",
    "os.closerange(3, 200)": "closed a file descriptor|SIGABRT",
    "import atexit; atexit.register(os._exit, 0)": "to be run at the program's end",
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "raise BaseException('\\ud800')": "raised BaseException",
}


@pytest.mark.parametrize("line", ENDINGS)
def test_every_end_of_an_import_has_a_verdict(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.py"
    file.write_text(f"import os\n{line}\n")
    assert main(["check", "03.buckets", "--impl", str(file)]) == 1
    told = capsys.readouterr().out
    assert "Wrong: " in told
    assert re.search(ENDINGS[line], told), told
    assert "0 of 1 exercises right" in told
