"""What a right answer leaves behind is told: on which argument or in which part of the process, and by which call."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distlab.course.grading import load_lesson
from distlab.course.grading.answer.submission import isolated_submission
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.values import near
from distlab.course.grading.variation.calls import leaves, left_on, marks


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


def anomaly_mode(module):
    average(module)
    torch.autograd.set_detect_anomaly(True)


def default_device(module):
    average(module)
    torch.set_default_device("meta")


def gives_gradients_to_none(module):
    average(module)
    torch.set_grad_enabled(False)


def one_more_thread(module):
    average(module)
    torch.set_num_threads(torch.get_num_threads() + 1)


def draws(module):
    average(module)
    torch.rand(1)


def walks_away(module):
    average(module)
    os.chdir("/")


AVERAGES = [
    (hooks_on_parameters, r"it changed the number of hooks on module\.\S+ from 0 to 1; put back what you change"),
    (hook_after_accumulation, r"it changed the number of hooks on module\.\S+ from 0 to 1; put back what you change"),
    (hook_on_module, "it changed the number of hooks on module from 0 to 1; put back what you change"),
    (default_device, "it changed torch's default device from cpu to meta"),
    (gives_gradients_to_none, "it changed the grad mode from True to False"),
    (one_more_thread, r"it changed the number of threads of torch from \d+ to \d+"),
    (anomaly_mode, "it changed torch's anomaly mode from False to True"),
    (draws, "torch's random state is not what it was before"),
    (walks_away, r"it changed the working directory from \S+ to /"),
]


@pytest.mark.parametrize(("fn", "says"), AVERAGES, ids=[fn.__name__ for fn, _ in AVERAGES])
def test_what_is_left_is_named(fn: Callable[..., Any], says: str) -> None:
    report = examine(load_lesson("03.average").exercise("03.average"), fn, worlds=(1,), seed=0)
    assert report.fault == "state left behind", str(report)
    assert re.search(says, report.message), report.message
    assert re.search("call 1, average_gradients|for everything that comes after", report.message)


def test_the_rank_is_named() -> None:
    report = examine(load_lesson("03.average").exercise("03.average"), hook_on_module, worlds=(2,), seed=0)
    assert "right result, but on rank 0 it changed the number of hooks on module" in report.message


AT_LOADING = """import torch
import torch.distributed as dist
torch.manual_seed(7)
torch.set_num_threads(torch.get_num_threads() + 1)
"""


@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
@pytest.mark.parametrize("how", ["loaded", "called"])
def test_a_call_is_not_blamed_for_what_loading_its_file_switches(tmp_path: Path, suffix: str, how: str) -> None:
    """The rank that calls the function loads its file, whose folder it then imports from."""
    body = inspect.getsource(average).replace("def average(", "def average_gradients(")
    if how == "called":
        body += "    torch.set_num_threads(torch.get_num_threads() + 1)\n"
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
        assert "it changed the number of threads of torch from" in report.message


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


def test_hooks_in_lists_and_dicts_are_counted() -> None:
    value = [{"b": torch.zeros(1, requires_grad=True)}]
    before = dict(marks("given", value))
    assert left_on(before, dict(marks("given", value))) == {}
    value[0]["b"].register_hook(lambda gradient: gradient)
    what = "the number of hooks on given[0]['b']"
    assert left_on(before, dict(marks("given", value))) == {what: f"it changed {what} from 0 to 1"}


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.Generator(), lambda one: torch.rand(1, generator=one)),
        (np.zeros(2), lambda one: one.__setitem__(0, 1.0)),
        ({"a"}, lambda one: one.add("b")),
    ],
)
def test_values_in_other_arguments_are_compared(value: Any, change: Callable[[Any], Any]) -> None:
    ((name, before),) = list(leaves("given", value))
    change(value)
    ((_, after),) = list(leaves("given", value))
    assert name == "given"
    assert not near(after, before, 1.0)
