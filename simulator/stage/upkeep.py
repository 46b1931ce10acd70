"""What a rank of a stage does in addition to its passes: it exchanges gradients, and updates its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distlab.plan import Layer, Work, Workload
from simulator.gradients.buckets import BucketCost, Tensors, Transfer, cost_buckets, costs_in
from simulator.gradients.compression import MeasuredCodec
from simulator.gradients.fsdp_units import UnitTimes, scattered, time_units, units_of
from simulator.gradients.shard_costs import Shards, shards_of
from simulator.hardware.cost import compute_s
from simulator.hardware.rank_layout import COPIES, EXPERT_COPIES, RankLayout
from simulator.precision import widths_of
from simulator.stage.local_layer import of_experts
from simulator.units import to_ns


class Upkeep(NamedTuple):
    """What is costed of it: see `Stage` for the fields."""

    buckets: tuple[BucketCost, ...]
    units: tuple[UnitTimes, ...]
    optimizer_ns: int
    faults: Transfer | None


class Upkeeps:
    """Costs the upkeep of a plan's stages: once for stages alike, and equal buckets once for ranks placed alike."""

    def __init__(self, workload: Workload, layout: RankLayout, codec: MeasuredCodec | None) -> None:
        """`codec` has measured times of compression."""
        self.workload, self.layout, self.codec = workload, layout, codec
        self.widths = widths_of(workload, layout.plan)
        self._known: dict[object, Upkeep] = {}
        self._groups: dict[object, dict[str, Any]] = {}

    def of(self, layers: tuple[Layer, ...], kinds: tuple[int, ...], pipeline: int) -> Upkeep:
        """Return the upkeep of a stage at a place in the pipeline: of its layers as a rank has them, and their kinds.

        Stages share one if their layers have the same kinds and their copies are placed on nodes in the same way.
        """
        layout = self.layout
        alike = (kinds, layout.rows(COPIES, pipeline), layout.rows(EXPERT_COPIES, pipeline))
        if alike not in self._known:
            self._known[alike] = self._upkeep(layers, kinds, pipeline)
        return self._known[alike]

    def _upkeep(self, layers: tuple[Layer, ...], kinds: tuple[int, ...], pipeline: int) -> Upkeep:
        plan, shards = self.layout.plan, shards_of(self.layout, pipeline)
        if plan.sharding.stage == 3:
            units = time_units(units_of(layers, plan.sharding.unit_layers), shards, self.widths, plan)
            return Upkeep((), units, self._update_ns(layers, len(units)), None)
        buckets = self._buckets(layers, kinds, shards, pipeline)
        num_tensors = sum(len(layer.parameter_sizes) for layer in layers)
        if plan.sharding.stage == 0:
            return Upkeep(buckets, (), self._update_ns(layers, num_tensors), None)
        faults = shards.faults(num_tensors) if buckets else None
        return Upkeep(buckets, (), self._update_ns(layers, -(-num_tensors // shards.num_shards)), faults)

    def _buckets(
        self, layers: tuple[Layer, ...], kinds: tuple[int, ...], shards: Shards, pipeline: int
    ) -> tuple[BucketCost, ...]:
        """Return the buckets of ranks with equal copies; experts have fewer copies, so buckets of their own."""
        plan, layout = self.layout.plan, self.layout
        found: list[BucketCost] = []
        sharing: list[tuple[tuple[str, ...], Sequence[Layer | Tensors], Shards]] = [(COPIES, layers, shards)]
        if plan.expert > 1 and any(layer.expert_parameters for layer in layers):
            few = shards_of(layout, pipeline, axes=EXPERT_COPIES)
            sharing = [
                (COPIES, of_experts(layers, kinds, experts=False), shards),
                (EXPERT_COPIES, of_experts(layers, kinds, experts=True), few),
            ]
        for axes, parts, sets in sharing:
            placements = layout.placements(axes, pipeline)
            if placements not in self._groups:
                group = layout.slowest(axes, pipeline)
                self._groups[placements] = {"group": group, "costs": costs_in(group, plan.gradient_sync)}
            own, whose = self._groups[placements], " of experts" if axes == EXPERT_COPIES else ""
            buckets = cost_buckets(parts, self.widths.reduce, **own, plan=plan, codec=self.codec, whose=whose)
            if plan.sharding.stage:
                buckets = scattered(buckets, sets, self.widths, plan.sharding.offload)
            found += buckets
        return tuple(sorted(found, key=lambda bucket: -bucket.layer)) if len(sharing) > 1 else tuple(found)

    def _update_ns(self, layers: tuple[Layer, ...], num_tensors: int) -> int:
        """Return the time of updating this rank's part of the layers' parameters, on the device or on its host."""
        workload, plan, cluster = self.workload, self.layout.plan, self.layout.cluster
        experts = sum(layer.expert_parameters for layer in layers) if plan.expert > 1 else 0
        num_parameters = sum(layer.num_parameters for layer in layers) - experts
        own = float(num_parameters + experts)
        if plan.sharding.stage:
            own = num_parameters / plan.sharding.num_shards(plan.copies)
            own += experts / plan.sharding.num_shards(plan.data * plan.context) if experts else 0.0
        share = own / workload.num_parameters if workload.num_parameters else 0.0
        tensors = num_tensors / workload.num_tensors if workload.num_tensors else 0.0
        kernels = 1 if cluster.software.flat_buffers else round(workload.optimizer.num_kernels * tensors)
        work = Work(workload.optimizer.matmul_flops * share, workload.optimizer.memory_bytes * share, kernels)
        if plan.sharding.offload != "none":
            return to_ns(work.memory_bytes / cluster.device.host_memory_bytes_per_s)
        return to_ns(compute_s(work, cluster.device))
