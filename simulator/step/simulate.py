"""Simulate one training step of a workload on a cluster under a plan.

    step = simulate(workload, cluster, plan)
    step.duration_s, step.bubble_fraction, step.exposed_communication_s, step.memory, step.trace

One rank of each place in the pipeline is timed. The others there do the same at the same time, since devices are equal:
replicas on other samples, ranks that share its layers, sequences or experts on other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distlab.plan import AXES, Cluster, Link, Plan, Schedule, Workload
from simulator.gradients.compression import MeasuredCodec
from simulator.hardware.rank_layout import RankLayout
from simulator.memory.stage import kept_and_beside
from simulator.stage.local_layer import check_divides
from simulator.stage.modules import check_modules
from simulator.stage.recomputed import offloaded
from simulator.stage.stage import Stage, make_stages
from simulator.step.result import Step
from simulator.step.step_graph import time_step
from simulator.step.timed import compile_schedule_of, ranks_of_stages, why_not_timed


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured on its own.

    Attributes:
        codec: encoding and decoding of a bucket, in place of counted work; None: counted.
        links: the measured link of a kind of call, on every axis: "all_reduce", "all_gather",
            "reduce_scatter", "all_to_all", or "send" (a ring's hops, and messages between stages). All its ranks then
            use that link, in whichever nodes they sit. A kind that is left out takes
            the cluster's links.
    """

    codec: MeasuredCodec | None = None
    links: Mapping[str, Link] = field(default_factory=dict)


NOTHING_MEASURED = Measured()
__all__ = ["Measured", "Step", "closed_form_bubble", "simulate"]


def simulate(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    measured: Measured = NOTHING_MEASURED,
    schedule: Schedule | None = None,
    order: Sequence[str] = AXES,
) -> Step:
    """Simulate one training step.

    The pipeline runs `plan.schedule`, or `schedule`, an order of one's own for `plan.pipeline` ranks. Stages next to
    each other in the model that share a rank hand over in memory. Each stage's gradients are averaged once its last
    backward, or weight gradient, has run. Automatic schedules are made for the times of the stages.

    With `plan.compression` a bucket is encoded on the compute lane once it is full. Its payload travels, and is decoded
    on the compute lane: every rank's payload where ranks gather them. PowerSGD's second factor is made and sent while
    the rank waits, as its hook does it.

    With `plan.sharding` ranks update their own part of the parameters. Stages 1 and 2 scatter buckets of gradients and
    gather parameters after the update; stage 3 gathers and scatters units (see `simulator.step.exchanges`). In a
    pipeline each stage does that for its own parameters.
    Gradients of several micro-batches are added up on each rank and scattered in the last one. Stage 2 does not keep
    whole gradients: it scatters in each micro-batch. Where ranks outnumber `cluster.num_cores`, ranks that wait lend
    their cores to others.

    `measured` supplies times of compression in place of counted work, and a measured link for each kind of call; it
    replaces the cluster's links on every axis.

    Error: exact for its cost model, in whole nanoseconds: each layer's pass and each message is rounded to one.
        Not modelled: differences between devices (`simulate_schedule` takes slow ranks), and all-reduces
            that share a wire with messages between stages.

    Raises:
        ValueError: the plan needs more ranks than the cluster has, or more stages than the workload has layers; the
            codec was measured for other compression or numbers of replicas; the schedule is not for the plan's ranks
            and micro-batches, or is faulty; or the plan is not timed (see `why_not_timed`): its schedule splits
            backward and it shards parameters, or gradients in several micro-batches.
    """
    if measured.codec is not None:
        measured.codec.check(plan)
    rank_of_stage = ranks_of_stages(workload, plan, schedule)
    check_divides(workload, plan)
    check_modules(workload, plan)
    if why := why_not_timed(plan, schedule):
        raise ValueError(why)
    packed = any(sum(layer.base_bytes[3:]) for layer in workload.layers)
    if packed and plan.sharding.stage == 3 and not cluster.software.packs_units:
        fix = "use stage 2, since adapters alone have gradients and states, or stack hugging-face, which gathers 4 bits"
        raise ValueError(f"weights is 'nf4' and sharding has stage 3, whose units gather 16 bits in this stack; {fix}")
    layout = RankLayout(cluster, plan, tuple(order), measured.links)
    stages = make_stages(workload, layout, rank_of_stage, codec=measured.codec)
    if plan.offload_activations:
        kept = iter(kept_and_beside(workload, plan, cluster.software)[0].tolist())
        stages = tuple(_with_copies(stage, [next(kept) for _ in stage.layers], cluster, plan) for stage in stages)
    compiled = compile_schedule_of(plan, schedule, stages)
    timing = time_step(compiled, stages, plan, cluster)
    return Step(workload, cluster, plan, stages, timing, layout.order)


def _with_copies(stage: Stage, kept: Sequence[float], cluster: Cluster, plan: Plan) -> Stage:
    """Return a stage whose blocks' passes are no shorter than all copies of what they keep, to the host or back.

    Copies run one after the other on a wire of their own, under the blocks behind the one that they are of. Where they
    take longer than all blocks do, blocks wait, each for its part. W needs no more copies than I.

    Source: NVIDIA/TransformerEngine, cpu_offload.py, 2024: windows of offloaded layers are spread over all layers.
    """
    blocks = np.array([layer.input_bytes > 0 for layer in stage.layers], np.bool_)
    copies_ns = float((offloaded(blocks, plan) * kept).sum()) / cluster.device.host_link_bytes_per_s * 1e9
    longer = []
    for each in np.array(stage.passes_ns[:3], np.int64):
        factor = max(1.0, copies_ns / max(1, int(each[blocks].sum())))
        longer.append(tuple(np.where(blocks, np.rint(each * factor), each).astype(np.int64).tolist()))
    return replace(stage, passes_ns=(*longer, stage.passes_ns[3]))


def closed_form_bubble(num_stages: int, num_microbatches: int) -> float:
    """Return the textbook bubble of GPipe and 1F1B, idle over total time: (p-1) / (m + p - 1).

    Error: exact where all stages take equal time and communication none; otherwise simulate.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
