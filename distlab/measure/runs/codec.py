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

import numpy as np
import torch
import torch.distributed as dist

from distlab.compression import make_hook
from distlab.gradient_hook import GradientBucket, GradientHook
from distlab.measure.machine.fit import fit_nonnegative
from distlab.measure.machine.ranks import mean_over_ranks, now
from distlab.plan import Cluster
from distlab.plan.compression import Compression, exchanges
from simulator import MeasuredCodec
from simulator.hardware.process_groups import group_of
from simulator.units import to_s

COLUMNS = 256
ROWS = (64, 384, 1536)  # buckets of 64 KiB, 384 KiB and 1.5 MiB in float32
IN_A_ROW = 12  # some 20 ms and more of work, several turns of the operating system's scheduler
SETTLE = 2.0  # exchanges are left this many times their predicted time to finish
MIN_SETTLE_S = 2e-3


def measure_codec(
    compression: Compression,
    cluster: Cluster,
    *,
    device: torch.device,
    repeats: int = 3,
) -> MeasuredCodec:
    """Time encoding and decoding. Every rank calls it at the same time and gets the same result.

    Args:
        compression: what to time.
        cluster: the calibrated machine: how long an exchange takes.
        device: where the rank computes.
        repeats: how often each bucket is timed, after one that warms up.
    """
    hook = make_hook(compression)
    rows = [
        _time_bucket(hook, compression, cluster, size=(index, rows), device=device, repeats=repeats)
        for index, rows in enumerate(ROWS)
    ]
    means = mean_over_ranks([*(row[0] for row in rows), *(row[1] for row in rows)], device)
    encode, decode = means[: len(ROWS)], means[len(ROWS) :]
    sizes = [rows * COLUMNS * 4 for rows in ROWS]
    return MeasuredCodec(compression, dist.get_world_size(), *_fit_line(sizes, encode), *_fit_line(sizes, decode))


def median_codec(codecs: Sequence[MeasuredCodec]) -> MeasuredCodec:
    """Combine measurements of one codec into one: of each bucket size the median time, fitted anew."""
    sizes = [rows * COLUMNS * 4 for rows in ROWS]
    encode = [float(np.median([codec.encode_s + size * codec.encode_s_per_byte for codec in codecs])) for size in sizes]
    decode = [float(np.median([codec.decode_s + size * codec.decode_s_per_byte for codec in codecs])) for size in sizes]
    first = codecs[0]
    return MeasuredCodec(first.compression, first.num_ranks, *_fit_line(sizes, encode), *_fit_line(sizes, decode))


def _time_bucket(
    hook: GradientHook,
    compression: Compression,
    cluster: Cluster,
    *,
    size: tuple[int, int],
    device: torch.device,
    repeats: int,
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
    replicas = group_of(cluster, range(dist.get_world_size()))
    *first, last = (to_s(replicas.exchange_ns(*call)) for call in exchanges(compression, shapes))
    later_s = last if first else 0.0
    settle_s = max(MIN_SETTLE_S, SETTLE * IN_A_ROW * (sum(first) or last))
    times = []
    for repeat in range(repeats + 1):
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


def _fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = fixed + bytes x rate, neither negative, with the least relative error."""
    x, y = np.array(sizes, float), np.maximum(np.array(seconds), 1e-9)
    fixed, rate = fit_nonnegative(np.stack([1 / y, x / y], axis=1), np.ones(len(y))).tolist()
    return fixed, rate
