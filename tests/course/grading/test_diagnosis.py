"""A fault is told by what was seen: the mistake's own words before general ones, and no blame for what was right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.comm.p2p import Receive, Send, exchange
from distlab.course.grading import Report, load_lesson
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.blame import in_plain_names, messages_that_do_not_fit


def checked(name: str, fn: Callable[..., Any], **options: Any) -> Report:
    return examine(load_lesson(name).exercise(name), fn, **options)


def never_divides(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        loss_fn(model(inputs), targets).backward()
        if number % num_accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_what_a_wrapper_sends_in_backward_is_not_called_unwaited() -> None:
    report = checked("03.accumulate", never_divides)
    assert report.verdict == "wrong"
    assert "never waits" not in report.message


def skips_missing_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_exercises_own_words_come_before_a_difference_in_drawn_arguments(seed: int) -> None:
    report = checked("03.average", skips_missing_gradients, worlds=(1, 2), seed=seed)
    assert report.fault == "missing gradient"
    assert report.message.startswith("on 2 ranks: ")
    assert checked("03.average", skips_missing_gradients, worlds=(1,), seed=seed).verdict == "wrong"


def counts_for_nothing(buckets):
    def hook(bucket):
        missing = len(bucket.parameters)

        def gradient_ready(_):
            left = missing - 1
            if left == 0:
                bucket.start(None)

        return gradient_ready

    for bucket in buckets:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(hook(bucket))
    return lambda: [bucket.finish() for bucket in buckets] and None


def hooks_too_soon(buckets):
    counts = [0] * len(buckets)

    def gradient_ready(index):
        counts[index] += 1
        if counts[index] == len(buckets[index].parameters):
            buckets[index].start(None)

    def synchronize():
        for bucket in buckets:
            bucket.finish()
        counts[:] = [0] * len(buckets)

    for index, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            parameter.register_hook(lambda _, index=index: gradient_ready(index))
    return synchronize


@pytest.mark.parametrize(
    ("fn", "seen"),
    [
        (counts_for_nothing, "Its 4 hooks ran, and none started it"),
        (
            hooks_too_soon,
            "in a hook that runs when it is written (register_post_accumulate_grad_hook, not register_hook)",
        ),
        (lambda buckets: lambda: [bucket.finish() for bucket in buckets] and None, "None of its parameters has a hook"),
    ],
)
def test_overlap_tells_what_hooks_did(fn: Callable[..., Any], seen: str) -> None:
    assert seen in checked("03.overlap", fn, worlds=(1,)).message


def another_chunk(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        known, unknown = chunks[(rank - step) % n], torch.empty(len(chunks[0]) + 1, dtype=tensor.dtype)
        exchange(Receive(unknown, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
    return tensor


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_both_sizes_of_a_message_stand_in_the_first_line(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    first, *lines = checked("02.ring_all_gather", another_chunk, worlds=(2,)).message.splitlines()
    assert re.search(r"rank \d sends float64\[\d\], rank \d receives it as float64\[\d\]: give both", first)
    assert len(lines) == 2
    assert "SIGABRT" not in first
    assert messages_that_do_not_fit("another text") is None


def other_shapes(tensor, group=None):
    dist.all_reduce(torch.ones(1 + dist.get_rank()))
    return tensor


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_calls_that_do_not_agree_are_one_fault_on_each_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    report = checked("02.ring_all_gather", other_shapes, worlds=(2,))
    assert report.fault == "mismatch"
    assert "rank 0: all_reduce #1 (float32[1], group [0, 1]) at " in report.message
    assert "rank 1: all_reduce #1 (float32[2], group [0, 1]) at " in report.message


@pytest.mark.parametrize(
    "file",
    ["/tmp/ipykernel_17/42.py", "/tmp/xpython_17/42.py", "/tmp/ipython-input-3-ab12.py", "<ipython-input-3-ab12>"],
)
def test_a_cell_is_your_cell_whatever_the_kernel(file: str) -> None:
    assert in_plain_names(f"at {file}:8", len) == "at your cell, line 8"
