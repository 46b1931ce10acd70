"""What pictures are drawn of: traces that break symmetry, recorded calls, weights, and choices of experts."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distlab.comm.record.read import Call
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
    start, kinds = (index * 15 + rank * 10) * MS, ["F", "B"] * (len(rank) // 2)
    words = {"lane": "compute", "name": kinds, "kind": kinds, "stage": rank, "microbatch": index // 2}
    return Trace.from_columns(rank=rank, start_ns=start, end_ns=start + np.where(index % 2, 15, 10) * MS, **words)


def ring(num_ranks=4, num_steps=None, whole=False):
    """Calls of a ring; `whole`: rank 2 sends on whole tensors."""
    sizes = [4_000_000 + 4 * (index == 0) for index in range(num_ranks)]
    calls, now = [], 0
    for step in range(num_steps or 2 * (num_ranks - 1)):
        for rank in range(num_ranks):
            right, start = (rank + 1) % num_ranks, now + rank * 1000
            num_bytes = sum(sizes) if whole and step and rank == 2 else sizes[(rank - step) % num_ranks]
            calls.append(call(rank, "send", right, (start, start, start + MS), num_bytes=num_bytes))
            calls.append(call(right, "recv", rank, (start, start, start + MS + 500), num_bytes=num_bytes))
        now += 2 * MS
    return calls


def call(rank, op, peer, times, **other):
    """Return a recorded call; `times` are when it was made, when the rank began to wait, and its end (0: never)."""
    usual = {"number": 1, "group": (0, 1), "num_bytes": 8, "state": "done" if times[2] else "waiting", "channel": 7}
    ends = dict(zip(("start_ns", "wait_ns", "end_ns"), times, strict=True))
    return Call(**({"rank": rank, "op": op, "peer": peer, "what": "", "site": "", "via": ""} | usual | ends | other))


def path_of_node():
    """Return node: PATH's, or playwright's own; without one the test is skipped."""
    node, own = shutil.which("node"), importlib.util.find_spec("playwright")
    node = node or (own and Path(own.origin).with_name("driver") / "node")
    return node or pytest.skip("there is no node: install it, or playwright, which brings one")


def ping(delay=1):
    """Rank 0 sends and waits for the answer; rank 1 receives and answers."""
    at = [0, 10 * delay, 11 * delay, 12 * delay, 30 * delay, 31 * delay, 45 * delay]
    return [
        call(0, "send", 1, (at[0], at[0], at[2]), channel=1),
        call(1, "recv", 0, (at[1], at[1], at[3]), channel=1),
        call(1, "send", 0, (at[4], at[4], at[6]), channel=2),
        call(0, "recv", 1, (at[3], at[3], at[5]), channel=2),
    ]


def split(dim, *sections):
    return SimpleNamespace(dim=dim, sections=sections)


SHAPES = {  # of each weight, and how it is cut
    "token_embedding.weight": ((12, 4), split(0, 12)),
    "blocks.0.norm.weight": ((4,), None),
    "blocks.0.attention.query_key_value.weight": ((12, 4), split(0, 4, 4, 4)),
    "blocks.0.attention.query_key_value.bias": ((12,), split(0, 4, 4, 4)),
    "blocks.0.attention.output.weight": ((4, 4), split(1, 4)),
    "blocks.0.attention.output.bias": ((4,), None),
    "blocks.0.feed_forward.widen.weight": ((16, 4), split(0, 16)),
    "blocks.0.feed_forward.output.weight": ((4, 16), split(1, 16)),
    "blocks.1.feed_forward.output.weight": ((4, 16), split(1, 16)),
}
SPLITS = {name: how for name, (_, how) in SHAPES.items() if how}


def weights():
    generator = np.random.default_rng(1)
    return {name: generator.normal(size=shape) for name, (shape, _) in SHAPES.items()}


def cut(num_ranks):
    """Cut the weights as SPLITS say: what each rank holds."""
    parts = [weights() for _ in range(num_ranks)]
    for name, one in SPLITS.items():
        sections = np.split(weights()[name], np.cumsum(one.sections)[:-1], axis=one.dim)
        pieces = zip(*(np.split(section, num_ranks, axis=one.dim) for section in sections), strict=True)
        for part, own in zip(parts, pieces, strict=True):
            part[name] = np.concatenate(own, axis=one.dim)
    return parts


def by_hand(rank=0, late=0):
    """One rank: forward 10 ms, backward 40, two all-reduces of 15: from 30 (hidden) and from 45 (5 hidden, 10 not)."""
    spans = [
        Span(rank, "compute", "forward", "F", 0, 10 * MS),
        Span(rank, "compute", "backward", "B", 10 * MS, 50 * MS),
        Span(rank, "communication", "all_reduce bucket 0", "all_reduce", (30 + late) * MS, 45 * MS, 100),
        Span(rank, "communication", "all_reduce bucket 1", "all_reduce", (46 + late) * MS, 61 * MS, 300),
        Span(rank, "compute", "synchronize", "wait", 50 * MS, 61 * MS),
        Span(rank, "compute", "optimizer", "optimizer", 61 * MS, 70 * MS),
    ]
    return Trace.from_spans(spans)


def choices(num_ranks=3, tokens=7, top_k=2):
    generator = np.random.default_rng(3)
    liked = np.linspace(1.5, 0, 6)
    return [np.argsort(-(liked + generator.gumbel(size=(tokens, 6))), axis=1)[:, :top_k] for _ in range(num_ranks)]


def within(experts, places):
    """Return which choices of one rank find room, first choices first: [T, K]."""
    kept, taken = np.zeros(experts.shape, bool), np.zeros(6, int)
    for choice in range(experts.shape[1]):
        for token, expert in enumerate(experts[:, choice]):
            kept[token, choice] = taken[expert] < places
            taken[expert] += 1
    return kept
