"""Time a compression hook on this machine's ranks: seconds to encode and to decode a bucket, without the sending.

All ranks do the same at the same time, as in a step, and for so long that ranks which share a core take turns on it:
one bucket alone is over before the other ranks have woken up. So several buckets are encoded in a row (what `start`
takes). Then the exchanges finish, then all buckets are decoded (what `wait` takes). PowerSGD sends its second factor
there, so the predicted time of those calls is subtracted. Buckets of several sizes give a fixed time per bucket and a
time per byte.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.compression import make_hook
from distlab.measure.machine.fit import fit_line
from distlab.measure.machine.ranks import mean_over_ranks, now
from distlab.plan import Cluster
from distlab.plan.compression import Compression, exchanges
from simulator import MeasuredCodec
from simulator.hardware.process_groups import group_of
from simulator.units import to_s

REPEATS = 3  # of each bucket, after one that warms up
COLUMNS = 256
ROWS = (64, 384, 1536)  # buckets of 64 KiB, 384 KiB and 1.5 MiB in float32
IN_A_ROW = 12  # some 20 ms and more of work, several turns of the operating system's scheduler
SETTLE = 2.0  # exchanges are left this many times their predicted time to finish
MIN_SETTLE_S = 2e-3


def measure_codec(compression: Compression, cluster: Cluster, *, device: torch.device) -> MeasuredCodec:
    """Time encoding and decoding. Every rank calls it at the same time and gets the same result.

    Args:
        compression: what to time.
        cluster: the calibrated machine: how long an exchange takes.
        device: where the rank computes.
    """
    hook = make_hook(compression)
    rows = [
        _time_bucket(hook, compression, cluster, size=(index, rows), device=device) for index, rows in enumerate(ROWS)
    ]
    means = mean_over_ranks([*(row[0] for row in rows), *(row[1] for row in rows)], device)
    sizes = [rows * COLUMNS * 4 for rows in ROWS]
    lines = (fit_line(sizes, each, relative=True) for each in (means[: len(ROWS)], means[len(ROWS) :]))
    return MeasuredCodec(compression, dist.get_world_size(), *chain(*lines))


def _time_bucket(
    hook: GradientHook, compression: Compression, cluster: Cluster, *, size: tuple[int, int], device: torch.device
) -> tuple[float, float]:
    """Return the median seconds of encoding and decoding one bucket, a square-ish matrix and a vector."""
    index, rows = size
    shapes = ((rows - 1, COLUMNS), (COLUMNS,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(rows * COLUMNS, generator=generator).to(device)
    buckets = []
    for place in range(IN_A_ROW):
        buffer = torch.empty_like(values)
        gradients = (buffer[:-COLUMNS].view(shapes[0]), buffer[-COLUMNS:])
        buckets.append(GradientBucket(index * IN_A_ROW + place, buffer, gradients))
    before_s, later_s = _wire_s(compression, cluster, shapes)
    settle_s = max(MIN_SETTLE_S, SETTLE * IN_A_ROW * before_s)
    times = []
    for repeat in range(REPEATS + 1):
        for bucket in buckets:
            bucket.buffer.copy_(values)
        dist.barrier()
        begin = now(device)
        pending = [hook.start(bucket, None) for bucket in buckets]
        encoded = now(device)
        time.sleep(settle_s)
        dist.barrier()
        come = now(device)
        for one in pending:
            one.wait()
        decoded = now(device)
        if repeat > 0:
            times.append(((encoded - begin) / IN_A_ROW, max(0.0, (decoded - come) / IN_A_ROW - later_s)))
    encode, decode = np.median(times, axis=0).tolist()
    return encode, decode


def _wire_s(compression: Compression, cluster: Cluster, shapes: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the predicted seconds of a bucket's exchanges: those that `start` begins, and PowerSGD's in `wait`."""
    replicas = group_of(cluster, range(dist.get_world_size()))
    *first, last = (to_s(replicas.exchange_ns(*call)) for call in exchanges(compression, shapes))
    return (sum(first), last) if first else (last, 0.0)
