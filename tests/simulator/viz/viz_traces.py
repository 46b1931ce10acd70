"""Traces that break symmetry: jitter, late starts, overlapping buckets, a ring with uneven chunks."""

import numpy as np

from distlab.trace import Span, Trace

MS = 1_000_000


def data_parallel(num_ranks=4, jitter=0.0, origin_ns=0, num_buckets=6):
    generator = np.random.default_rng(0)

    def lasts(milliseconds):
        return int(milliseconds * MS * (1 + jitter * generator.standard_normal()))

    spans, ready, done = [], [], 0
    for rank in range(num_ranks):
        start = origin_ns + (rank * MS // 3 if jitter else 0)
        forward = start + lasts(40)
        ends = (forward + np.cumsum([lasts(80 / num_buckets) for _ in range(num_buckets)])).tolist()
        spans.append(Span(rank, "compute", "forward", "F", start, forward))
        spans.append(Span(rank, "compute", "backward", "B", forward, ends[-1]))
        ready.append(ends)
    for bucket in range(num_buckets):
        start = max(done, *(ends[bucket] for ends in ready)) if num_ranks > 1 else max(done, ready[0][bucket])
        done = start + lasts(9)
        for rank in range(num_ranks):
            issued = ready[rank][bucket] if jitter else start
            spans.append(Span(rank, "communication", f"all_reduce #{bucket}", "all_reduce", issued, done, 4_000_000))
    spans += [Span(rank, "compute", "optimizer", "optimizer", done, done + lasts(5)) for rank in range(num_ranks)]
    return Trace.from_spans(spans)


def grid(num_ranks, num_microbatches):
    """Forward and backward in turn on every rank: many spans, quickly made."""
    rank, index = np.divmod(np.arange(num_ranks * 2 * num_microbatches), 2 * num_microbatches)
    start = (index * 15 + rank * 10) * MS
    return Trace.from_columns(
        rank=rank,
        lane="compute",
        name=["F", "B"] * (len(rank) // 2),
        kind=["F", "B"] * (len(rank) // 2),
        start_ns=start,
        end_ns=start + np.where(index % 2, 15, 10) * MS,
        stage=rank,
        microbatch=index // 2,
    )


def ring(num_ranks=4, sizes=None, num_steps=None, whole=False, pieces=1):
    sizes = sizes or [4_000_000 + 4 * (index == 0) for index in range(num_ranks)]
    spans, now = [], 0
    for step in range(num_steps or 2 * (num_ranks - 1)):
        for rank in range(num_ranks):
            right, num_bytes = (rank + 1) % num_ranks, sizes[(rank - step) % num_ranks] // pieces
            num_bytes = sum(sizes) if whole and step and rank == 2 else num_bytes
            for piece in range(pieces):
                start = now + rank * 1000 + piece * 10_000
                spans.append(
                    Span(rank, "communication", f"send to {right} #{step}", "send", start, start + MS, num_bytes)
                )
                taken = (
                    right,
                    "communication",
                    f"recv from {rank} #{step}",
                    "recv",
                    start,
                    start + MS + 500,
                    num_bytes,
                )
                spans.append(Span(*taken))
        now += 2 * MS
    return Trace.from_spans(spans)
