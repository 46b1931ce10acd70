"""Lab 1: what a message costs between any two ranks of this machine, and what follows for a token that goes around."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.p2p import Receive, Send, exchange
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.course.lab.report import grid
from simulator import fit_steps
from simulator.hardware.cost import Steps
from simulator.hardware.fit import relative_errors
from simulator.units import format_bytes_per_s, format_s


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Measure latency and bandwidth between all pairs of ranks, fit them, and send a token around.

    Attributes:
        sizes: bytes of the messages, at least two different ones.
        rounds: round trips in one measurement of a pair.
        repeats: measurements of each pair and size, of which the median counts.
        laps: how often the token goes around.
    """

    sizes: tuple[int, ...] = flag((8, 4_096, 65_536, 1_048_576, 4_194_304), least=1, size=True)
    rounds: int = flag(10, least=1)
    repeats: int = flag(5, least=1)
    laps: int = flag(20, least=1)

    def __post_init__(self) -> None:
        if len(set(self.sizes)) < 2:
            raise ValueError(
                f"--sizes has {len(set(self.sizes))} different sizes; two or more tell latency from bandwidth"
            )


class Pair(NamedTuple):
    """What the messages between two ranks cost.

    Attributes:
        times_s: median seconds of one message, for each of the sizes.
        latency_s: fitted alpha.
        bytes_per_s: fitted beta.
    """

    times_s: tuple[float, ...]
    latency_s: float
    bytes_per_s: float


def run(lab: Lab[Settings]) -> None:
    """Measure on every rank."""
    num_ranks = lab.member.world_size
    check_shift(lab)
    if num_ranks == 1:
        lab.report.note("One rank alone sends nothing: start two or more to measure messages.")
        return
    times_s = measure_pairs(lab)
    pairs = fit_pairs(lab, times_s) if lab.member.rank == 0 else {}  # rank 0 speaks for all
    if pairs:
        report_pairs(lab, pairs)
    pass_token(lab, pairs)


def check_shift(lab: Lab[Settings]) -> None:
    """Every rank sends its number to the next; each must hold its predecessor's."""
    rank, num_ranks = lab.member.rank, lab.member.world_size
    shift = lab.function("01.shift")
    mine = torch.full((1000,), float(rank), dtype=torch.float64, device=lab.member.device)
    with lab.watched() as seen:
        got = shift(mine)
    wanted = torch.full_like(mine, (rank - 1) % num_ranks)
    right = isinstance(got, torch.Tensor) and got.shape == wanted.shape and bool((got == wanted).all())
    lab.report.fact("shift: every rank holds the tensor of the rank before", lab.everywhere(right), True)
    assert seen.records is not None, "the block has ended"
    sent = max(seen.records.sent_bytes(r) for r in seen.records.ranks)
    lab.report.fact("shift: bytes sent per rank", sent, 8_000 if num_ranks > 1 else 0, "B")


def measure_pairs(lab: Lab[Settings]) -> Tensor:
    """Time every pair by itself; return the seconds of one message, a row for each pair and a column for each size.

    A rank measures with each higher rank, then gives the turn to the next one. The others wait for a message meanwhile,
    which costs nothing. A collective after each pair would do, too, but its price grows with the square of the ranks.
    """
    settings, device, rank = lab.settings, lab.member.device, lab.member.rank
    ping_pong, turn = lab.function("01.ping_pong"), torch.zeros(1, device=device)
    with lab.watched():  # a learner's ping-pong that hangs is told here
        for _, partner in partners(lab):
            ping_pong(torch.zeros(settings.sizes[0], dtype=torch.uint8, device=device), partner, 1)
    num_ranks = lab.member.world_size
    times_s = torch.zeros(num_ranks * (num_ranks - 1) // 2, len(settings.sizes), dtype=torch.float64, device=device)
    for number, partner in partners(lab):
        if partner == rank + 1 and rank > 0:
            exchange(Receive(turn, rank - 1))
        for index, size in enumerate(settings.sizes):
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            with lab.member.spans.span(f"ping-pong of {size} bytes", "wait"):
                ping_pong(message, partner, 1)  # warms up: the first message opens the connection
                measured = [ping_pong(message, partner, settings.rounds) for _ in range(settings.repeats)]
            times_s[number, index] = statistics.median(measured)
        if partner == num_ranks - 1 and rank < num_ranks - 2:
            exchange(Send(turn, rank + 1))
    dist.all_reduce(times_s)  # of a pair two ranks measured, and the others are at zero
    return times_s / 2


def partners(lab: Lab[Settings]) -> Iterator[tuple[int, int]]:
    """Yield this rank's pairs, in an order in which all can meet: number of the pair, and the partner."""
    for number, pair in enumerate(itertools.combinations(range(lab.member.world_size), 2)):
        if lab.member.rank in pair:
            yield number, sum(pair) - lab.member.rank


def fit_pairs(lab: Lab[Settings], times_s: Tensor) -> dict[tuple[int, int], Pair]:
    """Fit latency and bandwidth to each pair's times."""
    fit, sizes = lab.function("01.fit"), lab.settings.sizes
    of_pair = zip(itertools.combinations(range(lab.member.world_size), 2), times_s.tolist(), strict=True)
    return {pair: Pair(tuple(row), *fit(sizes, tuple(row))) for pair, row in of_pair}


def report_pairs(lab: Lab[Settings], pairs: dict[tuple[int, int], Pair]) -> None:
    """Lay out the matrices; then the median pair, by size, and the line that was fitted to it."""
    sizes, num_ranks = lab.settings.sizes, lab.member.world_size
    between = {(a, b): pair for (a, b), pair in pairs.items()} | {(b, a): pair for (a, b), pair in pairs.items()}
    latencies = [[between[a, b].latency_s if a != b else None for b in range(num_ranks)] for a in range(num_ranks)]
    rates = [[between[a, b].bytes_per_s if a != b else None for b in range(num_ranks)] for a in range(num_ranks)]
    lab.report.say(grid("latency", [["-" if s is None else format_s(s) for s in row] for row in latencies]))
    lab.report.say(grid("bandwidth", [["-" if r is None else format_bytes_per_s(r) for r in row] for row in rates]))
    middle = median_pair(list(pairs.values()))
    for size, time_s in zip(sizes, middle.times_s, strict=True):
        lab.report.measured(
            f"message of {size:,} bytes", time_s, "s", predicted=middle.latency_s + size / middle.bytes_per_s
        )
    lab.report.measured("latency (alpha), median pair", middle.latency_s, "s")
    lab.report.measured("bandwidth (beta), median pair", middle.bytes_per_s, "B/s")
    lab.report.measured(
        "slowest pair over the median, longest message",
        max(p.times_s[-1] for p in pairs.values()) / middle.times_s[-1],
        "x",
    )
    link = fit_steps(sizes, middle.times_s, Steps(1, 1.0))
    worst = float(abs(relative_errors(sizes, middle.times_s, link, Steps(1, 1.0))).max())
    lab.report.note(f"The simulator's fit, which may switch protocols by size, is off by {worst:.0%} at most.")


def median_pair(pairs: list[Pair]) -> Pair:
    """Return the medians over pairs."""
    columns = zip(*(pair.times_s for pair in pairs), strict=True)
    return Pair(
        tuple(statistics.median(column) for column in columns),
        statistics.median(pair.latency_s for pair in pairs),
        statistics.median(pair.bytes_per_s for pair in pairs),
    )


def pass_token(lab: Lab[Settings], pairs: dict[tuple[int, int], Pair]) -> None:
    """Send a number around the ring; each rank adds its own, and one hop should cost one latency."""
    rank, num_ranks, laps = lab.member.rank, lab.member.world_size, lab.settings.laps
    token = torch.zeros(1, dtype=torch.float64, device=lab.member.device)
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    lap_s = []
    for _ in range(laps):
        dist.barrier()
        start = lab.now()
        if rank > 0:
            exchange(Receive(token, before))
        token += rank
        exchange(Send(token, after))
        if rank == 0:
            exchange(Receive(token, before))
        lap_s.append(lab.now() - start)
    hop_s = statistics.median(lap_s) / num_ranks  # rank 0's laps: from its send until the token is back
    dist.broadcast(token, 0)
    lab.report.fact(f"token after {laps} laps", int(token), laps * num_ranks * (num_ranks - 1) // 2)
    if pairs:
        latency_s = statistics.median(pair.latency_s + 8 / pair.bytes_per_s for pair in pairs.values())
        lab.report.measured("one hop of the token", hop_s, "s", predicted=latency_s)


if __name__ == "__main__":
    main("01", Settings, run)
