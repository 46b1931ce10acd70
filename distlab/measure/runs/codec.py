"""Time a compression hook on this machine's ranks: seconds to encode and to decode a bucket, without the sending.

All ranks do the same at the same time, as in a step, and for so long that ranks which share a core take turns on it:
one bucket alone is over before the other ranks have woken up. So several buckets are encoded in a row (what `start`
takes). Then the exchanges finish, then all buckets are decoded (what `wait` takes). PowerSGD sends its second factor
there, so the predicted time of those calls is subtracted. Buckets of several sizes give a fixed time per bucket and a
time per byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.compression import make_hook
from distlab.data_parallel import DataParallel
from distlab.gradient_hook import GradientBucket, GradientHook, Pending
from distlab.measure.machine.fit import fit_nonnegative
from distlab.measure.machine.ranks import mean_over_ranks, now
from distlab.models import GPT
from distlab.plan import Cluster, Plan
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

Result = TypeVar("Result")


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


class StepWithCodec:
    """Train a model with a compression hook that is timed. Every rank makes one, and calls it with the others.

    It is a gradient hook itself: it stands between DataParallel and the codec with a clock.

    Attributes:
        bucket_bytes: bytes of the gradients of each bucket of the last step.
    """

    def __init__(self, model: GPT, tokens: Tensor, plan: Plan) -> None:
        if plan.compression is None:
            raise ValueError(f"{plan} compresses nothing; pass a plan with compression")
        self.compression, self.model, self.tokens = plan.compression, model, tokens
        self.bucket_bytes: list[int] = []
        self._shapes: list[list[tuple[int, ...]]] = []  # of the gradients of each bucket of this step
        self._seconds = 0.0  # of this step's encoding and decoding, with what PowerSGD sends in between
        self._codec = make_hook(plan.compression)
        self._replica = DataParallel(
            model, bucket_bytes=plan.bucket_bytes, first_bucket_bytes=plan.first_bucket_bytes, hook=self
        )

    def codec_s(self, cluster: Cluster, *, repeats: int) -> float:
        """Return the median seconds of a step that encoding and decoding take, after one step that warms up.

        The exchanges finish before the first bucket is decoded, so that no rank waits for one.
        """
        return median([self._step(cluster) for _ in range(repeats + 1)][1:])

    def _step(self, cluster: Cluster) -> float:
        self._seconds, self._shapes, self.bucket_bytes = 0.0, [], []
        self._replica.zero_grad()
        dist.barrier()
        self.model.loss(self.model(self.tokens), self.tokens).backward()
        before_s = sum(_wire_s(self.compression, cluster, shapes)[0] for shapes in self._shapes)
        time.sleep(max(MIN_SETTLE_S, SETTLE * before_s))
        dist.barrier()
        self._replica.synchronize()
        later_s = sum(_wire_s(self.compression, cluster, shapes)[1] for shapes in self._shapes)
        return max(0.0, self._seconds - later_s)

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Encode a bucket, timed."""
        self._shapes.append([tuple(gradient.shape) for gradient in bucket.gradients])
        self.bucket_bytes.append(bucket.buffer.nbytes)
        pending = self._timed(lambda: self._codec.start(bucket, group))
        return _Timed(lambda: self._timed(pending.wait))

    def state_dict(self) -> dict[str, Any]:
        """Return the codec's state."""
        return self._codec.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the codec its state."""
        self._codec.load_state_dict(state_dict)

    def _timed(self, act: Callable[[], Result]) -> Result:
        begin = now(self.tokens.device)
        result = act()
        self._seconds += now(self.tokens.device) - begin
        return result


class _Timed(NamedTuple):
    wait: Callable[[], object]


def _fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = fixed + bytes x rate, neither negative, with the least relative error."""
    x, y = np.array(sizes, float), np.maximum(np.array(seconds), 1e-9)
    fixed, rate = fit_nonnegative(np.stack([1 / y, x / y], axis=1), np.ones(len(y))).tolist()
    return fixed, rate
