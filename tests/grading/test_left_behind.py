"""What a right answer leaves behind is told: on which argument or in which part of the process, and by which call."""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import io
import json
import os
import re
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distlab.comm import run
from distlab.grading import load_lesson
from distlab.grading.answer.submission import isolated_submission
from distlab.grading.check import examine
from distlab.grading.variation import owned
from distlab.grading.variation.left import left_on, marks, restored, switches


def average(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def hooks_on_parameters(module):
    average(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 2)


def hook_after_accumulation(module):
    average(module)
    next(p for p in module.parameters() if p.requires_grad).register_post_accumulate_grad_hook(lambda parameter: None)


def hook_on_module(module):
    average(module)
    module.register_forward_hook(lambda *given: None)


def hook_on_all_modules(module):
    average(module)
    torch.nn.modules.module.register_module_forward_hook(lambda *given: None)


def attribute_on_module(module):
    average(module)
    module.seen = 1


def attribute_on_parameter(module):
    average(module)
    for parameter in module.parameters():
        parameter.tag = 1


def default_device(module):
    average(module)
    torch.set_default_device("meta")


def no_collector(module):
    average(module)
    gc.disable()


def ignores_interrupts(module):
    average(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def strict_warnings(module):
    average(module)
    warnings.simplefilter("error")


def anomaly_mode(module):
    average(module)
    torch.autograd.set_detect_anomaly(True)


def without_onednn(module):
    average(module)
    torch.backends.mkldnn.enabled = False


def open_descriptor(module):
    average(module)
    os.open("/dev/null", os.O_RDONLY)


def no_rights(module):
    average(module)
    os.umask(0o77)


def lower_limit(module):
    average(module)
    resource.setrlimit(resource.RLIMIT_CPU, (9999, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def another_loop(module):
    average(module)
    asyncio.set_event_loop(asyncio.new_event_loop())


def runs_at_the_end(module):
    average(module)
    atexit.register(print)


def writes_elsewhere(module):
    average(module)
    sys.stdout = io.StringIO()


def closes_its_errors(module):
    average(module)
    os.close(2)


AVERAGES = [
    (hooks_on_parameters, r"it leaves a hook on module\.\S+; keep what"),
    (hook_after_accumulation, r"it leaves a hook on module\.\S+; keep what"),
    (hook_on_module, "it leaves a hook on module; keep what"),
    (hook_on_all_modules, r"the number of hooks on all modules is not what it was before \(it was \d, and is \d\)"),
    (attribute_on_module, "it leaves the attribute 'seen' on module, which belongs to the caller"),
    (attribute_on_parameter, r"it leaves the attribute 'tag' on module\.\S+, which belongs to the caller"),
    (default_device, "it changed torch's default device to meta"),
    (no_collector, r"the garbage collector \(gc.isenabled\) .*\(it was on, and is off\)"),
    (ignores_interrupts, "the handler of SIGINT is not what it was before"),
    (strict_warnings, "the number of warnings that are errors"),
    (anomaly_mode, r"torch's anomaly mode .*\(it was off, and is on\)"),
    (without_onednn, "torch's use of oneDNN"),
    (open_descriptor, "the number of open files"),
    (no_rights, r"it changed the rights of new files \(os.umask\)"),
    (lower_limit, r"it changed the program's limits \(resource.setrlimit\)"),
    (another_loop, r"it changed the event loop \(asyncio.set_event_loop\)"),
    (runs_at_the_end, r"a function to be run at the program's end \(atexit.register\)"),
    (writes_elsewhere, "it changed sys.stdout, for everything that comes after"),
    (closes_its_errors, "it changed sys.stderr, for everything that comes after"),
]


@pytest.mark.parametrize(("fn", "says"), AVERAGES, ids=[fn.__name__ for fn, _ in AVERAGES])
def test_what_is_left_is_named(fn: Callable[..., Any], says: str) -> None:
    report = examine(load_lesson("03.average").exercise("03.average"), fn, worlds=(1,), seed=0)
    assert report.fault in ("state left behind", "default device"), str(report)
    assert re.search(says, report.message), report.message
    assert re.search("call 1, average_gradients|for everything that comes after|atexit.register", report.message)


def test_the_rank_is_named() -> None:
    report = examine(load_lesson("03.average").exercise("03.average"), hook_on_module, worlds=(2,), seed=0)
    assert "right result, but on rank 0 it leaves a hook on module" in report.message


AT_LOADING = """import sys
import torch
import torch.distributed as dist
torch.manual_seed(7)
sys.setrecursionlimit(2000)
"""


@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
@pytest.mark.parametrize("how", ["loaded", "called"])
def test_a_call_is_not_blamed_for_what_loading_its_file_switches(tmp_path: Path, suffix: str, how: str) -> None:
    """The rank that calls the function loads its file, whose folder it then imports from."""
    body = inspect.getsource(average).replace("def average(", "def average_gradients(")
    if how == "called":
        body += "    sys.path.append('left')\n"
    path = tmp_path / f"answers{suffix}"
    cell = {"cell_type": "code", "source": AT_LOADING + body, "outputs": [], "metadata": {}}
    path.write_text(AT_LOADING + body if suffix == ".py" else json.dumps({"cells": [cell]}))
    lesson = load_lesson("03.average")
    report = examine(
        lesson.exercise("03.average"), isolated_submission(str(path), lesson)[0]["03.average"], worlds=(1, 2), seed=0
    )
    if how == "loaded":
        assert report.fault is None, str(report)
    else:
        assert report.fault == "state left behind"
        assert "the list of folders that Python imports from (sys.path) is not what it was before" in report.message


def halves_the_rate(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        is_last = number % num_accumulated == 0
        with nullcontext() if is_last else model.no_sync():
            (loss_fn(model(inputs), targets) / num_accumulated).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def test_options_of_an_optimizer_are_compared() -> None:
    report = examine(load_lesson("03.accumulate").exercise("03.accumulate"), halves_the_rate, worlds=(1,), seed=0)
    assert report.fault == "state left behind", str(report)
    assert "it changed optimizer.param_groups[0]['lr'] from " in report.message


@pytest.mark.parametrize(
    ("value", "change", "says"),
    [
        (torch.Generator(), lambda one: torch.rand(1, generator=one), "it changed the generator given"),
        (np.random.default_rng(1), lambda one: one.random(), "it changed the generator given"),
        (np.zeros(2), lambda one: one.__setitem__(0, 1.0), "it changed given"),
        ({"a"}, lambda one: one.add("b"), "it changed given"),
        ([{"b": torch.zeros(1)}], lambda one: setattr(one[0]["b"], "seen", 1), "'seen' on given[0]['b']"),
        (torch.nn.Sequential(torch.nn.Dropout()), lambda one: one[0].eval(), "given.0.training from True to False"),
        (torch.nn.Linear(1, 1), lambda one: delattr(one, "in_features"), "took the attribute 'in_features' from given"),
    ],
)
def test_other_arguments_are_compared(value: Any, change: Callable[[Any], Any], says: str) -> None:
    before = list(marks("given", value))
    assert left_on(before, list(marks("given", value))) == []
    change(value)
    assert any(says in words for _, _, words in left_on(before, list(marks("given", value))))


def test_switches_do_not_change_by_themselves() -> None:
    before = switches()
    assert switches() == before
    with restored():
        gc.disable()
        warnings.simplefilter("error")
        assert switches() != before
    assert switches() == before


def threads_counted() -> list[int]:
    """Return how many threads are seen before a group has any of its own, with those, and with one of the program."""
    counts = [owned.state()["running threads"]]
    there = [torch.empty(3), torch.ones(3)]
    works = [dist.irecv(there[0], 1 - dist.get_rank()), dist.isend(there[1], 1 - dist.get_rank())]
    for work in [*works, dist.all_reduce(torch.ones(3), async_op=True)]:
        work.wait()
    counts.append(owned.state()["running threads"])
    end = threading.Event()
    threading.Thread(target=end.wait).start()
    counts.append(owned.state()["running threads"])
    end.set()
    return [count - counts[0] for count in counts]


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_threads_of_a_group_are_none_that_a_function_left(backend: str) -> None:
    assert run(threads_counted, 2, backend=backend) == [[0, 0, 1]] * 2
