"""A question for the advisor, and all plans for it as columns of numbers: the records that the search works on.

A shape says what one rank computes in a pass: tensor, context and expert ranks, whether the sequence is split, the
micro-batch, and what is computed again. Its layers are costed once. Rows of a shape differ in stages, replicas,
sharding and offload.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import AXES, Cluster, Device, Plan, Sharding, Workload
from distlab.plan.sharding import OFFLOADS
from distlab.plan.work import COLUMNS
from simulator.models.description import ModelDescription

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        model: in a few words; the search chooses the micro-batch.
        cluster: the devices, all of which are used.
        batch_size: samples in a step.
        headroom: part of a device's memory that is kept free for what is not counted: libraries, fragmentation.
        price: dollars for a device and an hour, or None.
        partial_recompute: also search recompute per operator, and in full of every second or fourth block. This
            library and torchtitan run these; Megatron-LM and DeepSpeed have others.
        fixed: what all plans have: types of numbers, 8 bits, how layers are cut; its degrees do not count.
        offloads: what may go to the host's memory, of OFFLOADS.
        axes: the degrees that may be above 1; a stack may have fewer.
        stages: of sharding, likewise.

    Raises:
        ValueError: the batch is less than 1, the headroom is not from 0 to below 1, or the price is negative or not
            finite. The cluster's ranks share cores. Nothing is left but offload to memory of unknown size.
    """

    model: ModelDescription
    cluster: Cluster
    batch_size: int
    headroom: float = 0.05
    price: float | None = None
    partial_recompute: bool = False
    fixed: Plan = Plan()
    offloads: tuple[str, ...] = OFFLOADS[:1]
    axes: tuple[str, ...] = AXES
    stages: tuple[int, ...] = STAGES

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"the batch has {self.batch_size} samples; pass at least 1")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is {self.headroom}; pass a part from 0 to below 1")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ValueError(f"the price is {self.price}; pass dollars for a device and an hour")
        if self.cluster.num_cores is not None:
            raise ValueError(f"ranks of {self.cluster.name} share cores; plans are searched for devices of their own")
        if self.cluster.device.host_memory_bytes is None and OFFLOADS[0] not in self.offloads:
            raise ValueError(
                f"offload is {' or '.join(self.offloads)!r} and {self.cluster.name} has no host_memory_bytes, so that "
                "nothing says what fits there: write what one device may use of its host into [cluster.device] of a "
                "file for --cluster, such as 64e9, or leave --offload out"
            )

    @cached_property
    def device(self) -> Device:
        """The device with the memory that a plan may fill."""
        own = self.cluster.device
        return replace(own, memory_bytes=own.memory_bytes * (1 - self.headroom))


class Shape(NamedTuple):
    """What one rank computes in a pass."""

    tensor: int
    context: int
    expert: int
    sequence_parallel: bool
    microbatch: int
    recompute: str
    recompute_layers: int = 1  # one block in this many is recomputed in full

    def plan(self, fixed: Plan, **changes: Any) -> Plan:
        """Return a plan of this shape, which has what is fixed."""
        degrees = {"tensor": self.tensor, "context": self.context, "expert": self.expert}
        own: dict[str, Any] = degrees | {"sequence_parallel": self.sequence_parallel, "recompute": self.recompute}
        if self.recompute_layers > 1:
            own |= {"recompute_method": "every", "recompute_layers": self.recompute_layers}
        return replace(fixed, **own | changes)

    def is_aligned(self, cluster: Cluster) -> bool:
        """Return whether groups of ranks sit alike in all nodes, so that the first group's times are all groups'."""
        per_node = cluster.devices_per_node
        sizes = (self.tensor, self.tensor * self.context, self.tensor * self.context * self.expert)
        one_node = cluster.num_devices <= per_node
        return one_node or all(size % per_node == 0 or per_node % size == 0 for size in sizes)


@dataclass(frozen=True, eq=False)
class Costs:
    """A shape's layers on a rank [L]: seconds forward and backward; bytes kept, beside them in backward, and frozen."""

    workload: Workload
    forward: Floats
    backward: Floats
    kept: Floats
    beside: Floats
    base: Floats

    @cached_property
    def tensors(self) -> Ints:
        """Parameter tensors of each layer, experts' apart [L]."""
        kinds = dict(zip(self.workload.kinds, self.workload.layers, strict=True))
        each = {kind: len(one.parameter_sizes) - one.parameter_axes.count("expert") for kind, one in kinds.items()}
        return np.array([each[kind] for kind in self.workload.kinds])

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """The workload's sizes by name [L]."""
        return dict(zip(COLUMNS, self.workload.columns, strict=True))


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows of plans; see the first lines of `search` and `bounds`.

    Attributes:
        question: what they are plans for.
        shapes: what a rank computes.
        costs: of each shape's layers.
        shape: of each row, its number in `shapes`.
        pipeline: ranks.
        per_rank: stages on each of them.
        data: replicas.
        microbatches: of a replica.
        sharding: stage.
        offload: its place in OFFLOADS.
        bound_s: no step is shorter.
    """

    question: Question
    shapes: tuple[Shape, ...]
    costs: tuple[Costs, ...]
    shape: Ints
    pipeline: Ints
    per_rank: Ints
    data: Ints
    microbatches: Ints
    sharding: Ints
    offload: Ints
    bound_s: Floats
    _plans: dict[int, Plan] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shape)

    def plan(self, row: int) -> Plan:
        """Return a row as a plan."""
        if row not in self._plans:  # each bound asks for it
            per_rank = int(self.per_rank[row])
            self._plans[row] = self.shapes[int(self.shape[row])].plan(
                self.question.fixed,
                data=int(self.data[row]),
                pipeline=int(self.pipeline[row]),
                num_microbatches=int(self.microbatches[row]),
                schedule="interleaved" if per_rank > 1 else "one_f_one_b",
                stages_per_rank=per_rank,
                sharding=Sharding(int(self.sharding[row]), offload=OFFLOADS[self.offload[row]]),
            )
        return self._plans[row]

    def workload(self, row: int) -> Workload:
        """Return the model with a row's micro-batch."""
        return self.costs[int(self.shape[row])].workload
