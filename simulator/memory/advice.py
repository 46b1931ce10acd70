"""Does a plan fit on a device? By how much it does not, on which rank, and the smallest change that makes it fit.

    check_fit(workload, plan, device)        # raises DoesNotFitError, whose text says all of that
    find_change(workload, plan, device)      # the change, or None

The smallest change is the one that costs the least time. It is found by trying: every combination of what may change is
counted, in the order of a rough price, until one fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from distlab.plan import Device, Layer, Plan, Workload
from distlab.plan.records import RECOMPUTES
from distlab.plan.sharding import OFFLOADS
from simulator.memory.memory import KINDS, Memory, memory_of
from simulator.stage.recomputed import keeps_some
from simulator.units import format_bytes

# What a change costs, in per cent of a step, roughly: only the order matters. Recompute: a forward is a third of the
# work (2205.05198 section 5: selective adds 4 %, full 30 to 40 %). Sharding: stages 1 and 2 send what plain data
# parallelism sends, stage 3 half as much again (1910.02054 section 7). Offload: over the host's bus (2101.06840).
RECOMPUTE_PRICE = {"none": 0.0, "selective": 4.0, "operators": 13.0, "full": 33.0}
STAGE_PRICE = (0.0, 0.5, 1.0, 10.0)
OFFLOAD_PRICE = {"none": 0.0, "optimizer": 40.0, "all": 80.0}
HALVING_PRICE = 5.0
SCHEDULE_PRICE = 0.1
# What a layer has of a micro-batch, and so less of a part of it.
WORKS = ("forward", "input_gradient", "weight_gradient", "score_forward")
SIZES = ("activation", "output", "tensor_activation", "score", "input", "logits", "widest")
WIDER_PRICE = 3.0  # sharding over all ranks in place of one group of replicas


class DoesNotFitError(ValueError):
    """A plan that needs more memory than a device has.

    Attributes:
        advice: what to do, in words.
        change: the smallest change that fits, or None.
    """

    def __init__(self, fault: str, advice: str, change: Change | None = None) -> None:
        super().__init__(fault, advice)
        self.advice, self.change = advice, change

    def __str__(self) -> str:
        return "; ".join(self.args)


@dataclass(frozen=True)
class Change:
    """What to change so that a plan fits.

    Attributes:
        plan: the changed plan.
        split: parts into which each micro-batch is cut; 1 leaves it whole.
        price: rough extra time, in per cent of a step.
        max_bytes: what the fullest rank then holds.
    """

    plan: Plan
    split: int
    price: float
    max_bytes: int

    def words(self, before: Plan) -> str:
        """Say what differs from the plan before."""
        now, was = self.plan.sharding, before.sharding
        names = ("schedule", "stages_per_rank", "recompute", "recompute_method", "recompute_layers")
        values = {name: getattr(self.plan, name) for name in names}
        parts = [f"{name}={value!r}" for name, value in values.items() if value != getattr(before, name)]
        inner = ("stage", "replicas", "reshard_after_forward", "offload")
        changed = [f"{name}={getattr(now, name)!r}" for name in inner if getattr(now, name) != getattr(was, name)]
        if changed:
            parts.append(f"Sharding({', '.join(changed)})")
        if self.split > 1:
            size = "half" if self.split == 2 else f"1/{self.split}"
            parts.append(f"micro-batches {size} as large and num_microbatches={self.plan.num_microbatches}")
        return " with ".join(parts)


def check_fit(
    workload: Workload, plan: Plan, device: Device, *, flat_buffers: bool = False, memory: Memory | None = None
) -> None:
    """Check that every rank's peak fits in the device's memory, and what is offloaded in the host's.

    `flat_buffers` as in `memory_of`; `memory` is what a simulated step of the plan holds, whose cut into stages is its
    own. None: as `memory_of` counts.

    Raises:
        DoesNotFitError: it does not: by how much, on which ranks, what fills it, and the smallest change that fits.
    """
    memory = memory or memory_of(workload, plan, flat_buffers=flat_buffers)
    if memory.fits(device):
        return
    stage = memory.fullest_stage
    missing, host = memory.max_bytes - device.memory_bytes, device.host_memory_bytes
    if missing > 0:
        parts = memory.at_peak_bytes[stage]
        kinds = ", ".join(f"{KINDS[k]} {format_bytes(parts[k])}" for k in (-parts).argsort(kind="stable") if parts[k])
        fault = (
            f"{_ranks(plan, stage)}: the plan needs {format_bytes(memory.max_bytes)} and {device.name} has "
            f"{format_bytes(device.memory_bytes)}: {format_bytes(missing)} too much ({kinds})"
        )
    else:
        stage = memory.host_bytes_of_ranks.index(memory.host_bytes)
        missing = memory.host_bytes - (host or 0.0)
        fault = (
            f"{_ranks(plan, stage)}: offload {plan.sharding.offload!r} needs {format_bytes(memory.host_bytes)} of the "
            f"host's memory and {device.name} may use {format_bytes(host or 0.0)} of it: {format_bytes(missing)} too "
            "much"
        )
    change = find_change(workload, plan, device, flat_buffers=flat_buffers)
    if change is None:
        advice = f"no change of recompute, sharding, offload or micro-batch fits; {_more_ranks(workload, plan, device)}"
    else:
        advice = f"smallest change that fits: {change.words(plan)}, which holds {format_bytes(change.max_bytes)}"
    raise DoesNotFitError(fault, advice, change)


def find_change(workload: Workload, plan: Plan, device: Device, *, flat_buffers: bool = False) -> Change | None:
    """Return the cheapest change that fits, or None. It may cut micro-batches, down to one sample each.

    What the plan has already is never taken back. Offload is tried only where the host's memory is known.
    """
    candidates = sorted(_candidates(plan, device, workload.samples), key=lambda candidate: candidate[0])
    parts: dict[int, Workload] = {}
    for price, changed, split in candidates:
        if changed == plan and split == 1:
            continue  # it does not fit, or nobody would ask
        if split not in parts:
            parts[split] = split_samples(workload, split)
        memory = memory_of(parts[split], changed, flat_buffers=flat_buffers)
        if memory.fits(device):
            return Change(changed, split, price, memory.max_bytes)
    return None


def _candidates(plan: Plan, device: Device, most: int) -> Iterator[tuple[float, Plan, int]]:
    sharding = plan.sharding
    # Not per operator unless the plan has it: distlab's own runs cannot do it.
    recomputes: list[dict[str, Any]] = [
        {"recompute": name, "recompute_method": "uniform", "recompute_layers": 1}
        for name in RECOMPUTES[RECOMPUTES.index(plan.recompute) :]
        if name != "operators" or plan.recompute == name
    ]
    if keeps_some(plan) or plan.recompute_layers > 1:
        own = {"recompute_method": plan.recompute_method, "recompute_layers": plan.recompute_layers}
        recomputes.insert(0, {"recompute": "full", **own})
    stages = (
        range(sharding.stage, 4 if plan.expert == 1 else 3)
        if plan.copies > 1 and plan.compression is None
        else (sharding.stage,)
    )
    has_host = device.host_memory_bytes is not None
    offloads = OFFLOADS[OFFLOADS.index(sharding.offload) :] if has_host else (sharding.offload,)
    replicas = sorted({sharding.replicas, 1})
    reshards = sorted({sharding.reshard_after_forward, True})
    schedules = sorted({plan.schedule, "one_f_one_b"})
    splits = [2**power for power in range(most.bit_length()) if most % 2**power == 0]
    for schedule, recompute, stage, offload, copies, reshard, split in product(
        schedules, recomputes, stages, offloads, replicas, reshards, splits
    ):
        if (offload != "none" and stage == 0) or (offload == "all" and stage != 3):
            continue
        if stage == 3 and plan.pipeline > 1 and sharding.stage != 3:
            continue  # every micro-batch would gather every unit again
        changed = replace(sharding, stage=stage, offload=offload, replicas=copies, reshard_after_forward=reshard)
        price = RECOMPUTE_PRICE[recompute["recompute"]] + STAGE_PRICE[stage] + OFFLOAD_PRICE[offload]
        price += HALVING_PRICE * (split.bit_length() - 1) + SCHEDULE_PRICE * (schedule != plan.schedule)
        price += WIDER_PRICE * ((copies != sharding.replicas) + (reshard != sharding.reshard_after_forward))
        microbatches = plan.num_microbatches * split
        yield (
            price,
            replace(
                plan,
                schedule=schedule,
                stages_per_rank=plan.stages_per_rank if schedule == plan.schedule else 1,
                **recompute,
                sharding=changed,
                num_microbatches=microbatches,
            ),
            split,
        )


def split_samples(workload: Workload, split: int) -> Workload:
    """Return the workload of micro-batches cut into `split` equal parts: work and activations shrink, parameters stay.

    Raises:
        ValueError: the parts do not divide the samples.
    """
    if split < 1 or workload.samples % split:
        raise ValueError(f"{split} parts do not divide {workload.samples} samples; use a divisor")
    if split == 1:
        return workload

    def smaller(layer: Layer) -> Layer:
        return replace(
            layer,
            **{name: getattr(layer, name).times(1 / split) for name in WORKS},
            **{f"{name}_bytes": getattr(layer, f"{name}_bytes") // split for name in SIZES},
            uncounted_flops=layer.uncounted_flops / split,
            kept_until_weights_bytes=layer.kept_until_weights_bytes and layer.kept_until_weights_bytes // split,
            regions=tuple(region.part(split) for region in layer.regions),
            experts=layer.experts and layer.experts.part(split),
        )

    layers = tuple(smaller(layer) for layer in workload.layers)
    return replace(workload, layers=layers, samples=workload.samples // split)


def _ranks(plan: Plan, stage: int) -> str:
    each = plan.world_size // plan.pipeline
    first = stage * each
    ranks = f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"
    return ranks if plan.pipeline == 1 else f"{ranks} (stage {stage})"


def _more_ranks(workload: Workload, plan: Plan, device: Device) -> str:
    """Say how many data-parallel ranks make the plan fit with all that saves memory, or why no number does."""
    spare = replace(plan, compression=None, recompute="full", schedule="one_f_one_b", stages_per_rank=1)
    split = workload.samples if workload.samples & (workload.samples - 1) == 0 else 1
    smallest = split_samples(workload, split)
    num_ranks = plan.data
    while num_ranks < 2**16:
        num_ranks *= 2
        sharding = replace(plan.sharding, stage=3, replicas=1, reshard_after_forward=True, offload="none")
        if memory_of(smallest, replace(spare, data=num_ranks, sharding=sharding)).max_bytes <= device.memory_bytes:
            return f"use data={num_ranks} with stage 3 and full recompute, or split layers with tensor"
    return "one layer alone is too large: split it with tensor, use shorter sequences or a larger device"
