"""Time what a plan's steps call, as the techniques call it, so that these steps can be predicted.

Each kind of call gets a line of its own, fitted to its times, since on one machine kinds of call differ by more than
the theory of rings says. The plan says which, and each is timed on the groups of its axis, all groups at once: on 2 x 2
ranks two tensor groups sum at the same time, and share the wires. Replicas' all-reduces are those of `speed`.

Where gradients are compressed, the hook is timed too (`measure_codec`): seconds to encode and to decode a bucket,
without the sending. All ranks do it for so long that ranks which share a core take turns on it: one bucket alone is
over before the other ranks have woken up. So several buckets are encoded in a row (what `start` takes). Then the
exchanges finish, then all buckets are decoded (what `wait` takes). PowerSGD sends its second factor there, so the
predicted time of those calls is subtracted. Buckets of several sizes give a fixed time per bucket and a time per byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.comm.p2p import Receive, Send, start
from distlab.compression import make_hook
from distlab.context_parallel.all_to_all import trade
from distlab.measure.machine.fit import fit_line
from distlab.measure.machine.ranks import mean_over_ranks, now, time_calls
from distlab.plan import Cluster, Link, Plan
from distlab.plan.compression import Compression, exchanges
from distlab.tensor_parallel.async_calls import SequenceGather, SequenceScatterSum, Sum
from simulator import MeasuredCodec, fit_steps
from simulator.hardware.cost import Steps, all_reduce_steps, reduce_scatter_steps
from simulator.hardware.rank_layout import group_of
from simulator.units import to_s

MESSAGE_BYTES = (4_096, 32_768, 131_072, 524_288, 2_097_152)
ENOUGH_BYTES = 8_000_000  # a call is repeated until it sent so much, within limits
FEW, MANY = 3, 24
LEAST_S = 1e-9  # a part that takes no time needs a line too
BUCKET_REPEATS = 3  # of each bucket, after one that warms up
COLUMNS = 256
ROWS = (64, 384, 1536)  # buckets of 64 KiB, 384 KiB and 1.5 MiB in float32
IN_A_ROW = 12  # some 20 ms and more of work, several turns of the operating system's scheduler
SETTLE = 2.0  # exchanges are left this many times their predicted time to finish
MIN_SETTLE_S = 2e-3


def is_pipeline_alone(plan: Plan) -> bool:
    """Whether the plan is a pipeline and nothing else: no other axis, no sharding, recompute or precision."""
    is_plain = plan.recompute == "none" and plan.precision is None and plan.sharding.stage == 0
    return plan.pipeline == plan.world_size > 1 and is_plain


def is_data_parallel_alone(plan: Plan) -> bool:
    """Whether all ranks have replicas, sharded or not, without recompute or precision."""
    return plan.data == plan.world_size and plan.recompute == "none" and plan.precision is None


class CallTimes(NamedTuple):
    """Seconds of one kind of call, or of a part of it; the same on every rank.

    Attributes:
        steps: what the call is made of, for the fit.
        num_bytes: sizes that were timed: of the whole tensor; of an all-to-all, what one rank has.
        seconds: of a call of each size.
    """

    steps: Steps
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


Calls = Mapping[str, CallTimes]  # by kind of call, under the names that `simulate` takes


def links_of(calls: Calls) -> dict[str, Link]:
    """Fit a line to each kind's times."""
    links = {}
    for kind, times in calls.items():
        seconds = [max(LEAST_S, each) for each in times.seconds]
        links[kind] = fit_steps(times.num_bytes, seconds, times.steps, name=kind, source="fitted to timed calls")
    return links


def measure_messages(device: torch.device) -> CallTimes:
    """Time a message from each rank to the next, as a pipeline sends it; every rank calls this at the same time."""
    if dist.get_world_size() == 1:
        return CallTimes(Steps(1, 1.0), MESSAGE_BYTES, (LEAST_S,) * len(MESSAGE_BYTES))
    return times_of("send", [None], device)


def times_of(kind: str, groups: Sequence[ProcessGroup | None], device: torch.device) -> CallTimes:
    """Time a kind of call on each of these groups; take the mean over groups and ranks, which all call this."""
    sizes = [(size, max(FEW, min(MANY, ENOUGH_BYTES // size))) for size in MESSAGE_BYTES]
    rows = [[time_calls(_call(kind, size, group, device), n, device) for size, n in sizes] for group in groups]
    seconds = mean_over_ranks(np.mean(rows, axis=0).tolist(), device)
    return CallTimes(steps_of(kind, dist.get_world_size(groups[0])), MESSAGE_BYTES, tuple(seconds))


def kinds_of_calls(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Name the kinds of call that a step of the plan makes, and the axes on which to time each: those with most ranks.

    First come those inside passes, then messages between stages, then those for gradients: an all-reduce along data,
    expert and context; with sharding a gather and a scatter too.
    """
    halves = ("all_gather", "reduce_scatter", "all_reduce")
    kinds = {
        "tensor": halves if plan.sequence_parallel else ("all_reduce",),
        "context": ("send" if plan.context_kind == "ring" else "all_to_all", "all_reduce"),
        "expert": ("all_to_all", "all_reduce"),
        "pipeline": ("send",),
        "data": halves if plan.sharding.stage else ("all_reduce",) * (not is_data_parallel_alone(plan)),
    }
    axes: dict[str, list[str]] = {}
    for axis, each in kinds.items():
        for kind in each if getattr(plan, axis) > 1 else ():
            axes.setdefault(kind, []).append(axis)
    most = {kind: max(getattr(plan, axis) for axis in own) for kind, own in axes.items()}
    return {kind: tuple(axis for axis in own if getattr(plan, axis) == most[kind]) for kind, own in axes.items()}


def steps_of(kind: str, num_ranks: int) -> Steps:
    """Return what a call is made of."""
    if kind == "send":
        return Steps(1, 1.0)
    return all_reduce_steps(num_ranks) if kind == "all_reduce" else reduce_scatter_steps(num_ranks)


def _call(kind: str, num_bytes: int, group: ProcessGroup | None, device: torch.device) -> Callable[[], object]:
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(num_ranks, max(1, num_bytes // 4 // num_ranks), device=device)  # [t, S/t x H]
    sequence = rows.view(1, -1, 1)  # [1, S, 1]
    whole, arrives = rows.view(-1), torch.empty_like(rows.view(-1))

    def send() -> None:
        start(Receive(arrives, (rank - 1) % num_ranks), Send(whole, (rank + 1) % num_ranks), group=group).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: Sum(whole, group, waits=True).finish(),
        "all_gather": lambda: SequenceGather(rows[rank].view(1, -1, 1), group).finish(),
        "reduce_scatter": lambda: SequenceScatterSum(sequence, group).finish(),
        "all_to_all": lambda: trade(rows, group),
        "send": send,
    }
    return calls[kind]


def measure_codec(compression: Compression, cluster: Cluster, *, device: torch.device) -> MeasuredCodec:
    """Time encoding and decoding. Every rank calls it at the same time and gets the same result.

    Args:
        compression: what to time.
        cluster: the calibrated machine: how long an exchange takes.
        device: where the rank computes.
    """
    hook = make_hook(compression)
    rows = [_time_bucket(hook, number, cluster, compression, device) for number in range(len(ROWS))]
    means = mean_over_ranks([*(row[0] for row in rows), *(row[1] for row in rows)], device)
    sizes = [rows * COLUMNS * 4 for rows in ROWS]
    lines = (fit_line(sizes, each, relative=True) for each in (means[: len(ROWS)], means[len(ROWS) :]))
    return MeasuredCodec(compression, dist.get_world_size(), *chain(*lines))


def _time_bucket(
    hook: GradientHook, number: int, cluster: Cluster, compression: Compression, device: torch.device
) -> tuple[float, float]:
    """Return the median seconds of encoding and decoding a bucket of ROWS, a square-ish matrix and a vector."""
    rows = ROWS[number]
    shapes = ((rows - 1, COLUMNS), (COLUMNS,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(rows * COLUMNS, generator=generator).to(device)
    buckets = []
    for place in range(IN_A_ROW):
        buffer = torch.empty_like(values)
        gradients = (buffer[:-COLUMNS].view(shapes[0]), buffer[-COLUMNS:])
        buckets.append(GradientBucket(number * IN_A_ROW + place, buffer, gradients))
    replicas = group_of(cluster, range(dist.get_world_size()))
    *first, last = (to_s(replicas.exchange_ns(*call)) for call in exchanges(compression, shapes))
    before_s, later_s = (sum(first), last) if first else (last, 0.0)  # in `start`, and PowerSGD's second in `wait`
    settle_s = max(MIN_SETTLE_S, SETTLE * IN_A_ROW * before_s)
    times = []
    for repeat in range(BUCKET_REPEATS + 1):
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
