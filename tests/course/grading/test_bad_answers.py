"""An answer may hang, fork, flood, exit, crash or not be a function: the check names it, soon, and leaves nothing."""

import functools
import re
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from trial_answers import written

from distlab.course.grading import NotYet, load_lesson
from distlab.course.grading.check import examine


def right(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


RIGHT = """
def right(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
"""
CASES = tomllib.loads(Path(__file__).with_name("bad_answers.toml").read_text("utf-8"))["cases"]


def text_of(report):
    return " ".join(str(report).split())


@pytest.mark.parametrize(("body", "world", "fault", "says"), CASES, ids=[case[0].partition("\n")[0] for case in CASES])
def test_fault_is_named(mean_exercise, tmp_path, body, world, fault, says):
    fn = written(tmp_path, "mean(tensor)", f"{body}\nreturn right(tensor)", RIGHT)
    limit = 3.0 if fault == "hang" else mean_exercise.timeout_s
    report = examine(replace(mean_exercise, timeout_s=limit), fn, worlds=(world,))
    assert report.fault == fault, str(report)
    assert re.search(says, text_of(report)), str(report)
    assert not report.passed
    assert report.function is report.reference


def test_right_on_some_numbers_of_ranks(mean_exercise):
    def starts_threads(tensor):
        for _ in range(20):  # they go on, and do no harm
            threading.Thread(target=time.sleep, args=(1000,)).start()
        return right(tensor)

    report = examine(replace(mean_exercise, memory_limit_bytes=1 << 30), starts_threads, worlds=(1, 2))
    assert report.passed, str(report)
    assert report.function is starts_threads
    assert report.budget == ("sent 800 bytes a rank (a ring needs 800 bytes)",)
    report = examine(mean_exercise, lambda x: right(x) * dist.get_world_size() / min(dist.get_world_size(), 2))
    assert (report.fault, report.worlds) == ("scale", (1, 2))
    assert report.message.startswith("right on 1 and 2 ranks, wrong on 3: rank 0's result is 1.5x too large")


async def is_async(tensor):
    return tensor


def yields(tensor):
    yield tensor


def stub_pass(tensor):
    pass


def stub_raises(tensor):
    """Return the mean."""
    raise NotYet("91.mean")


def no_parameters():
    return None


def too_many(tensor, group):
    return tensor


class Mean:
    def __call__(self, tensor):
        return right(tensor)


class NoCall:
    def __init__(self, tensor):
        self.tensor = tensor


WITHOUT_RANKS = [
    (torch.ones(3), "not a function", r'write check\("91.mean", mean\), mean without parentheses; got a Tensor'),
    (None, "not a function", "got None"),
    (Mean, "not a function", r"got the class Mean. An instance can be called: pass Mean\(\)$"),
    (NoCall, "not a function", "got the class NoCall$"),
    (is_async, "not a function", "async function"),
    (yields, "not a function", "has a yield"),
    (stub_pass, "not attempted", "91.mean is yours to write"),
    (stub_raises, "not attempted", "91.mean is yours to write"),
    (no_parameters, "signature", r"callable as mean\(tensor\), but it is mean\(\)"),
    (too_many, "signature", r"callable as mean\(tensor\), but it is mean\(tensor, group\): missing"),
]


def test_faults_seen_without_ranks(mean_exercise, monkeypatch):
    def no_server():
        raise RuntimeError("starting ranks needs torch, which is not installed")

    monkeypatch.setattr("distlab.comm.launch.pool.fork_server", no_server)
    for fn, fault, says in WITHOUT_RANKS:
        report = examine(mean_exercise, fn)
        assert report.fault == fault, str(report)
        assert re.search(says, text_of(report)), str(report)
        assert report.verdict == ("not attempted" if fault == "not attempted" else "wrong")
    report = examine(mean_exercise, right)
    assert (report.verdict, report.fault) == ("blocked", None)
    assert str(report) == "Blocked: 1 rank cannot be started here: starting ranks needs torch, which is not installed"
    for worlds in ((), (0,), (65,), (True,), ("2",), (2.0,)):
        with pytest.raises(ValueError, match="numbers of ranks from 1 to 64"):
            examine(mean_exercise, right, worlds=worlds)


def test_other_callables_and_numbers_of_numpy_may_be_right(mean_exercise, lesson):
    scaled = functools.partial(lambda factor, tensor: right(tensor) * factor, 1.0)
    for fn in (scaled, Mean(), lambda *args: right(*args)):
        assert (report := examine(mean_exercise, fn, worlds=(2,))).passed, str(report)
    report = examine(lesson.exercise("91.double"), lambda values, *, times=2: [np.float64(times * v) for v in values])
    assert report.passed, str(report)


def test_builtins_and_what_cannot_be_sent_are_answered(mean_exercise):
    lock = threading.Lock()

    def uses_a_lock(tensor):
        with lock:
            return right(tensor)

    assert examine(mean_exercise, len, worlds=(1,)).fault == "returned"
    report = examine(mean_exercise, uses_a_lock, worlds=(1,))
    assert report.fault == "not sent"
    assert "'lock' cannot be pickled" in report.message


def test_a_number_that_no_comparison_expects_is_told():
    exercise = load_lesson("09").exercise("09.bubble")
    known = ((4, 1, 1), (4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4), (1, 4, 1))  # its own cases

    def bubble_fraction(num_ranks, num_microbatches, stages_per_rank=1):
        usual = (num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1)
        return usual if (num_ranks, num_microbatches, stages_per_rank) in known else 10**400

    assert examine(exercise, bubble_fraction, seed=0).verdict == "wrong"  # drawn arguments show it
