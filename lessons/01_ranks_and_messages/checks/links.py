"""Links: the time of a message, and the latency and bandwidth that fit measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from distlab_lesson_01.checks.shared import deadlock, from_scratch
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.traffic import calls

if TYPE_CHECKING:
    from distlab.comm import RankError
    from distlab.comm.record.read import Call

ROUNDS = 12
SIZES = tuple(float(4**k) for k in range(5, 13))  # 1 KiB to 16 MiB
LINKS = ((20e-6, 2e9), (5e-6, 25e9))  # alpha in seconds, beta in bytes per second
NOISE = (1.06, 0.95, 1.03, 0.94, 1.05, 0.97, 1.02, 0.96)  # a measured time over the true one
UNITS = (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9))
Floats = Sequence[float]


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
    if any(not call.end_ns for call in receives):
        yield Fault("not waited", f"rank {rank} does not wait for what it receives; call wait() in every round")
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
    """Compare the returned number with the time of the whole call (too long) and of the messages (too short).

    A right number lies between the two however busy the machine is: the clock is read inside the call, around the
    messages. So a loaded machine cannot make it wrong.
    """
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
        yield Fault("not divided", f"{got}; divide by their number, 2 * rounds")
    elif ratio > 0.75 * ROUNDS:
        yield Fault("all rounds", f"{got}: that is the time of all rounds one way; divide by 2 * rounds, not by 2")
    elif ratio > 1.1:
        yield Fault("round trip", f"{got}: that is a whole round trip, there and back; divide by 2 * rounds")
    elif seconds < 0.6 * window_s / (2 * ROUNDS):
        yield Fault("too short", f"{got}; read the clock before the first message and after the last answer")


def ping_pong_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a deadlock of partners."""
    advice = "Of two partners exactly one sends first: let the lower rank do it (rank < partner), whichever ranks they"
    return deadlock(error, world_size, f"{advice} are")


def ping_pong_budget(evidence: Evidence) -> list[str]:
    """Say what was played and measured."""
    milliseconds, megabytes = evidence.results[0][0] * 1e3, evidence.records.sent_bytes(0) / ROUNDS / 1e6
    return [f"{ROUNDS} rounds, {ROUNDS} messages each way; {milliseconds:.2f} ms for {megabytes:.2f} MB"]


def fit_cases() -> list[tuple[list[float], list[float]]]:
    """Return two exact links, and the first one again as if measured."""
    exact = [(list(SIZES), [alpha + size / beta for size in SIZES]) for alpha, beta in LINKS]
    return [*exact, (list(SIZES), [seconds * noise for seconds, noise in zip(exact[0][1], NOISE, strict=True)])]


def drive_fit(fn: Callable[[Floats, Floats], Any]) -> list[Any]:
    """Fit every case."""
    return [fn(sizes, times) for sizes, times in fit_cases()]


def judge_fit(evidence: Evidence) -> Iterator[Fault]:
    """Look at the exact links first: their numbers tell what was confused with what."""
    pairs = []
    for result in evidence.results[0]:
        try:
            alpha_s, beta = (float(number) for number in result)
        except (TypeError, ValueError):
            advice = "return two numbers: alpha in seconds, beta in bytes per second"
            yield Fault("not a pair", f"fit returns {result!r}; {advice}")
        pairs.append((alpha_s, beta))
    for (alpha_s, beta), link in zip(pairs, LINKS, strict=False):
        yield from _judge_link(alpha_s, beta, *link)
    yield from _judge_noisy(*pairs[2])


def _is_near(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-6 * abs(want)


def _judge_link(alpha_s: float, beta: float, true_alpha_s: float, true_beta: float) -> Iterator[Fault]:
    """Name what stands where alpha or beta should, for times without noise."""
    if _is_near(alpha_s, true_alpha_s) and _is_near(beta, true_beta):
        return
    true = f"alpha = {true_alpha_s:g} s, beta = {true_beta:g} B/s"
    got = f"on exact times of {true} fit returns ({alpha_s:.6g}, {beta:.6g})"
    if _is_near(beta, true_alpha_s) or (_is_near(alpha_s, true_beta) or _is_near(alpha_s, 1 / true_beta)):
        yield Fault("swapped", f"{got}: alpha and beta have changed places; return (alpha, beta)")
    elif _is_near(beta, 1 / true_beta):
        advice = "the second number is the slope, seconds per byte; beta is 1 / slope, bytes per second"
        yield Fault("slope", f"{got}: {advice}")
    elif _is_near(beta, 8 * true_beta):
        yield Fault("bits", f"{got}: that is bits per second, 8 times the bytes; divide by 8")
    elif _is_near(beta, true_beta / 8):
        yield Fault("bits", f"{got}: the bytes were divided by 8 as if they were bits; leave them as they are")
    elif alpha_s == 0:
        yield Fault("no latency", f"{got}: the line was forced through zero; a message of no bytes still takes alpha")
    elif _is_near(alpha_s, 1e3 * true_alpha_s) or _is_near(alpha_s, 1e6 * true_alpha_s):
        yield Fault("not seconds", f"{got}: alpha is {alpha_s / true_alpha_s:.0f}x too large; return it in seconds")
    else:
        yield Fault("not the line", f"{got}; the line through these points fits them exactly")


def _judge_noisy(alpha_s: float, beta: float) -> Iterator[Fault]:
    """Name a fit of something else than relative errors, for times with noise of some per cent."""
    sizes, times = (np.array(column) for column in fit_cases()[2])
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    if abs(alpha_s / start - 1) < 1e-4 and abs(beta * slope - 1) < 1e-4:
        return
    want = f"({start:.4g}, {1 / slope:.4g})"
    got = f"exact times fit, but times with 6 % noise give ({alpha_s:.4g}, {beta:.4g}), expected {want}"
    plain_slope, plain_start = np.polyfit(sizes, times, 1)
    ends_slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    if abs(beta * ends_slope - 1) < 1e-4:
        yield Fault("two points", f"{got}: only the smallest and the largest message were used; use all {len(sizes)}")
    elif abs(alpha_s - plain_start) < 1e-4 * abs(plain_start) and abs(beta * plain_slope - 1) < 1e-4:
        words = "absolute errors were squared, so the largest message decides alone and alpha is left to chance"
        yield Fault("absolute errors", f"{got}: {words}; divide each row by its time")
    else:
        yield Fault("not least squares", f"{got}; make the sum of ((alpha + size / beta) / time - 1)^2 smallest")


def fit_budget(evidence: Evidence) -> list[str]:
    """Say how well the noisy times were fitted."""
    alpha_s, beta = evidence.results[0][2]
    return [f"from times with 6 % noise: alpha {alpha_s * 1e6:.1f} us (true 20), beta {beta / 1e9:.2f} GB/s (true 2)"]


_THERE, _BACK = "dist.send(tensor, partner)", "dist.recv(answer, partner)"
WRONG_PING_PONGS = (
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
)
_RESULT = "float(alpha_s), float(1 / seconds_per_byte)"
WRONG_FITS = (
    Mutant("alpha and beta swapped", "swapped", "changed places", 1, "common").edit(
        _RESULT, "float(1 / seconds_per_byte), float(alpha_s)"
    ),
    Mutant("slope for beta", "slope", "1 / slope", 1, "common").edit("1 / seconds_per_byte", "seconds_per_byte"),
    Mutant("bits for bytes", "bits", "divide by 8", 1, "HDR 200 Gb/s read as 200 GB/s").edit(
        "np.asarray(sizes_bytes", "8 * np.asarray(sizes_bytes"
    ),
    Mutant("no latency", "no latency", "through zero", 1, "size over time").edit(
        _RESULT, "0.0, float((sizes @ sizes) / (sizes @ times))"
    ),
    Mutant("absolute errors", "absolute errors", "divide each row by its time", 1, "common")
    .edit("[1 / times, sizes / times]", "[np.ones_like(times), sizes]")
    .edit("(rows, np.ones_like(times)", "(rows, times"),
    Mutant("two points", "two points", "only the smallest and the largest", 1, "common").body("""
        beta = (sizes_bytes[-1] - sizes_bytes[0]) / (times_s[-1] - times_s[0])
        return times_s[0] - sizes_bytes[0] / beta, beta
    """),
)
