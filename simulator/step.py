"""Step: simulate one training step of a workload on a cluster under a plan.

    step = simulate(workload, cluster, plan)
    step.duration_s, step.bubble_fraction, step.exposed_communication_s, step.memory, step.trace

One replica's pipeline is timed; its replicas do the same at the same time, since devices are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from distlab.plan.records import Cluster, Plan, Workload
from distlab.plan.schedules.basic import gpipe, one_f_one_b
from distlab.trace import Trace
from simulator.codec import MeasuredCodec
from simulator.memory import Memory, step_memory
from simulator.pipeline import CompiledOrder, order_of
from simulator.stages import Stage, make_stages, sent_bytes
from simulator.timing import Timing, queues, time_by_graph, time_directly
from simulator.trace import layer_trace, step_trace
from simulator.units import format_bytes, format_s, to_s

MAKE_SCHEDULE = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}


@dataclass(frozen=True, eq=False)
class Step:
    """What a simulation returns: when everything happens, what is held, what is sent.

    Attributes:
        workload: the model.
        cluster: what it runs on.
        plan: how.
        stages: each stage's layers and costs.
        timing: starts and ends on the ranks of one replica, in nanoseconds.
    """

    workload: Workload
    cluster: Cluster
    plan: Plan
    stages: tuple[Stage, ...]
    timing: Timing

    @property
    def duration_s(self) -> float:
        """Seconds from the step's start to the end of the last rank's update."""
        return to_s(max(end for _, end in self.timing.optimizer))

    @property
    def pipeline_s(self) -> float:
        """Seconds from the step's start to the end of the last backward."""
        return to_s(int(self.timing.end_ns.max()))

    @property
    def bubble_fraction(self) -> float:
        """Idle over total time of the compute lanes, from the step's start to the end of the last backward."""
        total = int(self.timing.end_ns.max()) * len(self.stages)
        busy = int((self.timing.end_ns - self.timing.start_ns).sum())
        return (total - busy) / total if total else 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Seconds in which the rank that ends last waits for all-reduces and computes nothing."""
        rank = max(range(len(self.stages)), key=lambda index: self.timing.optimizer[index][1])
        end = int(self.timing.end_ns[self.timing.order.offsets[rank + 1] - 1])
        window = self.timing.optimizer[rank][0] - end
        parts = [part for sync in self.timing.syncs[rank] for part in sync.computing]
        return to_s(window - sum(stop - start for start, stop in parts if start >= end))

    @property
    def sent_bytes_per_rank(self) -> tuple[float, ...]:
        """Bytes that each rank sends in the step (rings for gradients, messages between stages), rank 0 first."""
        each = [sent_bytes(stage, self.plan) for stage in self.stages]
        return tuple(value for value in each for _ in range(self.plan.data))

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas and micro-batches over the step's duration."""
        return self.workload.samples * self.plan.num_microbatches * self.plan.data / self.duration_s

    @cached_property
    def memory(self) -> Memory:
        """Bytes of each kind on each stage's ranks."""
        return step_memory(self.workload, self.plan, self.stages, self.timing)

    @cached_property
    def trace(self) -> Trace:
        """The step as a measured one looks: whole passes, the wait for gradients, all-reduces and messages."""
        return step_trace(self.stages, self.timing, self.plan)

    @cached_property
    def layer_trace(self) -> Trace:
        """The same step in detail: each layer's pass, each bucket's copies."""
        return layer_trace(self.stages, self.timing, self.plan)

    def __str__(self) -> str:
        return (
            f"{self.workload.name} on {self.plan.world_size} ranks of {self.cluster.name}: {format_s(self.duration_s)} "
            f"a step, bubble {self.bubble_fraction:.1%}, "
            f"exposed communication {format_s(self.exposed_communication_s)}, "
            f"{format_bytes(max(self.sent_bytes_per_rank))} sent a rank, {format_bytes(self.memory.max_bytes)} held"
        )


def simulate(workload: Workload, cluster: Cluster, plan: Plan, *, codec: MeasuredCodec | None = None) -> Step:
    """Simulate one training step.

    With `plan.compression` a bucket is encoded on the compute lane once it is full, what is left of it travels, and it
    is decoded on the compute lane, from every rank's payload where ranks gather them. PowerSGD's second factor is made
    and sent while the rank waits, as its hook does it. `codec` gives measured times in place of counted work.

    Error: exact for its cost model, in whole nanoseconds: each layer's pass and each message is rounded to one.
        Not modelled: differences between devices, and all-reduces that share a wire with messages between stages.

    Raises:
        ValueError: the plan needs more ranks than the cluster has, or more stages than the workload has layers; the
            codec was measured for another compression or number of replicas.
    """
    if codec is not None:
        codec.check(plan)
    stages = make_stages(workload, cluster, plan, codec)
    compiled = _compile(plan.schedule, plan.pipeline, plan.num_microbatches)
    contention = cluster.contention
    contends = contention.compute_slowdown > 1.0 or contention.communication_slowdown > 1.0
    communicates = plan.pipeline > 1 or (plan.data > 1 and plan.gradient_sync in ("bucketed", "overlapped"))
    if (contends and communicates) or queues(stages):
        timing = time_by_graph(compiled, stages, sync=plan.gradient_sync, contention=contention)
    else:
        timing = time_directly(compiled, stages, sync=plan.gradient_sync)
    return Step(workload, cluster, plan, stages, timing)


def closed_form_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the textbook bubble of GPipe and 1F1B, idle over total time: (p-1) / (m + p - 1).

    Error: exact where all stages take equal time and communication none; otherwise simulate.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


@lru_cache(maxsize=16)
def _compile(schedule: str, num_stages: int, num_microbatches: int) -> CompiledOrder:
    return CompiledOrder(order_of(MAKE_SCHEDULE[schedule](num_stages, num_microbatches)))
