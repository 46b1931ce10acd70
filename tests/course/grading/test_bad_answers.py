"""An answer may hang, fork, flood, exit, crash or not be a function: the check names it, soon, and leaves nothing."""

import functools
import re
import threading
import time
from dataclasses import replace

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
FILLS_THE_DISK = """
with open(f"/tmp/distlab-test-{os.getpid()}", "wb") as file:
    os.unlink(file.name)
    file.truncate(1 << 30)"""
# The lines before `return right(tensor)`, the number of ranks, the fault, and what is said.
CASES = [
    (
        *("if dist.get_rank() == 0:\n    dist.all_reduce(tensor.clone())\nreturn tensor", 2, "deadlock"),
        "rank 0 waits in all_reduce .* rank 1 has returned without it",
    ),
    ("while True:\n    pass", 1, "hang", "did not finish in 3 s .* in mean: (while True:|pass)"),
    ("signal.raise_signal(signal.SIGSTOP)", 1, "hang", "stopped by a signal"),
    ("os.kill(os.getppid(), signal.SIGKILL)", 1, "signal", "it sends signal 9 to process .* in mean: os.kill"),
    ("os.killpg(0, signal.SIGTERM)", 1, "signal", "it sends signal 15 to process 0; a check ends its ranks itself"),
    ("with contextlib.suppress(Exception):\n    os.fork()", 1, "forked", r"starts a process \(os.fork\).* in mean: "),
    (
        *("while True:\n    print('all work and no play' * 50)", 1, "output"),
        "rank 0 printed more than 10 MB and was stopped.* in mean: ",
    ),
    ("sys.exit(3)", 1, "exited", r"exited with status 3 .* in mean: sys.exit\(3\)"),
    ("os._exit(0)", 1, "exited", "exited with status 0 before it returned"),
    ("ctypes.string_at(0)", 1, "killed", "was killed by SIGSEGV .* in mean: ctypes.string_at"),
    (
        *("kept = []\nwhile True:\n    kept.append(torch.ones(32 << 20))", 1, "memory"),
        "more memory than a check gives .* in mean: kept.append",
    ),
    (
        *("kept = {}\nwhile True:\n    kept[len(kept)] = torch.ones(50)", 2, "memory"),  # none is left to tell it
        r"more memory than a check gives .* in mean: kept\[len",
    ),
    (
        *("if dist.get_rank() == 2:\n    raise KeyError('layer 7')", 3, "raised"),
        "on rank 2 of 3: it raised KeyError: 'layer 7' .*raise KeyError",
    ),
    ("return (right(tensor) for _ in range(1))", 1, "returned", "an object of class generator, which is not a plain"),
    ("return None", 1, "returned", "got None"),
    ("dist.destroy_process_group()\nreturn tensor", 1, "left the group", "destroyed or replaced the process group"),
    ("sys.stdout.close()", 1, "state left behind", "it closed or replaced sys.stdout"),
    (
        *("mine = tensor.clone()\ndist.all_reduce(tensor, async_op=True)\nreturn mine", 2, "not communicated"),
        r"rank 0 starts all_reduce at \S*answers.py:\d+ and never waits for it",
    ),
    (
        *("dist.recv(torch.ones(1), 0) if dist.get_rank() else dist.isend(torch.ones(1), 1)", 2, "not waited"),
        r"right result, but by luck: rank 0 starts send to rank 1 at .* isend",
    ),
    ("dist.all_reduce(torch.ones(1), async_op=True)", 2, "not waited", "keep what dist.all_reduce returns"),
    ("dist.all_reduce(torch.ones(1 + dist.get_rank()))", 2, "mismatch", r"float32\[1\].*float32\[2\]"),
    (FILLS_THE_DISK, 1, "raised", r"OSError: \[Errno 27\] File too large .* in mean"),
]


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
