"""Traces of data-parallel training with a known fault in it, or none: the event engine runs them, with noise.

Everything that differs between real runs is drawn: ranks, steps, layers, buckets, the network, noise, how far the
clocks are apart. `seeded(number)` returns the trace and the fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from distlab.trace import Span, Trace
from simulator.engine.event_engine import run
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, Graph

FAULTS = ("none", "straggler", "imbalance", "moving imbalance", "slow loader", "missing overlap", "small buckets")
KIND = {"moving imbalance": "imbalance"}
MS = 1_000_000
LEAST_COST = 0.08


@dataclass(frozen=True)
class Job:
    """One drawn training run; times in nanoseconds."""

    num_ranks: int
    num_steps: int
    forward_ns: tuple[int, ...]
    bucket_bytes: tuple[int, ...]
    latency_ns: int
    ns_per_byte: float
    update_ns: int
    data_ns: int
    noise: float
    overlaps: bool = True
    slow_rank: int = 0
    slow_passes: float = 1.0
    slow_update: float = 1.0
    spread: float = 0.0
    slow_data_ns: int = 0
    slow_data_ranks: tuple[int, ...] = ()
    slow_data_every: int = 1


class Seeded(NamedTuple):
    """A trace, its fault ("none", or the kind of its finding), the ranks to be named, and the fault's true cost."""

    trace: Trace
    fault: str
    ranks: tuple[int, ...]
    share: float


def draw(random: np.random.Generator) -> Job:
    """Draw a healthy run: its buckets overlap with backward; the network may still be the slower of the two."""
    layers = int(random.integers(4, 13))
    forward = random.uniform(0.3, 3.0) * MS * random.uniform(0.8, 1.25, layers)
    num_buckets = int(random.integers(4, min(layers, 8) + 1))
    sizes = random.uniform(0.5, 1.5, num_buckets)
    sizes *= random.uniform(1.2e6, 8e6) * num_buckets / sizes.sum()
    travel_ns = forward.sum() * 2 * random.uniform(0.2, 1.3)  # of all buckets
    latency_ns = random.uniform(0.01, 0.06) * travel_ns / num_buckets
    step_ns = forward.sum() * 3
    return Job(
        num_ranks=int(random.choice([2, 3, 4, 6, 8])),
        num_steps=int(random.integers(6, 13)),
        forward_ns=tuple(map(round, forward.tolist())),
        bucket_bytes=tuple(map(round, sizes.tolist())),
        latency_ns=round(latency_ns),
        ns_per_byte=(travel_ns - num_buckets * latency_ns) / sizes.sum(),
        update_ns=round(step_ns * random.uniform(0.01, 0.08)),
        data_ns=round(step_ns * random.uniform(0.0005, 0.015)),
        noise=random.uniform(0.005, 0.04),
    )


def break_it(job: Job, fault: str, random: np.random.Generator) -> tuple[Job, tuple[int, ...]]:
    """Put a fault into a run; return the ranks whose fault it is, () for all of them."""
    rank, step_ns = int(random.integers(job.num_ranks)), 3 * sum(job.forward_ns)
    if fault == "straggler":
        factor = random.uniform(1.15, 2.0)
        return replace(job, slow_rank=rank, slow_passes=factor, slow_update=factor), (rank,)
    if fault == "imbalance":
        return replace(job, slow_rank=rank, slow_passes=random.uniform(1.2, 2.0)), (rank,)
    if fault == "moving imbalance":
        return replace(job, spread=random.uniform(0.25, 0.5)), ()
    if fault == "slow loader":
        every = int(random.choice([1, 1, 1, 3]))
        ranks = (rank,) if random.random() < 0.6 else tuple(range(job.num_ranks))
        slow_ns = round(step_ns * random.uniform(0.15, 0.8) * every)
        named = ranks if len(ranks) < job.num_ranks else ()
        return replace(job, slow_data_ns=slow_ns, slow_data_ranks=ranks, slow_data_every=every), named
    if fault == "missing overlap":
        faster = replace(job, overlaps=False)
        while len(job.bucket_bytes) * job.latency_ns + sum(job.bucket_bytes) * faster.ns_per_byte < 0.25 * step_ns:
            faster = replace(faster, ns_per_byte=faster.ns_per_byte * 1.3)
        return faster, ()
    if fault == "small buckets":
        count = int(random.integers(60, 200))
        sizes = tuple(map(round, (random.uniform(0.2, 3.0, count) * 12_000).tolist()))
        # calls take longer than backward hides, and nearly all of it is their fixed cost
        latency_ns = round(step_ns * random.uniform(0.9, 1.6) / count)
        return replace(job, bucket_bytes=sizes, latency_ns=latency_ns, ns_per_byte=0.05 * latency_ns / 12_000), ()
    return job, ()


def simulate_job(job: Job, random: np.random.Generator) -> Trace:
    """Run all steps of all ranks; a call is noted from when its rank makes it, as a recorder does."""
    graph, notes = Graph(), []
    last_calls: dict[int, int] = {}
    updates: dict[int, int] = {}
    for step in range(job.num_steps):
        work = {rank: random.uniform(1 - job.spread, 1 + job.spread) for rank in range(job.num_ranks)}
        ready: list[list[int]] = []  # of each rank, the operation after which each bucket is full
        for rank in range(job.num_ranks):
            full = _passes(job, graph, notes, rank, step, work[rank], random)
            ready.append(full if job.overlaps else [full[-1]] * len(full))
        for index, num_bytes in enumerate(job.bucket_bytes):
            duration = round((job.latency_ns + num_bytes * job.ns_per_byte) * _noise(job, random))
            needs = [full[index] for full in ready]
            for rank in range(job.num_ranks):
                call = graph.add(rank, COMMUNICATION, duration, needs=needs)
                notes.append(("all_reduce", "communication", rank, step, call, needs[rank], num_bytes))
                last_calls[rank] = call
        for rank in range(job.num_ranks):
            factor = job.slow_update if rank == job.slow_rank else 1.0
            duration = round(job.update_ns * factor * _noise(job, random))
            updates[rank] = graph.add(rank, COMPUTE, duration, needs=[last_calls[rank]])
            notes.append(("optimizer", "compute", rank, step, updates[rank], -1, 0))
    times = run(graph)
    spans = []
    for name, lane, rank, step, number, made_after, num_bytes in notes:
        start, end = int(times.start_ns[number]), int(times.end_ns[number])
        if lane == "communication":
            start = int(times.end_ns[made_after])
            name_of_call, kind = f"{name} #{number}", name
        else:
            name_of_call = kind = name
        spans.append(Span(rank, lane, name_of_call, kind, start, end, num_bytes))
        if name == "optimizer":
            previous = [one.end_ns for one in spans if one.rank == rank and one.kind == "step"]
            spans.append(Span(rank, "step", f"step {step}", "step", previous[-1] if previous else 0, end))
            backward_end = max(one.end_ns for one in spans if one.rank == rank and one.kind == "B")
            if start > backward_end:
                spans.append(Span(rank, "wait", "wait", "wait", backward_end, start))
    return Trace.from_spans(spans)


def _passes(
    job: Job, graph: Graph, notes: list, rank: int, step: int, work: float, random: np.random.Generator
) -> list[int]:
    """Add a rank's data, forward and backward; return after which operation each bucket is full."""
    slow = work * (job.slow_passes if rank == job.slow_rank else 1.0)
    data_ns = job.data_ns * random.uniform(0.5, 1.5)
    if rank in job.slow_data_ranks and step % job.slow_data_every == 0:
        data_ns += job.slow_data_ns * random.uniform(0.8, 1.2)
    notes.append(("data", "compute", rank, step, graph.add(rank, COMPUTE, round(data_ns)), -1, 0))
    for duration in job.forward_ns:
        number = graph.add(rank, COMPUTE, round(duration * slow * _noise(job, random)))
        notes.append(("F", "compute", rank, step, number, -1, 0))
    layers = []
    for duration in reversed(job.forward_ns):
        parts = -(-len(job.bucket_bytes) // len(job.forward_ns))
        for _ in range(parts):
            layers.append(graph.add(rank, COMPUTE, round(2 * duration / parts * slow * _noise(job, random))))
            notes.append(("B", "compute", rank, step, layers[-1], -1, 0))
    return [layers[place] for place in np.linspace(1, len(layers), len(job.bucket_bytes)).round().astype(int) - 1]


def _noise(job: Job, random: np.random.Generator) -> float:
    return float(np.exp(random.normal(0.0, job.noise)))


def cured(job: Job, healthy: Job, fault: str) -> Job:
    """Return the broken run without its fault, and with the same network."""
    if fault == "missing overlap":
        return replace(job, overlaps=True)
    if fault == "small buckets":
        whole = sum(job.bucket_bytes)
        fewer = max(1, -(-whole // 1_000_000))
        return replace(job, bucket_bytes=(round(whole / fewer),) * fewer)
    return healthy


def seeded(number: int) -> Seeded:
    """Return the trace with this number: faults take turns, clocks are apart in every second one.

    Faults that truly cost less than LEAST_COST, since the network hides them, are drawn again.
    """
    random = np.random.default_rng([20, number])
    fault = FAULTS[number % len(FAULTS)]
    while True:
        healthy = draw(random)
        job, ranks = break_it(healthy, fault, random)
        trace = simulate_job(job, random)
        share = 1 - simulate_job(cured(job, healthy, fault), random).duration_s / trace.duration_s
        if fault == "none" or share >= LEAST_COST:
            break
    if number % 2:
        parts = [trace.select(trace.rank == rank) for rank in trace.ranks]
        offsets = [0, *(random.integers(-5_000, 5_000, len(parts) - 1) * MS).tolist()]
        trace = Trace.concatenate(part.shifted(offset) for part, offset in zip(parts, offsets, strict=True))
    return Seeded(trace, KIND.get(fault, fault), ranks, share)
