"""Memory: bytes of each kind on a rank, at the peak and over a step, for any plan.

    memory = memory_of(workload, plan)          # no clock: counts alone
    memory.of("activations"), memory.total_bytes, memory.over_time()

What a step holds: parameters, optimizer state and master weights all the time; gradients from the first backward on,
or all the time where they live in buckets; the activations of a micro-batch from each layer's forward to the end of
that layer's backward. The update takes a little more. Buffers are what communication needs: buckets, gathered units.
Temporary is what lives shorter than a pass: recomputed activations, gradients of activations. With compression the
errors, what was not sent yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from distlab.plan.partition import balance
from distlab.plan.records import Device, Plan, Workload
from simulator.memory_formulas import activation_bytes_per_layer, adam_state_bytes
from simulator.memory_kinds import KINDS
from simulator.memory_stage import Bools, Ints, StageBytes, count_stage
from simulator.memory_widths import Widths, widths_of
from simulator.pipeline import F, W, peak_in_flight

if TYPE_CHECKING:
    from simulator.stages import Stage
    from simulator.times import Timing

__all__ = [
    "KINDS",
    "Memory",
    "Passes",
    "StageBytes",
    "Widths",
    "activation_bytes_per_layer",
    "adam_state_bytes",
    "memory_of",
    "num_in_flight",
    "step_memory",
    "widths_of",
]


@dataclass(frozen=True, eq=False)
class Passes:
    """When a stage's passes run, in its order.

    Attributes:
        is_forward: forward or backward [A].
        start_ns: [A].
        end_ns: [A].
        forward_ns: of each layer [L]; a pass that takes longer is stretched.
        backward_ns: of each layer [L].
        update_ns: start and end of the optimizer's update.
    """

    is_forward: Bools
    start_ns: Ints
    end_ns: Ints
    forward_ns: Ints
    backward_ns: Ints
    update_ns: tuple[int, int]

    def moments(self) -> Ints:
        """Return when each layer of each pass begins, and the pass ends, and the update's two [A (L + 1) + 2]."""
        forward = _shares(self.forward_ns)
        backward = _shares(self.backward_ns[::-1])
        shares = np.where(self.is_forward[:, None], forward, backward)
        inside = np.rint(shares * (self.end_ns - self.start_ns)[:, None]).astype(np.int64)
        return np.append((self.start_ns[:, None] + inside).reshape(-1), self.update_ns)


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes on each pipeline stage's ranks (all ranks of a stage hold the same).

    Attributes:
        stages: what each stage holds, and when.
        peak_bytes: the most of each kind: one row a stage, one column a kind of KINDS. Kinds peak at different moments.
        at_peak_bytes: the same at the one moment when the stage holds most.
        in_flight: passes whose activations each stage holds at most.
        num_passes: forward passes of a stage in the step.
        clock: when each stage's passes run, or None.
    """

    stages: tuple[StageBytes, ...]
    peak_bytes: Ints
    at_peak_bytes: Ints
    in_flight: tuple[int, ...]
    num_passes: int
    clock: tuple[Passes, ...] | None = None

    @property
    def timed(self) -> bool:
        """Whether `over_time` is in nanoseconds: else a layer's forward takes 1, and its backward 2."""
        return self.clock is not None

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """When each stage's passes run, by the clock or one after the other."""
        if self.clock is not None:
            return self.clock
        pairs = zip(self.stages, self.in_flight, strict=True)
        return tuple(_untimed(one_by_one(held, self.num_passes), len(stage.kept)) for stage, held in pairs)

    @cached_property
    def total_bytes(self) -> Ints:
        """Bytes of all kinds at the fullest moment, one number a stage."""
        return np.asarray(self.at_peak_bytes.sum(axis=1), np.int64)

    @property
    def max_bytes(self) -> int:
        """Bytes at the peak on the fullest stage."""
        return int(self.total_bytes.max())

    @property
    def fullest_stage(self) -> int:
        """The stage that holds the most."""
        return int(self.total_bytes.argmax())

    @property
    def host_bytes(self) -> int:
        """Bytes that a rank of the fullest stage keeps in the host's memory."""
        return max(stage.host for stage in self.stages)

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
        host = device.host_memory_bytes
        return self.max_bytes <= device.memory_bytes and (host is None or self.host_bytes <= host)

    def over_time(self, stage: int = 0) -> tuple[Ints, Ints]:
        """Return moments in nanoseconds (without a clock in passes of a layer) and the bytes of each kind from then on.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        passes = self.passes[stage]
        stage_bytes = self.stages[stage]
        rows = np.concatenate([stage_bytes.always[None], stage_bytes.step(passes.is_forward)])
        times = np.append(0, passes.moments())
        times[-1] = max(times[-1], times[-2] + 1)  # what is left at the end is always seen
        first = np.flatnonzero(np.diff(times, prepend=-1))
        return times[first], np.maximum.reduceat(rows, first, axis=0)  # of one moment, the most


def memory_of(workload: Workload, plan: Plan, *, num_chunks: int = 1) -> Memory:
    """Count what each stage holds under any plan, with no cluster and no clock.

    Stages are cut so that their matrix products are balanced. In flight under 1F1B: min(m, p - i) micro-batches on
    stage i; under GPipe all m. An interleaved 1F1B, of `num_chunks` parts a rank, holds more (see `num_in_flight`).

    Cost: some tens of microseconds a stage, whatever the number of micro-batches.
    Error: exact for what it counts, with padding. Not counted: inner gradients of a layer, work spaces of libraries,
        what an allocator loses to fragments, and activations' dropout masks under another precision, which keep a byte
        an element. The copy in the compute type that ZeRO-3 keeps of its shard is counted, as the paper counts it.
    Source: Rajbhandari et al. 2020 (1910.02054); Korthikanti et al. 2022 (2205.05198), equations 1 to 5.

    Raises:
        ValueError: more stages than the workload has layers.
    """
    if plan.pipeline > len(workload.layers):
        raise ValueError(
            f"the plan has {plan.pipeline} pipeline stages; workload {workload.name!r} has {len(workload.layers)} "
            f"layers; use at most {len(workload.layers)} stages"
        )
    stages = tuple(count_stage(workload, plan, cut, num_chunks) for cut in _cuts(workload.matmul_flops, plan.pipeline))
    in_flight = tuple(num_in_flight(plan, index, num_chunks) for index in range(plan.pipeline))
    return _memory(stages, in_flight, plan.num_microbatches * num_chunks)


def num_in_flight(plan: Plan, stage: int, num_chunks: int = 1) -> int:
    """Return the most passes whose activations a stage holds: micro-batches, or chunks of them where it has several.

    Source: 1F1B and GPipe by their order; interleaved 1F1B: (v - 1) p + 2 (p - 1 - i) + 1 chunks of l / (p v) layers,
        which is the factor 1 + (p - 1) / (p v) of 2205.05198 on the first stage.
    """
    total = plan.num_microbatches * num_chunks
    if plan.schedule == "gpipe":
        return total
    behind = plan.pipeline - 1 - stage
    return min(total, behind + 1 if num_chunks == 1 else (num_chunks - 1) * plan.pipeline + 2 * behind + 1)


def one_by_one(in_flight: int, total: int) -> Bools:
    """Return a stage's order: forwards until `in_flight` are held, then one backward for one forward; True: forward."""
    steady = np.tile([False, True], total - in_flight)
    return np.concatenate([np.ones(in_flight, np.bool_), steady, np.zeros(in_flight, np.bool_)])


def step_memory(workload: Workload, plan: Plan, stages: Sequence[Stage], timing: Timing) -> Memory:
    """Return what each stage of a simulated step holds, with the step's own cut and clock."""
    order = timing.order
    stops = np.cumsum([len(stage.layers) for stage in stages]).tolist()
    counted = tuple(
        count_stage(workload, plan, (start, stop)) for start, stop in zip([0, *stops[:-1]], stops, strict=True)
    )
    passes = []
    for rank, stage in enumerate(stages):
        rows = slice(int(order.offsets[rank]), int(order.offsets[rank + 1]))
        kind = order.kind[rows]
        counts = kind != W  # a micro-batch's activations are let go with its input's gradient
        start_ns, end_ns = timing.start_ns[rows][counts], timing.end_ns[rows][counts]
        layers_ns = (np.array(stage.forward_ns, np.int64), np.array(stage.backward_ns, np.int64))
        passes.append(Passes(kind[counts] == F, start_ns, end_ns, *layers_ns, timing.optimizer[rank]))
    return _memory(counted, tuple(peak_in_flight(order).tolist()), plan.num_microbatches, tuple(passes))


def _memory(
    stages: tuple[StageBytes, ...], in_flight: tuple[int, ...], total: int, clock: tuple[Passes, ...] | None = None
) -> Memory:
    """Find the peaks in the shortest order that has them: two steady pairs behind the filling, the last apart."""
    peaks = np.empty((2, len(stages), len(KINDS)), np.int64)
    for index, (stage, held) in enumerate(zip(stages, in_flight, strict=True)):
        rows = stage.step(one_by_one(held, min(total, held + 2)))
        peaks[0, index] = rows.max(axis=0)
        peaks[1, index] = rows[rows.sum(axis=1).argmax()]
    return Memory(stages, peaks[0], peaks[1], in_flight, total, clock)


def _untimed(is_forward: Bools, num_layers: int) -> Passes:
    length = np.where(is_forward, 1, 2) * num_layers
    end = np.cumsum(length)
    ones = np.ones(num_layers, np.int64)
    last = int(end[-1])
    return Passes(is_forward, end - length, end, ones, 2 * ones, (last, last + num_layers))


def _shares(layers_ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return where in a pass each layer begins, and the end, from 0 to 1; equal parts where nothing takes time."""
    if not layers_ns.any():
        layers_ns = np.ones_like(layers_ns)
    return np.concatenate([[0.0], np.cumsum(layers_ns) / layers_ns.sum()])


@lru_cache(maxsize=256)
def _cuts(costs: tuple[float, ...], num_stages: int) -> tuple[tuple[int, int], ...]:
    return balance(costs, num_stages) if num_stages > 1 else ((0, len(costs)),)
