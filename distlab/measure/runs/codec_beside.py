"""Time what a codec costs in a step, relative to what it costs alone.

Alone, a bucket that is encoded twelve times in a row stays in the cache, and nothing else wants the cores. In a step it
comes out of a backward pass, is encoded between two layers, and decoded while other ranks still compute. How much
slower that is is read off two small transformers, other ones than the model to be predicted: each is trained with its
gradients as they are, and compressed. The simulator's difference of the two steps is made to equal the measured one by
one factor on all of the codec's times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import REFERENCES, Reference, Round, fit_cluster
from distlab.measure.runs.beside import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    REPEATS,
    Phases,
    build_reference,
    count_reference,
    mean_over_ranks,
    no_change,
    time_program,
)
from distlab.measure.runs.programs import make_program
from distlab.plan import Cluster, Plan, Sharding, Workload
from distlab.plan.compression import Compression
from simulator import Measured, MeasuredCodec, simulate


@dataclass(frozen=True)
class _Pair:
    """A reference model twice: its gradients averaged as they are, and compressed."""

    plain: Callable[[], Phases]
    compressed: Callable[[], Phases]

    def extra_s(self) -> float:
        """Return the seconds that compressing adds: the middle of several pairs of steps, the first of which warms."""
        more = [sum(self.compressed()) - sum(self.plain()) for _ in range(REPEATS + 1)]
        return median(more[1:])


class BusyCodec:
    """The reference models, made once and timed in each round.

    Every rank makes one and calls `measure` at the same time.
    """

    def __init__(self, compression: Compression, device: torch.device) -> None:
        self.compression, self.device = compression, device
        references = REFERENCES[1:3]
        self.pairs = [
            _Pair(*(_timed(reference, each, device) for each in (None, compression))) for reference in references
        ]
        self.workloads = on_first_rank(lambda: [count_reference(reference, device) for reference in references])

    def measure(self, measured: Round, codec: MeasuredCodec) -> float:
        """Return how much slower the codec is in these steps than alone: the same number on each rank."""
        extra = mean_over_ranks([pair.extra_s() for pair in self.pairs], self.device)
        num_ranks = dist.get_world_size()
        cluster = fit_cluster(measured, num_ranks)
        return on_first_rank(lambda: slowdown(extra, self.workloads, cluster, codec))


def slowdown(extra_s: np.ndarray, workloads: list[Workload], cluster: Cluster, codec: MeasuredCodec) -> float:
    """Return the factor with which compressing makes the simulated steps longer by so many seconds, all together."""

    def added_s(factor: float) -> float:
        return sum(
            _step_s(workload, cluster, codec.slower(factor)) - _step_s(workload, cluster, None)
            for workload in workloads
        )

    once = added_s(1.0)
    per_unit = added_s(2.0) - once
    return max(0.0, 1.0 + (float(extra_s.sum()) - once) / per_unit) if per_unit > 0 else 1.0


def _step_s(workload: Workload, cluster: Cluster, codec: MeasuredCodec | None) -> float:
    plan = Plan(data=cluster.num_devices, bucket_bytes=BUCKET_BYTES, first_bucket_bytes=FIRST_BUCKET_BYTES)
    if codec is not None:
        plan = replace(plan, compression=codec.compression)
    return simulate(workload, cluster, plan, measured=Measured(codec)).duration_s


def _timed(reference: Reference, compression: Compression | None, device: torch.device) -> Callable[[], Phases]:
    model, loss = build_reference(reference, device)
    program = make_program(
        model,
        no_change,
        sharding=Sharding(),
        compression=compression,
        bucket_bytes=BUCKET_BYTES,
        first_bucket_bytes=FIRST_BUCKET_BYTES,
    )
    return lambda: time_program(program, loss, device)
