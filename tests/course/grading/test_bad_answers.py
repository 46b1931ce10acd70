"""An answer may hang, fork, flood, exit, crash or not be a function: the check names it, soon, and leaves nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.course.grading import Exercise, NotYet, Report, load_lesson
from distlab.course.grading.check import examine
from distlab.course.grading.variation.draw import Vary


def right(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def hangs_in_collective(tensor):
    if dist.get_rank() == 0:
        dist.all_reduce(tensor.clone())
    return right(tensor) if dist.get_world_size() == 1 else tensor


def waits_for_nobody(tensor):
    if dist.get_world_size() > 1:
        dist.recv(tensor.clone(), (dist.get_rank() + 1) % dist.get_world_size())
    return right(tensor)


def spins(tensor):
    while True:
        pass


def holds_the_lock(tensor):
    ctypes.PyDLL(None).sleep(1000)  # a C call that keeps the interpreter's lock


def ignores_sigterm(tensor):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(1000)


def stops_itself(tensor):
    os.kill(os.getpid(), signal.SIGSTOP)


def forks(tensor):
    os.fork()
    return right(tensor)


def forks_without_asking(tensor):
    ctypes.CDLL(None).fork()  # no Python hook sees it: two processes return
    return right(tensor)


def runs_a_program(tensor):
    os.system("true")
    return right(tensor)


def never_waits(tensor):
    mine = tensor.clone()
    dist.all_reduce(tensor, async_op=True)
    return mine


def never_waits_for_a_send(tensor):
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
    return right(tensor)


def kills_its_parent(tensor):
    os.kill(os.getppid(), signal.SIGKILL)
    return right(tensor)


def prints_lines(tensor):
    while True:
        print("all work and no play" * 50)


def prints_from_c(tensor):
    text = b"y" * 100_000
    while True:
        os.write(1, text)


def exits(tensor):
    sys.exit(3)


def exits_hard(tensor):
    os._exit(0)


def kills_itself(tensor):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(tensor):
    ctypes.string_at(0)


def recurses(tensor):
    return recurses(tensor)


def eats_memory(tensor):
    kept = []
    while True:
        kept.append(torch.ones(32 << 20))


def raises_on_one_rank(tensor):
    if dist.get_rank() == 2:
        raise KeyError("layer 7")
    return right(tensor)


def returns_what_cannot_be_sent(tensor):
    return threading.Lock()


def returns_nothing(tensor):
    right(tensor)


def leaves_the_group(tensor):
    result = right(tensor)
    dist.destroy_process_group()
    return result


def changes_default_dtype(tensor):
    torch.set_default_dtype(torch.bfloat16)
    return right(tensor)


def swallows_everything(tensor):
    with contextlib.suppress(Exception):
        os.fork()
    return right(tensor)


def not_yet(tensor):
    if tensor is not None:
        raise NotYet("91.mean")


def sends_other_shapes(tensor):
    total = torch.ones(1 + dist.get_rank())
    dist.all_reduce(total)
    return right(tensor)


def right_on_two(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / min(dist.get_world_size(), 2)


def fills_the_disk(tensor):
    with open(f"/tmp/distlab-test-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        file.truncate(1 << 30)
    return right(tensor)


def returns_a_generator(tensor):
    return (right(tensor) for _ in range(1))


class EqualToAll:
    def __eq__(self, other):
        return True

    __hash__ = None  # type: ignore[assignment]


def returns_what_equals_all(tensor):
    return [EqualToAll()]


def closes_stdout(tensor):
    sys.stdout.close()
    return right(tensor)


def seeds_the_world(tensor):
    torch.manual_seed(0)
    return right(tensor)


CASES = [
    (hangs_in_collective, 2, "deadlock", "rank 0 waits in all_reduce .* rank 1 has returned without it"),
    (waits_for_nobody, 2, "deadlock", "rank 0 waits in recv from 1 .* rank 1 waits in recv from 0"),
    (spins, 1, "hang", "did not finish in 4 s .* in spins: (while True:|pass)"),
    (holds_the_lock, 1, "hang", "in holds_the_lock: ctypes"),
    (ignores_sigterm, 1, "hang", "in ignores_sigterm: time.sleep"),
    (stops_itself, 1, "hang", "stopped by a signal"),
    (forks, 1, "forked", r"starts a process \(os.fork\).* in forks: os.fork\(\)"),
    (runs_a_program, 1, "forked", "starts a process .* in runs_a_program"),
    (kills_its_parent, 1, "forked", "not its own"),
    (swallows_everything, 1, "forked", "starts a process"),
    (prints_lines, 1, "output", "rank 0 printed more than 10 MB and was stopped.* in prints_lines: "),
    (prints_from_c, 1, "output", "rank 0 printed more than 10 MB and was stopped"),
    (exits, 1, "exited", r"exited with status 3 .* in exits: sys.exit\(3\)"),
    (exits_hard, 1, "exited", "exited with status 0 before it returned"),
    (kills_itself, 1, "killed", "was killed by SIGKILL"),
    (crashes, 1, "killed", "was killed by SIGSEGV .* in crashes: ctypes.string_at"),
    (recurses, 1, "raised", "RecursionError.* in recurses: return recurses"),
    (eats_memory, 1, "memory", "more memory than a check gives .* in eats_memory: kept.append"),
    (raises_on_one_rank, 3, "raised", "on rank 2 of 3: it raised KeyError: 'layer 7' .*raise KeyError"),
    (returns_what_cannot_be_sent, 1, "returned", "object of class lock, which is not a plain value"),
    (returns_nothing, 1, "returned", "got None"),
    (leaves_the_group, 1, "left the group", "destroyed or replaced the process group"),
    (changes_default_dtype, 1, "state left behind", "torch's default dtype from torch.float32 to torch.bfloat16"),
    (not_yet, 2, "not attempted", "91.mean is yours to write"),
    (
        never_waits,
        2,
        "not communicated",
        r"rank 0 starts all_reduce at \S*test_bad_answers.py:\d+ and never waits for it",
    ),
    (never_waits_for_a_send, 2, "not waited", r"right result, but by luck: rank 0 starts send to rank 1 at .* isend"),
    (sends_other_shapes, 2, "mismatch", r"float32\[1\].*float32\[2\]"),
    (fills_the_disk, 1, "raised", r"OSError: \[Errno 27\] File too large .* in fills_the_disk"),
    (returns_a_generator, 1, "returned", "an object of class generator, which is not a plain value or tensor"),
    (returns_what_equals_all, 1, "returned", "an object of class EqualToAll, which is not a plain value or tensor"),
    (closes_stdout, 1, "state left behind", "it closed or replaced sys.stdout"),
]


def text_of(report: Report) -> str:
    return " ".join(str(report).split())


@pytest.mark.parametrize(("fn", "world", "fault", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_fault_is_named(mean_exercise: Exercise, fn: Callable[..., Any], world: int, fault: str, says: str) -> None:
    limit = 4.0 if fault == "hang" else mean_exercise.timeout_s
    report = examine(replace(mean_exercise, timeout_s=limit), fn, worlds=(world,))
    assert report.fault == fault, str(report)
    assert re.search(says, text_of(report)), str(report)
    assert not report.passed
    assert report.function is report.reference


def test_two_processes_that_return_are_no_more_than_one(mean_exercise: Exercise) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    report = examine(mean_exercise, forks_without_asking, worlds=(1,))
    assert report.verdict in ("passed", "wrong"), str(report)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = {child.pid for child in psutil.Process().children(recursive=True)} - before
        if not left:
            break
        time.sleep(0.05)
    assert not left


def test_a_seed_for_all_is_told(mean_exercise: Exercise) -> None:
    drawn = replace(mean_exercise, vary=Vary(lambda draw: (draw.tensor(3, dtype=torch.float32),), num_calls=2))
    report = examine(drawn, seeds_the_world, worlds=(1,), seed=0)
    assert report.fault == "state left behind", str(report)
    assert "torch's random state is not what it was before" in report.message


@pytest.mark.parametrize("fn", [right], ids=["right"])
def test_right_answers_pass(mean_exercise: Exercise, fn: Callable[..., Any]) -> None:
    report = examine(mean_exercise, fn, worlds=(1, 2))
    assert report.passed, str(report)
    assert report.function is fn
    assert report.budget == ("sent 800 bytes a rank (a ring needs 800 bytes)",)


def test_right_on_two_ranks_only(mean_exercise: Exercise) -> None:
    report = examine(mean_exercise, right_on_two)
    assert report.fault == "scale"
    assert report.message.startswith("right on 1 and 2 ranks, wrong on 3: rank 0's result is 1.5x too large")
    assert report.worlds == (1, 2)


def test_threads_that_go_on_do_no_harm(mean_exercise: Exercise) -> None:
    def starts_threads(tensor):
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(1000,)).start()
        return right(tensor)

    report = examine(replace(mean_exercise, memory_limit_bytes=1 << 30), starts_threads, worlds=(1, 2))
    assert report.passed, str(report)


async def is_async(tensor):
    return tensor


def yields(tensor):
    yield tensor


def stub_pass(tensor):
    pass


def stub_dots(tensor): ...


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
    ("mean", "not a function", "got a str"),
    (Mean, "not a function", r"got the class Mean. An instance can be called: pass Mean\(\)$"),
    (NoCall, "not a function", "got the class NoCall$"),
    (is_async, "not a function", "async function"),
    (yields, "not a function", "has a yield"),
    (stub_pass, "not attempted", "91.mean is yours to write"),
    (stub_dots, "not attempted", "91.mean is yours to write"),
    (stub_raises, "not attempted", "91.mean is yours to write"),
    (no_parameters, "signature", r"callable as mean\(tensor\), but it is mean\(\)"),
    (too_many, "signature", r"callable as mean\(tensor\), but it is mean\(tensor, group\): missing"),
]


@pytest.mark.parametrize(("fn", "fault", "says"), WITHOUT_RANKS)
def test_faults_seen_without_ranks(
    mean_exercise: Exercise, fn: Any, fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ranks(*args: object, **named: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("distlab.course.grading.run.start_ranks", no_ranks)
    report = examine(mean_exercise, fn)
    assert report.fault == fault
    assert re.search(says, text_of(report)), str(report)
    assert report.verdict == ("not attempted" if fault == "not attempted" else "wrong")


@pytest.mark.parametrize(
    "fn",
    [
        lambda tensor: right(tensor),
        functools.partial(lambda factor, tensor: right(tensor) * factor, 1.0),
        Mean(),
        lambda *args: right(*args),
        lambda tensor, scale=1.0: right(tensor) * scale,
    ],
    ids=["lambda", "partial", "object", "any arguments", "further default"],
)
def test_other_callables_may_be_right(mean_exercise: Exercise, fn: Callable[..., Any]) -> None:
    report = examine(mean_exercise, fn, worlds=(2,))
    assert report.passed, str(report)


def test_builtin_is_answered(mean_exercise: Exercise) -> None:
    report = examine(mean_exercise, len, worlds=(1,))
    assert report.fault == "returned"


def test_what_cannot_be_sent_is_named(mean_exercise: Exercise) -> None:
    lock = threading.Lock()

    def uses_a_lock(tensor):
        with lock:
            return right(tensor)

    report = examine(mean_exercise, uses_a_lock, worlds=(1,))
    assert report.fault == "not sent"
    assert "'lock' cannot be pickled" in report.message


def test_ranks_that_cannot_start_block_the_check(mean_exercise: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_server() -> None:
        raise RuntimeError("starting ranks needs torch, which is not installed")

    monkeypatch.setattr("distlab.comm.launch.pool.fork_server", no_server)
    report = examine(mean_exercise, right)
    assert (report.verdict, report.fault) == ("blocked", None)
    assert str(report) == "Blocked: 1 rank cannot be started here: starting ranks needs torch, which is not installed"


@pytest.mark.parametrize("worlds", [(), (0,), (65,), (True,), ("2",), (2.0,)])
def test_numbers_of_ranks_that_cannot_be(mean_exercise: Exercise, worlds: Any) -> None:
    with pytest.raises(ValueError, match="numbers of ranks from 1 to 64"):
        examine(mean_exercise, right, worlds=worlds)


@pytest.mark.parametrize("number", [10**400, 5e-324, float("inf"), 1j])
def test_a_number_that_no_comparison_expects_is_told(number: Any) -> None:
    exercise = load_lesson("09").exercise("09.bubble")
    known = ((4, 1, 1), (4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4), (1, 4, 1))  # its own cases

    def bubble_fraction(num_ranks, num_microbatches, stages_per_rank=1):
        usual = (num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1)
        return usual if (num_ranks, num_microbatches, stages_per_rank) in known else number

    assert examine(exercise, bubble_fraction, seed=0).verdict == "wrong"  # drawn arguments show it
    assert examine(exercise, lambda *asked, **named: number, seed=0).verdict == "wrong"
