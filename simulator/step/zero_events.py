"""What sharding stages 1 and 2 (ZeRO) add to the end of a step.

The ranks tell one another of faulty gradients, and each updates its own part of the parameters; then each bucket's
parameters are gathered. Stage 2 has scattered gradients in earlier micro-batches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.pipeline.schedule_arrays import F
from simulator.stage.stage import Stage
from simulator.stage.step_times import BucketTimes, ShardCall, Timing, call_of
from simulator.step.trace import exchanges


def add_zero_calls(timing: Timing, stages: Sequence[Stage], *, gathers_ahead: bool = False) -> Timing:
    """Add what follows the backward under stages 1 and 2: copies to the host, the update, gathers of parameters.

    With `gathers_ahead` gathers run under the first forwards of the next step; what those do not hide is shown behind
    the update, in place of the whole.
    """
    updates, calls = [], []
    first_ns = _first_forwards(timing, len(stages)) if gathers_ahead else []
    for rank, own in enumerate(timing.finishing):
        begin, free, added = timing.optimizer[rank][0], 0, []
        for faults in (stages[stage].faults for stage in own):
            if faults is not None:
                added.append(call_of("scatter", "all_reduce faults", faults, (begin, begin + faults.duration_ns)))
                begin += faults.duration_ns
        buckets = [bucket for stage in own for bucket in stages[stage].buckets]
        for bucket, times in zip(buckets, timing.buckets_of(rank), strict=True):
            if bucket.save is not None:
                free = max(free, times.unpack[1]) + bucket.save.duration_ns
                name = bucket.name.replace("reduce_scatter", "to host", 1)
                added.append(call_of("host", name, bucket.save, (free - bucket.save.duration_ns, free)))
        update = (max(begin, free), max(begin, free) + sum(stages[stage].optimizer_ns for stage in own))
        wire = up = started = update[1]
        shown = _shown(stages, own, first_ns) if gathers_ahead else 1.0
        for bucket in buckets:
            started += bucket.start_ns  # all are started before the first is waited for
            what = bucket.name.removeprefix(f"{bucket.kind} ")
            if bucket.load is not None:
                added.append(call_of("host", f"to device {what}", bucket.load, (up, up + bucket.load.duration_ns)))
                up += bucket.load.duration_ns
            if bucket.gather is not None:
                at = max(wire, up, started)
                wire = at + round(bucket.gather.duration_ns * shown)
                added.append(call_of("gather", f"all_gather {what}", bucket.gather, (at, wire)))
        updates.append(update)
        calls.append((*(timing.calls[rank] if timing.calls else ()), *added))
    return replace(timing, optimizer=tuple(updates), calls=tuple(calls))


def _first_forwards(timing: Timing, num_stages: int) -> list[int]:
    """Return when each stage begins its first forward."""
    first = np.full(num_stages, np.iinfo(np.int64).max)
    forward = timing.order.kind == F
    np.minimum.at(first, timing.order.stage[forward], timing.start_ns[forward])
    return first.tolist()


def _shown(stages: Sequence[Stage], own: Sequence[int], first_ns: Sequence[int]) -> float:
    """Return the part of a rank's gathers that forwards do not hide.

    Stages are gathered in the order in which they begin. A stage's gathers may take until its own first forward, and
    run under it, layer by layer; so what ranks with several stages run before the later ones hides their gathers.
    """
    order = sorted(own, key=lambda stage: first_ns[stage])
    gathered = late = 0
    for stage in order:
        gathered += sum(bucket.gather.duration_ns for bucket in stages[stage].buckets if bucket.gather is not None)
        hidden = first_ns[stage] - first_ns[order[0]] + sum(stages[stage].forward_ns)
        late = max(late, gathered - hidden)
    return late / gathered if gathered else 0.0


def calls_of_earlier(
    earlier: Sequence[tuple[Stage, int, Sequence[BucketTimes]]], num_ranks: int
) -> tuple[tuple[tuple[ShardCall, ...], ...], tuple[tuple[ShardCall, ...], ...]]:
    """Return each rank's scatters and copies of micro-batches before the last one, under sharding stage 2."""
    calls: list[list[ShardCall]] = [[] for _ in range(num_ranks)]
    copies: list[list[ShardCall]] = [[] for _ in range(num_ranks)]
    for stage, microbatch, buckets in earlier:
        for bucket, times in zip(stage.buckets, buckets, strict=True):
            for span, part in zip(exchanges(0, bucket, times), bucket.parts, strict=True):
                pair = (span.start_ns, span.end_ns)
                calls[stage.rank].append(call_of("scatter", span.name, part, pair, microbatch))
            name = f"copies of {bucket.name.removeprefix(f'{bucket.kind} ')}"
            copies[stage.rank] += [
                ShardCall("compute", name, "copy", *pair, bucket.num_bytes) for pair in times.computing
            ]
    return tuple(map(tuple, calls)), tuple(map(tuple, copies))
