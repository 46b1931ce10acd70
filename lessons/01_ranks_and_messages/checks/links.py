"""Links: the time of a message, and the latency and bandwidth that fit measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from distlab_lesson_01.checks.messages import deadlock, from_scratch
from torch import Tensor

from distlab.course.grading.cases import Cases, Given
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import describe
from distlab.course.grading.exercise import Refused
from distlab.grading import Evidence, Fault, Mutant

if TYPE_CHECKING:
    from distlab.comm import RankError
    from distlab.comm.record.read import Call

ROUNDS = 12
SIZES = tuple(float(4**k) for k in range(5, 13))  # 1 KiB to 16 MiB
LINKS = ((20e-6, 2e9), (5e-6, 25e9))  # alpha in seconds, beta in bytes per second
NOISE = (1.06, 0.95, 1.03, 0.94, 1.05, 0.97, 1.02, 0.96)  # a measured time over the true one
UNITS = (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9))


def partner_of(rank: int, world_size: int) -> int | None:
    """Return the partner: first with last, second with the one before; the middle one of three sits out."""
    partner = world_size - 1 - rank
    return None if partner == rank else partner


def drive_ping_pong(fn: Callable[[Tensor, int, int], Any]) -> Any:
    """Play with the partner; return what fn returned and the seconds that the whole call took."""
    partner = partner_of(dist.get_rank(), dist.get_world_size())
    if partner is None:
        return None
    tensor, start = torch.ones(1 << 17), time.perf_counter()
    seconds = fn(tensor, partner, ROUNDS)
    return seconds, time.perf_counter() - start


def judge_ping_pong(evidence: Evidence) -> Iterator[Fault]:
    """Look at the messages of each pair and then at the number."""
    for rank in range(evidence.world_size):
        partner = partner_of(rank, evidence.world_size)
        if partner is not None:
            sends, receives = calls(evidence, rank, "send"), calls(evidence, rank, "recv")
            yield from _judge_messages(rank, partner, sends, receives)
            yield from _judge_seconds(rank, *evidence.results[rank], [*sends, *receives])
    yield from from_scratch(evidence)


def _judge_messages(rank: int, partner: int, sends: Sequence[Call], receives: Sequence[Call]) -> Iterator[Fault]:
    if len(sends) != ROUNDS or len(receives) != ROUNDS:
        text = f"rank {rank} sends {len(sends)} messages and receives {len(receives)} in {ROUNDS} rounds"
        yield Fault("wrong number of messages", f"{text}; expected {ROUNDS} of each")
    if rank < partner:
        early = [k for k in range(1, ROUNDS) if sends[k].start_ns < receives[k - 1].end_ns]
        if early:
            text = f"rank {rank} sends message {early[0] + 1} before the answer to message {early[0]} is there"
            advice = "several travel at once, and the time is that of none of them"
            yield Fault("answer not waited for", f"{text}: {advice}")
    elif any(sends[k].start_ns < receives[k].end_ns for k in range(ROUNDS)):
        text = f"rank {rank} sends before it has received: both partners send at the same time"
        yield Fault("both at once", f"{text}; the higher rank answers, it does not begin")


def _judge_seconds(rank: int, seconds: Any, whole_s: float, made: Sequence[Call]) -> Iterator[Fault]:
    """Compare with the times of the whole call and of the messages: a right one is between, on a busy machine too."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        text = f"rank {rank} returns {seconds!r}"
        yield Fault("not a time", f"{text}; return the seconds of one message, a positive number")
    if not made:
        return
    window_s = (max(call.end_ns for call in made) - min(call.start_ns for call in made)) / 1e9
    ratio = seconds / (whole_s / (2 * ROUNDS))
    got = f"rank {rank} returns {seconds * 1e6:.0f} us; its {2 * ROUNDS} messages took {window_s * 1e6:.0f} us together"
    for unit, factor in UNITS:
        if 0.6 * window_s <= seconds / factor * 2 * ROUNDS <= 1.1 * whole_s:
            took = f"a message of rank {rank} took {whole_s / (2 * ROUNDS) * 1e6:.0f} us"
            yield Fault("not seconds", f"{took}; the number that it returns is in {unit}: return seconds")
    if ratio > 1.25 * ROUNDS:
        yield Fault("not divided", f"{got}; return seconds, divided by their number, 2 * rounds")
    elif ratio > 0.75 * ROUNDS:
        yield Fault("all rounds", f"{got}: that is the time of all rounds one way; divide by 2 * rounds, not by 2")
    elif ratio > 1.1:
        yield Fault("round trip", f"{got}: that is a whole round trip, there and back; divide by 2 * rounds")
    elif seconds < 0.6 * window_s / (2 * ROUNDS):
        yield Fault("too short", f"{got}; read time.perf_counter() before the first message and after the last answer")


def failure_ping_pong(error: RankError, world_size: int) -> Fault | None:
    """Name a deadlock of partners."""
    advice = "Of two partners exactly one sends first: let the lower rank do it (rank < partner)"
    return deadlock(error, world_size, f"{advice}, whichever ranks they are")


def budget_ping_pong(evidence: Evidence) -> list[str]:
    """Say what was played and measured."""
    milliseconds, megabytes = evidence.results[0][0] * 1e3, evidence.records.sent_bytes(0) / ROUNDS / 1e6
    return [f"{ROUNDS} rounds, {ROUNDS} messages each way; {milliseconds:.2f} ms for {megabytes:.2f} MB"]


def _fit_cases() -> Given:
    """Return two exact links, and the first one again as if measured."""
    exact = [[alpha + size / beta for size in SIZES] for alpha, beta in LINKS]
    words = [f"exact times of alpha = {alpha:g} s, beta = {beta:g} B/s" for alpha, beta in LINKS]
    noisy = [seconds * noise for seconds, noise in zip(exact[0], NOISE, strict=True)]
    return {name: (list(SIZES), times) for name, times in zip([*words, NOISY], [*exact, noisy], strict=True)}


def use_fit(fn: Callable[..., Any], sizes_bytes: list[float], times_s: list[float]) -> dict[str, Any]:
    """Compare to five digits: there are several ways to solve for the line."""
    pair, kinds = fn(sizes_bytes, times_s), int | float | Tensor | np.number
    is_pair = isinstance(pair, tuple | list | Tensor | np.ndarray) and len(pair) == 2
    if not is_pair or not all(isinstance(one, kinds) for one in pair):
        text = f"it returns {describe(pair)}; return two numbers"
        raise Refused("not a pair", f"{text}: alpha in seconds, beta in bytes per second")
    return {
        name: torch.tensor(float(one), dtype=torch.float32) for name, one in zip(("alpha", "beta"), pair, strict=True)
    }


NOISY = "times with 6 % noise"
drive_fit = Cases(_fit_cases(), use_fit)


def budget_fit(evidence: Evidence) -> list[str]:
    """Say how well the noisy times were fitted."""
    alpha_s, beta = evidence.results[0][NOISY]["result"].values()
    return [f"from times with 6 % noise: alpha {alpha_s * 1e6:.1f} us (true 20), beta {beta / 1e9:.2f} GB/s (true 2)"]


_THERE, _BACK = "dist.send(tensor, partner)", "dist.recv(answer, partner)"
WRONG_PING_PONG = (
    Mutant("not halved", "round trip", "there and back", 2, "common").edit("(2 * rounds)", "rounds"),
    Mutant("not divided", "all rounds", "divide by 2 * rounds", 2, "common").edit("(2 * rounds)", "2"),
    Mutant("milliseconds", "not seconds", "is in milliseconds: return seconds", 2, "common").edit(
        "(2 * rounds)", "(2 * rounds) * 1e3"
    ),
    Mutant("rank 0 begins", "deadlock", "recv from", 4, 3).edit("rank < partner", "rank == 0"),
    Mutant("no waiting", "answer not waited for", "before the answer", 2, "common")
    .edit("for _ in range(rounds)", "for message in range(2 * rounds)")
    .edit("rank < partner", "(rank < partner) == (message < rounds)")
    .edit(f"{_THERE}\n{_BACK}", _THERE)
    .edit(f"{_BACK}\n{_THERE}", _BACK),
    Mutant("both at once", "both at once", "at the same time", 2, "common")
    .edit("rank < partner", "True")
    .edit(f"{_THERE}\n{_BACK}", f"leaving = dist.isend(tensor, partner)\n{_BACK}\nleaving.wait()"),
    Mutant("counts one way", "wrong number of messages", "sends 24 messages", 2).edit(
        "range(rounds)", "range(2 * rounds)"
    ),
    Mutant("a round less", "too long", "divide by 2 * rounds", 2, "one set of arguments").edit(
        "(2 * rounds)", "(2 * max(rounds - 1, 1))"
    ),
    Mutant("twelve rounds", "wrong number of messages", "use every argument", 2, "one set of arguments").edit(
        "in range(rounds)", "in range(12)"
    ),
)
_RESULT, _BETA = "float(alpha_s), float(1 / seconds_per_byte)", "1 / seconds_per_byte"
WRONG_FIT = (
    Mutant("bits for bytes", "bits", "that is bits per second, 8 times the bytes; divide by 8", 1, "HDR 200 Gb/s").edit(
        "np.asarray(sizes_bytes", "8 * np.asarray(sizes_bytes"
    ),
    Mutant("no latency", "no latency", "the line is forced through zero; a message of no bytes takes alpha", 1).edit(
        _RESULT, "0.0, float((sizes @ sizes) / (sizes @ times))"
    ),
    Mutant(
        "absolute errors",
        "absolute errors",
        "absolute errors are squared, so that the largest message decides alone; divide each row by its time",
        1,
    )
    .edit("[1 / times, sizes / times]", "[np.ones_like(times), sizes]")
    .edit("(rows, np.ones_like(times)", "(rows, times"),
    Mutant(
        "two points", "two points", "the smallest and the largest message alone are used; use all of them", 1
    ).body("""
        beta = (sizes_bytes[-1] - sizes_bytes[0]) / (times_s[-1] - times_s[0])
        return times_s[0] - sizes_bytes[0] / beta, beta
    """),
    Mutant("eight messages", "raised", "LinAlgError", 1, "one size").edit("np.ones_like(times)", "np.ones(8)"),
    *(
        Mutant(name, name, says, 1).edit(old, new)
        for name, says, old, new in (
            ("swapped", "alpha and beta have changed places", _RESULT, f"float({_BETA}), float(alpha_s)"),
            ("slope", "that is the slope, seconds per byte; beta is 1 / slope", _BETA, "seconds_per_byte"),
            ("divided by 8", "bytes are divided by 8 as if they were bits; leave them", _BETA, f"{_BETA} / 8"),
            ("per kilobyte", "beta is in kilobytes per second; return bytes per second", _BETA, f"{_BETA} / 1e3"),
            ("first time", "alpha is the first message's time; its bytes are in it", "float(alpha_s)", "times_s[0]"),
            ("largest", "beta is of the largest message alone; alpha is in its time", _BETA, "sizes[-1] / times[-1]"),
            ("microseconds", "alpha is in microseconds; return seconds", "float(alpha_s)", "float(alpha_s) * 1e6"),
            ("milliseconds", "alpha is in milliseconds; return seconds", "float(alpha_s)", "float(alpha_s) * 1e3"),
        )
    ),
)
