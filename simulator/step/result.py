"""What the simulation of a step returns, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from distlab.plan import AXES, Cluster, Plan, Workload
from distlab.trace import Span, Trace
from simulator.hardware.rank_layout import RankLayout
from simulator.memory.memory import Memory, step_memory
from simulator.pipeline.compiled import CompiledSchedule
from simulator.stage.stage import Stage
from simulator.stage.step_times import Timing
from simulator.step.step_graph import time_layer_by_layer
from simulator.step.timed import sums_each_pass
from simulator.step.trace import data_wait_s, exposed_inside_s, layer_trace, message_wait_s, sent_inside, step_trace
from simulator.units import format_bytes, format_s, to_ns, to_s


@dataclass(frozen=True, eq=False)
class Step:
    """What a simulation returns: when everything happens, what is held, what is sent.

    Attributes:
        workload: the model.
        cluster: what it runs on.
        plan: how.
        stages: each stage's layers and costs.
        timing: starts and ends on the ranks of one replica, in nanoseconds.
        order: axes of the ranks' numbers, from the slowest to the fastest.
    """

    workload: Workload
    cluster: Cluster
    plan: Plan
    stages: tuple[Stage, ...]
    timing: Timing
    order: tuple[str, ...] = AXES

    @cached_property
    def layout(self) -> RankLayout:
        """Which rank is where."""
        return RankLayout(self.cluster, self.plan, self.order)

    @property
    def duration_s(self) -> float:
        """Seconds of one step alone: from its start, or its wait for samples, to the last update or gather after it."""
        return self.loader_wait_s + to_s(max(self._rank_end_ns(rank) for rank in range(self.num_pipeline_ranks)))

    @property
    def loading_s(self) -> float:
        """Seconds in which a rank's loader makes the samples of its replica's step; 0 where it keeps up anyway."""
        samples, rate = self.workload.samples * self.plan.num_microbatches, self.cluster.device.loader_samples_per_s
        return samples / rate if rate else 0.0

    @property
    def loader_wait_s(self) -> float:
        """Seconds that each of many steps waits for its samples, once those that were made ahead are used up."""
        return max(0.0, self.loading_s - self._computing_s)

    @property
    def steady_s(self) -> float:
        """Seconds of each of many equal steps in a row: from a rank's own first action to its own end, the longest.

        A rank begins its next step as soon as its own is done. Schedules whose last ranks begin late and end late
        (ZB-H2, ZB-2p) gain from that, since `duration_s` counts both waits.
        Error: exact where no rank waits for the others between two steps: no norm of all gradients, no synchronous
            check. Otherwise a step of a run takes up to `duration_s`.
        Source: Qi et al. 2023 (2401.10241), section 4: updates are checked afterwards, not waited for.
        """
        return self.loader_wait_s + self._computing_s

    @cached_property
    def _computing_s(self) -> float:
        """Return `steady_s` with a loader that keeps up."""
        starts = self.timing.start_ns[self.timing.order.offsets[:-1]].tolist()
        firsts = [min([start, *spans]) for start, spans in zip(starts, self.timing.spans_ns, strict=True)]
        return to_s(max(self._rank_end_ns(rank) - start for rank, start in enumerate(firsts)))

    @property
    def num_pipeline_ranks(self) -> int:
        """Ranks of one replica; each has one stage, or several."""
        return self.timing.order.num_ranks

    @property
    def bubble_fraction(self) -> float:
        """Idle over total time of the compute lanes, from the step's start to the end of the last backward.

        A pass counts as busy with the calls inside of it.
        """
        total = int(self.timing.end_ns.max()) * self.num_pipeline_ranks
        busy = int((self.timing.end_ns - self.timing.start_ns).sum())
        if self.plan.sharding.stage == 3:  # a pass waits inside
            last, rows = int(self.timing.end_ns.max()), self.timing.rows
            copies = [call for calls in self.timing.calls for call in calls if call.lane == "compute"]
            busy = int((rows[:, 3] - rows[:, 2]).sum())
            busy += sum(max(0, min(copy.end_ns, last) - copy.start_ns) for copy in copies)
        return (total - busy) / total if total else 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Seconds in which the rank that ends last waits for communication and computes nothing.

        A copy between a device and its host counts as communication. Waiting for other stages does not: that is the
        pipeline's bubble.
        """
        return sum(seconds for axis, seconds in self.exposed_by_axis.items() if axis != "pipeline")

    @cached_property
    def exposed_by_axis(self) -> Mapping[str, float]:
        """Seconds in which the rank that ends last waits for the calls of each axis and computes nothing.

        "data" is the exchange of gradients and shards, whatever ranks hold copies (see `Plan.copies`). "pipeline" is
        the time in which a message that the rank needs is on its way; the rest of its idle time is its bubble. What
        waits for both counts for both.
        """
        rank = max(range(self.num_pipeline_ranks), key=self._rank_end_ns)
        inside = exposed_inside_s(self.stages, self.timing, rank)
        found = {**inside, "data": self._exposed_data_s(rank)}
        found["pipeline"] = message_wait_s(self.timing, rank)
        return {axis: found[axis] for axis in AXES}

    def _exposed_data_s(self, rank: int) -> float:
        """Return the waits for gradients and shards: behind all passes, or between those that are spelled out."""
        if self.plan.sharding.stage == 3 or sums_each_pass(self.plan):
            return data_wait_s(self.stages, self.timing, rank)
        begin, finish = self.timing.optimizer[rank]
        after = self._rank_end_ns(rank) - finish
        end = int(self.timing.end_ns[self.timing.order.offsets[rank + 1] - 1])
        parts = [part for bucket in self.timing.buckets_of(rank) for part in bucket.computing]
        return to_s(begin - end + after - sum(stop - start for start, stop in parts if start >= end))

    def _rank_end_ns(self, rank: int) -> int:
        return max([self.timing.optimizer[rank][1], *self.timing.spans_ns[rank]])

    @property
    def sent_bytes_per_rank(self) -> tuple[float, ...]:
        """Bytes that each rank sends in the step (rings for gradients, messages between stages), rank 0 first."""
        each = self.sent_bytes_by_pipeline_rank
        numbers = self.layout.ranks
        order = sorted((rank, place) for place, row in enumerate(numbers.tolist()) for rank in row)
        return tuple(each[place] for _, place in order)

    @property
    def sent_bytes_by_pipeline_rank(self) -> tuple[float, ...]:
        """Bytes that each of the ranks at a place in the pipeline sends in the step, first place first."""
        return tuple(sum(sent.values()) for sent in self._sent)

    @property
    def sent_bytes_by_axis(self) -> Mapping[str, float]:
        """Bytes that a rank sends for each axis: of the pipeline's ranks, the one that sends most there."""
        return {axis: max(sent[axis] for sent in self._sent) for axis in AXES}

    @cached_property
    def _sent(self) -> list[dict[str, float]]:
        """Return the bytes of each axis on each rank of the pipeline."""
        sent = [{"pipeline": 0.0, "data": 0.0, **inside} for inside in sent_inside(self.stages, self.timing.order)]
        for stage in self.stages:
            sent[stage.rank]["data"] += sum(bucket.sent_bytes for bucket in stage.buckets)
            messages = stage.send_forward_bytes + stage.send_backward_bytes
            sent[stage.rank]["pipeline"] += self.plan.num_microbatches * messages
        for rank, calls in enumerate(self.timing.calls):
            sent[rank]["data"] += sum(call.sent_bytes for call in calls)
        return sent

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas and micro-batches over `duration_s`, the time of one step alone."""
        return self.workload.samples * self.plan.num_microbatches * self.plan.num_replicas / self.duration_s

    @property
    def mfu(self) -> float:
        """Counted products of the whole job over what the data sheet allows all its ranks in the step (MFU).

        What is computed again, and what ranks compute twice, is not counted. Attention counts all pairs of positions,
        masked or not, as PaLM, Llama 3 and most sources do.

        Source: Chowdhery et al. 2022 (2204.02311), appendix B.
        """
        device = self.cluster.device
        return self._part_of(device.peak_flops_per_s or device.matmul_flops_per_s)

    @property
    def utilization(self) -> float:
        """The same over what products achieve on the device: 1.0 where nothing but products took time."""
        return self._part_of(self.cluster.device.matmul_flops_per_s)

    def _part_of(self, flops_per_s: float) -> float:
        counted = self.workload.counted_flops * self.plan.num_microbatches * self.plan.num_replicas
        return counted / (flops_per_s * self.plan.world_size * self.duration_s)

    @cached_property
    def memory(self) -> Memory:
        """Bytes of each kind on each stage's ranks."""
        return step_memory(self.workload, self.plan, self.stages, self.timing, software=self.cluster.software)

    @cached_property
    def _in_layers(self) -> Timing:
        """The timing with each layer's passes, where they were timed whole: the times are the same."""
        if self.timing.layers is not None:
            return self.timing
        return time_layer_by_layer(CompiledSchedule(self.timing.order), self.stages, self.plan, self.cluster)

    @cached_property
    def trace(self) -> Trace:
        """The step as a measured one looks: whole passes, the wait for gradients, all-reduces and messages."""
        timing = self._in_layers if any(stage.calls for stage in self.stages) else self.timing
        return self._after_loading(step_trace(self.stages, timing, self.layout.ranks))

    @cached_property
    def layer_trace(self) -> Trace:
        """The same step in detail: each layer's pass, each bucket's copies."""
        return self._after_loading(layer_trace(self.stages, self._in_layers, self.layout.ranks))

    def _after_loading(self, trace: Trace) -> Trace:
        """Return a step's trace behind its wait for samples; meanwhile the loader makes the next step's."""
        if not self.loading_s:
            return trace
        wait_ns, loading_ns = to_ns(self.loader_wait_s), to_ns(self.loading_s)
        spans = [Span(rank, "loader", "load", "data", 0, loading_ns) for rank in trace.ranks]
        spans += [Span(rank, "compute", "data", "data", 0, wait_ns) for rank in trace.ranks if wait_ns]
        return Trace.concatenate([Trace.from_spans(spans), trace.shifted(wait_ns)])

    def __str__(self) -> str:
        return (
            f"{self.workload.name} on {self.plan.world_size} ranks of {self.cluster.name}: {format_s(self.duration_s)} "
            f"per step, bubble {self.bubble_fraction:.1%}, "
            f"exposed communication {format_s(self.exposed_communication_s)}, "
            f"{format_bytes(max(self.sent_bytes_per_rank))} sent per rank, {format_bytes(self.memory.max_bytes)} held"
        )
