"""Memory: bytes of each kind on a rank, at the peak and over a step, and the published formulas.

What a step holds: parameters, gradients and optimizer state all the time; the activations of a micro-batch from its
forward to the end of its backward; buffers into which flat
and bucketed gradients are copied to be averaged (overlapped gradients live in their buckets); with compression the
errors, what was not sent yet, which error feedback keeps for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distlab.plan.records import Device, Plan, Workload
from simulator.pipeline import F, W, peak_in_flight

if TYPE_CHECKING:
    from simulator.stages import Stage
    from simulator.timing import Timing

Ints = NDArray[np.int64]

KINDS = ("parameters", "gradients", "optimizer", "activations", "buckets", "errors")


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on each pipeline stage's ranks (all replicas of a stage hold the same).

    Attributes:
        peak_bytes: one row a stage, one column a kind of KINDS; the activations at their peak.
        start_ns: when each micro-batch's activations begin to be held, one array a stage.
        end_ns: when they are let go.
        activation_bytes: of one micro-batch on each stage.
    """

    peak_bytes: Ints
    start_ns: tuple[Ints, ...]
    end_ns: tuple[Ints, ...]
    activation_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> Ints:
        """Bytes of all kinds at the peak, one number a stage."""
        return np.asarray(self.peak_bytes.sum(axis=1), np.int64)

    @property
    def max_bytes(self) -> int:
        """Bytes at the peak on the fullest stage."""
        return int(self.total_bytes.max())

    def of(self, kind: str, stage: int = 0) -> int:
        """Return the peak bytes of one kind on one stage.

        Raises:
            ValueError: the kind is not one of KINDS.
        """
        if kind not in KINDS:
            raise ValueError(f"no memory kind {kind!r}; choose one of {', '.join(KINDS)}")
        return int(self.peak_bytes[stage, KINDS.index(kind)])

    def fits(self, device: Device) -> bool:
        """Return whether the fullest stage fits on the device (allocator and library overheads not counted)."""
        return self.max_bytes <= device.memory_bytes

    def over_time(self, stage: int = 0) -> tuple[Ints, Ints]:
        """Return moments in nanoseconds and the bytes of each kind from then on.

        A micro-batch's activations count in full from the start of its forward.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        size = self.activation_bytes[stage]
        moments = np.concatenate([[0], self.start_ns[stage], self.end_ns[stage]])
        starts, ends = len(self.start_ns[stage]), len(self.end_ns[stage])
        change = np.concatenate([[0], np.full(starts, size), np.full(ends, -size)])
        order = np.lexsort((change, moments))  # what is let go at a moment goes before what comes
        times, first = np.unique(moments[order], return_index=True)
        after = np.append(first[1:], len(order)) - 1
        rows = np.repeat(self.peak_bytes[stage][None], len(times), axis=0)
        rows[:, KINDS.index("activations")] = np.cumsum(change[order])[after]
        return times, rows


def step_memory(workload: Workload, plan: Plan, stages: Sequence[Stage], timing: Timing) -> Memory:
    """Return what each stage of a step holds."""
    order = timing.order
    in_flight = peak_in_flight(order)
    rows, starts, ends, sizes = [], [], [], []
    for rank, stage in enumerate(stages):
        activations = sum(layer.activation_bytes for layer in stage.layers)
        parameters = stage.num_parameters * workload.bytes_per_parameter
        optimizer = stage.num_parameters * workload.optimizer_bytes_per_parameter
        copies = plan.data > 1 and plan.gradient_sync in ("flat", "bucketed")
        held = int(in_flight[rank]) * activations
        errors = parameters if plan.data > 1 and plan.compression and plan.compression.error_feedback else 0
        rows.append((parameters, parameters, optimizer, held, parameters if copies else 0, errors))
        actions = slice(int(order.offsets[rank]), int(order.offsets[rank + 1]))
        kind = order.kind[actions]
        starts.append(timing.start_ns[actions][kind == F])
        ends.append(timing.end_ns[actions][(kind != F) & (kind != W)])
        sizes.append(activations)
    return Memory(np.array(rows, np.int64), tuple(starts), tuple(ends), tuple(sizes))


def adam_state_bytes(num_parameters: float, *, zero_stage: int = 0, num_ranks: int = 1) -> float:
    """Return bytes a rank of mixed-precision Adam: parameters 2, gradients 2, optimizer 12 a parameter.

    Stage 1 shards the optimizer over the ranks, stage 2 gradients too, stage 3 parameters too.

    Source: Rajbhandari et al. 2020 (1910.02054), section 3 and Table 1.

    Raises:
        ValueError: the stage is not 0 to 3, or there is less than one rank.
    """
    if zero_stage not in (0, 1, 2, 3) or num_ranks < 1:
        raise ValueError(
            f"ZeRO stage {zero_stage} over {num_ranks} ranks; choose a stage of 0 to 3 and at least one rank"
        )
    shards = [num_ranks if zero_stage >= needed else 1 for needed in (3, 2, 1)]  # parameters, gradients, optimizer
    return num_parameters * sum(size / parts for size, parts in zip((2, 2, 12), shards, strict=True))


def activation_bytes_per_layer(
    hidden_size: int,
    num_heads: int,
    sequence_length: int,
    microbatch_size: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return bytes that one transformer layer keeps for backward, in 16-bit precision.

    Args:
        hidden_size: h.
        num_heads: a.
        sequence_length: s.
        microbatch_size: B.
        tensor: degree t of tensor parallelism.
        sequence_parallel: whether the parts outside tensor parallelism are split along the sequence too.
        recompute: "none"; "selective" (the attention scores, as flash attention does); "full" (only the layer's input).

    Source: Korthikanti et al. 2022 (2205.05198), equations 1 to 4 and Table 2, s B h (34 + 5 a s / h) on one rank.

    Raises:
        ValueError: recompute is not one of the three, or a size is less than 1.
    """
    sizes = (hidden_size, num_heads, sequence_length, microbatch_size, tensor)
    if min(sizes) < 1:
        raise ValueError(f"sizes are {sizes}; pass hidden size, heads, sequence, micro-batch and degree of at least 1")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {recompute!r}; choose none, selective or full")
    unit = sequence_length * microbatch_size * hidden_size
    if recompute == "full":
        return 2.0 * unit / (tensor if sequence_parallel else 1)
    scores = 5 * num_heads * sequence_length / hidden_size if recompute == "none" else 0.0
    if sequence_parallel:
        return unit * (34 + scores) / tensor
    return unit * (10 + (24 + scores) / tensor)
