"""Does a plan fit on a device? By how much it does not, on which rank, and the smallest change that makes it fit.

    check_fit(workload, plan, device)        # raises DoesNotFitError, whose text says all of that
    find_change(workload, plan, device)      # the change, or None

The smallest change is the one that costs the least time. It is found by trying: every combination of what may change is
counted, in the order of a rough price, until one fits. Where none does, the same is tried with more ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from operator import attrgetter
from typing import Any

from distlab.plan import PLAIN, Device, Layer, Plan, Sharding, Software, Workload
from distlab.plan.records import RECOMPUTES
from distlab.plan.sharding import OFFLOADS
from simulator.memory.memory import KINDS, Memory, memory_of
from simulator.stage.local_layer import divides
from simulator.stage.recomputed import keeps_some
from simulator.units import counted, format_bytes

Run = Callable[[Workload, Plan], Memory]
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
MOST_DOUBLINGS = 12  # of data ranks, where no change fits on as many ranks
FOLLOWING = {"stages_per_rank", "recompute_method", "recompute_layers"}  # they say how a different change is made
NOTHING = "no change of recompute, sharding, offload or micro-batch fits, nor do more data or tensor ranks"


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
        before: the plan that does not fit.
        plan: the changed plan.
        split: parts into which each micro-batch is cut; 1 leaves it whole.
        price: rough extra time, in per cent of a step.
        holds: what the fullest rank then holds, in words.
        why: what to say before the change: that less than it does not help; "": it is one thing.
    """

    before: Plan
    plan: Plan
    split: int
    price: float
    holds: str = ""
    why: str = ""

    @property
    def parts(self) -> dict[str, Any]:
        """The new values of what differs, by the names of their fields; of sharding as sharding.stage."""
        return _differences(self.before, self.plan)

    def __str__(self) -> str:
        parts = {name: value for name, value in self.parts.items() if self.split == 1 or name != "num_microbatches"}
        words = [f"{name}={value!r}" for name, value in parts.items() if "." not in name]
        inner = [f"{name.partition('.')[2]}={value!r}" for name, value in parts.items() if "." in name]
        words += [f"Sharding({', '.join(inner)})"] if inner else []
        if self.split > 1:
            size = "half" if self.split == 2 else f"1/{self.split}"
            words.append(f"micro-batches {size} as large and num_microbatches={self.plan.num_microbatches}")
        return " with ".join(words)


def _differences(before: Any, after: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (each.name for each in fields(before)):
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(new, Sharding):
            found |= _differences(old, new, f"{name}.")
        elif old != new:
            found[f"{prefix}{name}"] = new
    return found


def check_fit(
    workload: Workload, plan: Plan, device: Device, *, software: Software = PLAIN, run: Run | None = None
) -> None:
    """Check that every rank's peak fits in the device's memory, and what is offloaded in the host's.

    Args:
        workload: the model.
        plan: the plan.
        device: what each rank runs on.
        software: as in `memory_of`.
        run: return what a simulated step of a plan holds, whose cut into stages is its own; a plan that it refuses with
            a ValueError is no advice. None: as `memory_of` counts.

    Raises:
        DoesNotFitError: it does not: by how much, on which ranks, what fills it, and the smallest change that fits.
    """
    memory = run(workload, plan) if run else memory_of(workload, plan, software=software)
    if memory.fits(device):
        return
    stage, missing = memory.fullest_stage, memory.max_bytes - device.memory_bytes
    if missing > 0:
        parts = memory.at_peak_bytes[stage]
        kinds = ", ".join(f"{KINDS[k]} {format_bytes(parts[k])}" for k in (-parts).argsort(kind="stable") if parts[k])
        needs, has = f"the plan needs {format_bytes(memory.max_bytes)}", format_bytes(device.memory_bytes)
        fault = f"{needs} and {device.name} has {has}: {format_bytes(missing)} too much ({kinds})"
    else:
        stage, host = memory.host_bytes_of_ranks.index(memory.host_bytes), device.host_memory_bytes or 0.0
        what = "offload_activations" if plan.offload_activations else f"offload {plan.sharding.offload!r}"
        needs = f"{what} needs {format_bytes(memory.host_bytes)} of the host's memory"
        missing = memory.host_bytes - host
        fault = f"{needs} and {device.name} may use {format_bytes(host)} of it: {format_bytes(missing)} too much"
    change = find_change(workload, plan, device, software=software, run=run)
    advice = f"smallest change that fits: {change}, which holds {change.holds}" if change else NOTHING
    raise DoesNotFitError(f"{_ranks(plan, stage)}: {fault}", advice, change)


def find_change(
    workload: Workload, plan: Plan, device: Device, *, software: Software = PLAIN, run: Run | None = None
) -> Change | None:
    """Return the cheapest change that fits, on as many ranks if there is one, or None; see `check_fit`.

    It may cut micro-batches, down to one sample each. What the plan has already is never taken back.
    """
    parts = cache(partial(split_samples, workload))

    def tried(one: Change) -> Change | None:
        """Return the change with what it holds, or None: it does not fit, or does not run."""
        try:
            memory = memory_of(parts(one.split), one.plan, software=software)
            memory = run(parts(one.split), one.plan) if run and memory.fits(device) else memory
        except ValueError:
            return None
        host = f", and {format_bytes(memory.host_bytes)} of the host's memory per rank" if memory.host_bytes else ""
        return replace(one, holds=f"{format_bytes(memory.max_bytes)}{host}") if memory.fits(device) else None

    for wider in _wider(workload, plan):
        found = sorted(_candidates(plan, wider, workload.samples), key=attrgetter("price"))
        if wider is not plan and not tried(found[-1]):  # the dearest holds least
            continue
        for change in (change for one in found if one.parts and (change := tried(one))):
            if wider is not plan:
                return replace(change, why=f"no change makes it fit on {counted(plan.world_size, 'rank')}; ")
            single = (one for one in found if len(one.parts.keys() - FOLLOWING) == 1)
            return replace(change, why="" if any(map(tried, single)) else "no single change makes it fit; ")
    return None


def _wider(workload: Workload, plan: Plan) -> Iterator[Plan]:
    """Yield the plan, then with more data ranks, then with more tensor ranks too."""
    yield plan
    for tensor, data in product((1, 2, 4, 8), (2**power for power in range(MOST_DOUBLINGS))):
        wider = replace(plan, data=plan.data * data, tensor=plan.tensor * tensor)
        if tensor * data > 1 and divides(workload, wider):
            yield wider


def _candidates(before: Plan, plan: Plan, most: int) -> Iterator[Change]:
    sharding, least = plan.sharding, plan.recompute if plan.recompute in RECOMPUTES else "full"
    # Not per operator unless the plan has it: distlab's own runs cannot do it.
    recomputes: list[dict[str, Any]] = [
        {"recompute": name, "recompute_method": "uniform", "recompute_layers": 1}
        for name in dict.fromkeys((plan.recompute, *RECOMPUTES[RECOMPUTES.index(least) :]))
        if name != "operators" or plan.recompute == name
    ]
    if keeps_some(plan) or plan.recompute_layers > 1:
        own = {"recompute_method": plan.recompute_method, "recompute_layers": plan.recompute_layers}
        recomputes.insert(0, {"recompute": "full", **own})
    most_stage = 0 if plan.compression is not None else 3 if plan.expert == 1 else 2
    stages = range(sharding.stage, max(sharding.stage, most_stage) + 1)
    offloads = OFFLOADS[OFFLOADS.index(sharding.offload) :] if plan is before else (sharding.offload,)
    replicas = sorted({sharding.replicas, 1})
    reshards = sorted({sharding.reshard_after_forward, True})
    schedules = sorted({plan.schedule, "one_f_one_b"})
    splits = [2**power for power in range(most.bit_length()) if most % 2**power == 0]
    for schedule, recompute, stage, offload, copies, reshard, split in product(
        schedules, recomputes, stages, offloads, replicas, reshards, splits
    ):
        if (offload != "none" and stage == 0) or (offload == "all" and stage != 3):
            continue
        if stage > sharding.stage and plan.copies == 1 and offload == "none":
            continue  # there is nothing to divide
        if stage == 3 and plan.pipeline > 1 and sharding.stage != 3:
            continue  # every micro-batch would gather every unit again
        changed = replace(sharding, stage=stage, offload=offload, replicas=copies, reshard_after_forward=reshard)
        price = RECOMPUTE_PRICE.get(recompute["recompute"], 0.0) + STAGE_PRICE[stage] + OFFLOAD_PRICE[offload]
        price += HALVING_PRICE * (split.bit_length() - 1) + SCHEDULE_PRICE * (schedule != plan.schedule)
        price += WIDER_PRICE * ((copies != sharding.replicas) + (reshard != sharding.reshard_after_forward))
        own_stages = plan.stages_per_rank if schedule == plan.schedule else 1
        rest: dict[str, Any] = {"stages_per_rank": own_stages, "sharding": changed, "schedule": schedule}
        rest["num_microbatches"] = plan.num_microbatches * split
        yield Change(before, replace(plan, **recompute, **rest), split, price)


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
