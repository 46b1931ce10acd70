"""Lab 2: a race of all-reduces on these ranks: each checked, counted, predicted from the measured link, and timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab import collectives
from distlab.comm import mesh_groups
from distlab.comm.p2p import Receive, Send, exchange
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.plan import Link, Mesh
from simulator import bus_bytes_per_s, fit_steps, hierarchical_all_reduce_s
from simulator.hardware.cost import Steps, all_reduce_steps, steps_s
from simulator.units import format_bytes, format_bytes_per_s, format_s

CHECKED_LENGTH = 840  # whole chunks for up to 8 ranks: the bytes are exact fractions
LINK_BYTES = (1_024, 8_192, 65_536, 262_144, 1_048_576, 4_194_304)
LINK_REPEATS, LINK_ROUNDS = 7, 5


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Race ring, tree, halving-doubling, hierarchical and torch's own all-reduce over sizes.

    Attributes:
        sizes: bytes of the tensors.
        blocks: how often each is timed; all take turns, and the median counts.
        ranks_per_machine: ranks that hierarchical treats as one machine; 0: half of them where their number is even.
    """

    sizes: tuple[int, ...] = flag((4_096, 65_536, 1_048_576, 8_388_608), least=4, size=True)
    blocks: int = flag(9, least=1)
    ranks_per_machine: int = flag(0, least=0)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse machines of unequal size."""
        if num_ranks % (self.ranks_per_machine or 1):
            raise ValueError(
                f"--ranks-per-machine {self.ranks_per_machine} does not divide {num_ranks} ranks; pass a divisor of "
                f"{num_ranks}"
            )


class Links(NamedTuple):
    """What a message to a neighbour costs."""

    all_at_once: Link
    alone: Link


@dataclass(frozen=True)
class Contestant:
    """One way to all-reduce.

    Attributes:
        name: what the table calls it.
        all_reduce: sums a tensor over all ranks in place.
        most_bytes: what the rank that sends most sends, as a multiple of the tensor's bytes; None where no closed form
            is short enough to state.
        predict_s: seconds for so many bytes.
    """

    name: str
    all_reduce: Callable[[torch.Tensor], object]
    most_bytes: float | None
    predict_s: Callable[[float], float]


def run(lab: Lab[Settings]) -> None:
    """Measure the link, then check, count and time each contestant."""
    num_ranks = lab.member.world_size
    if num_ranks == 1:
        lab.report.note("One rank alone has nothing to reduce: start two or more for the race.")
    links = measure_links(lab) if num_ranks > 1 else None
    racing = [contestant for contestant in contestants(lab, links) if check(lab, contestant)]
    if links is not None:
        race(lab, racing)


def measure_links(lab: Lab[Settings]) -> Links:
    """Fit latency and bandwidth of a message when all ranks send to their neighbours at once, and when two ranks do.

    Ranks that share cores or wires slow each other down; a tree keeps most of them waiting, a ring none.
    """
    rank, num_ranks = lab.member.rank, lab.member.world_size
    fitted = []
    for what, members in (("all ranks at once", num_ranks), ("two ranks alone", 2)):
        times = []
        for size in LINK_BYTES:
            mine = torch.zeros(size, dtype=torch.uint8, device=lab.member.device)
            theirs = torch.empty_like(mine)
            measured = []
            for _ in range(LINK_REPEATS + 1):
                dist.barrier()
                start = lab.now()
                for _ in range(LINK_ROUNDS if rank < members else 0):
                    exchange(Receive(theirs, (rank - 1) % members), Send(mine, (rank + 1) % members))
                measured.append(lab.slowest(lab.now() - start) / LINK_ROUNDS)
            times.append(statistics.median(measured[1:]))  # the first opens the connection
        link = fit_steps(LINK_BYTES, times, Steps(1, 1.0), name=what)
        lines = [f"{format_s(p.latency_s)} + bytes / {format_bytes_per_s(p.bytes_per_s)}" for p in link.protocols]
        lab.report.say(f"A message to the neighbour, {what}: {', or '.join(lines)}")
        fitted.append(link)
    return Links(*fitted)


def contestants(lab: Lab[Settings], links: Links | None) -> list[Contestant]:
    """Return what races: the learner's functions where there are any, the library's elsewhere."""
    num_ranks = lab.member.world_size
    least, levels = 2 * (num_ranks - 1) / num_ranks, math.ceil(math.log2(num_ranks))

    def by(steps: Steps, *, alone: bool = False) -> Callable[[float], float]:
        if links is None:
            return lambda num_bytes: 0.0
        return lambda num_bytes: steps_s(num_bytes, steps, links.alone if alone else links.all_at_once)

    ring = collectives.ring_all_reduce
    if lab.is_mine("02.ring_reduce_scatter") or lab.is_mine("02.ring_all_gather"):
        scatter, gather = lab.function("02.ring_reduce_scatter"), lab.function("02.ring_all_gather")
        ring = _in_turn(scatter, gather)
    tree = collectives.tree_all_reduce
    if lab.is_mine("02.tree_broadcast"):
        tree = _in_turn(collectives.tree_reduce, lab.function("02.tree_broadcast"))
    halving = collectives.halving_doubling_all_reduce
    power = num_ranks & (num_ranks - 1) == 0
    if lab.is_mine("02.halving_doubling") and power:
        halving = lab.function("02.halving_doubling")
    return [
        Contestant("ring", ring, least, by(all_reduce_steps(num_ranks))),
        Contestant("tree", tree, float(levels), by(Steps(2 * levels, 2.0 * levels), alone=True)),
        Contestant(
            "halving-doubling", halving, least if power else None, by(all_reduce_steps(num_ranks, "halving_doubling"))
        ),
        *hierarchical(lab, links),
        Contestant("torch", dist.all_reduce, least, by(all_reduce_steps(num_ranks))),
    ]


def _in_turn(*parts: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    def all_reduce(tensor: torch.Tensor) -> None:
        for part in parts:
            part(tensor)

    return all_reduce


def hierarchical(lab: Lab[Settings], links: Links | None) -> list[Contestant]:
    """Return the two-level all-reduce, where the ranks can be cut into equal machines."""
    num_ranks = lab.member.world_size
    local_size = lab.settings.ranks_per_machine or (num_ranks // 2 if num_ranks % 2 == 0 else num_ranks)
    machines = num_ranks // local_size
    groups = mesh_groups(Mesh({"machine": machines, "local": local_size}))
    all_reduce = collectives.hierarchical_all_reduce
    if lab.is_mine("02.hierarchical"):
        all_reduce = lab.function("02.hierarchical")

    def predict_s(num_bytes: float) -> float:
        if links is None:
            return 0.0
        link = links.all_at_once
        return hierarchical_all_reduce_s(num_bytes, local_size, machines, intra_node=link, inter_node=link)

    inside, across = 2 * (local_size - 1) / local_size, 2 * (machines - 1) / machines / local_size
    name = f"hierarchical {machines} x {local_size}"
    return [
        Contestant(
            name, lambda tensor: all_reduce(tensor, groups["local"], groups["machine"]), inside + across, predict_s
        )
    ]


def check(lab: Lab[Settings], contestant: Contestant) -> bool:
    """Sum known numbers under the recorder: right on every rank, and no more bytes than the algorithm needs?"""
    rank, num_ranks = lab.member.rank, lab.member.world_size
    numbers = torch.arange(CHECKED_LENGTH, dtype=torch.float64, device=lab.member.device)
    tensor = numbers * (rank + 1)
    with lab.watched() as seen:
        contestant.all_reduce(tensor)
    right = lab.everywhere(torch.equal(tensor, numbers * (num_ranks * (num_ranks + 1) // 2)))
    lab.report.fact(f"{contestant.name}: right on every rank", right, True)
    assert seen.records is not None, "the block has ended"
    sent = max(seen.records.sent_bytes(r) + seen.records.ring_equivalent_bytes(r) for r in seen.records.ranks)
    what = f"{contestant.name}: most bytes sent by a rank, of {tensor.nbytes:,}"
    if contestant.most_bytes is None:
        lab.report.measured(what, sent, "B")
    else:
        lab.report.fact(what, sent, round(contestant.most_bytes * tensor.nbytes), "B")
    if not right:
        lab.report.note(f"{contestant.name} is wrong, so it does not race.")
    return right


def race(lab: Lab[Settings], racing: Sequence[Contestant]) -> None:
    """Time all contestants at all sizes in turns; report medians, who wins and who was predicted to."""
    for size in lab.settings.sizes:
        times = time_all(lab, racing, size)
        for contestant, seconds in zip(racing, times, strict=True):
            what = f"{format_bytes(size)}: {contestant.name}"
            lab.report.measured(what, seconds, "s", predicted=contestant.predict_s(size))
        own = [i for i, contestant in enumerate(racing) if contestant.name != "torch"]
        if own:
            winner, guess = min(own, key=times.__getitem__), min(own, key=lambda i: racing[i].predict_s(size))
            lab.report.note(f"{format_bytes(size)}: {racing[winner].name} wins; predicted: {racing[guess].name}.")
    largest = lab.settings.sizes[-1]
    for contestant, seconds in zip(racing, times, strict=True):
        bandwidth = bus_bytes_per_s(largest, seconds, lab.member.world_size)
        lab.report.measured(f"{format_bytes(largest)}: bus bandwidth of {contestant.name}", bandwidth, "B/s")
    lab.report.note("torch's own is predicted, and its bytes are counted, as a ring.")
    lab.report.note(
        "Predicted from the messages above: the tree's go two by two, all others' all at once; adding up is left out."
    )


def time_all(lab: Lab[Settings], racing: Sequence[Contestant], size: int) -> list[float]:
    """Return each contestant's median over blocks of the slowest rank's time."""
    generator = torch.Generator().manual_seed(lab.member.rank)
    source = torch.randn(max(1, size // 4), generator=generator).to(lab.member.device)
    tensor = source.clone()
    measured: list[list[float]] = [[] for _ in racing]
    for block in range(lab.settings.blocks + 1):
        for times, contestant in zip(measured, racing, strict=True):
            tensor.copy_(source)
            dist.barrier()
            start_ns = lab.now_ns()
            with lab.member.spans.span(f"{contestant.name}, {format_bytes(size)}", "F"):
                contestant.all_reduce(tensor)
                end_ns = lab.now_ns()
            if block > 0:  # the first warms up
                times.append(lab.slowest((end_ns - start_ns) / 1e9))
            if contestant is racing[0]:
                window = (start_ns, lab.now_ns())
    lab.mark_step(*window, title=f"One all-reduce of {format_bytes(size)}: {racing[0].name}")
    return [statistics.median(times) for times in measured]


if __name__ == "__main__":
    main("02", Settings, run)
