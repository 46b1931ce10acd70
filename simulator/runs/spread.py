"""One plan on more or fewer devices: the same batch, tensor and pipeline ranks; replicas and micro-batches change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from distlab.plan import AXES, Cluster, Plan, Workload
from simulator.step.result import Step
from simulator.step.simulate import simulate
from simulator.units import format_bytes

FEWER, MORE = 3, 4  # how often devices are halved and doubled


class Spread(NamedTuple):
    """Steps of one plan on several numbers of devices, and why the other numbers have none."""

    steps: tuple[Step, ...]
    left_out: Mapping[int, str]


def counts_of(plan: Plan) -> list[int]:
    """Return numbers of devices to try: from an eighth of the plan's to 16 times as many, where the batch divides."""
    ranks, replicas, batch = plan.world_size, plan.data, plan.data * plan.num_microbatches
    fewer = [ranks >> power for power in range(1, FEWER + 1) if replicas % 2**power == 0]
    more = [ranks << power for power in range(MORE + 1) if batch % (replicas << power) == 0]
    return sorted({*fewer, *more})


def plan_on(plan: Plan, num_devices: int) -> Plan:
    """Return the plan on another number of devices, with the same batch.

    Raises:
        ValueError: the devices are not a multiple of a replica's, or the batch does not divide.
    """
    alone, batch = plan.world_size // plan.data, plan.data * plan.num_microbatches
    if num_devices % alone:
        raise ValueError(f"{num_devices} devices are not a multiple of the {alone} that one replica has")
    data = num_devices // alone
    if batch % data:
        raise ValueError(f"{data} replicas do not divide the batch of {batch} micro-batches")
    return replace(plan, data=data, num_microbatches=batch // data)


def spread(
    workload: Workload, cluster: Cluster, plan: Plan, counts: Iterable[int], *, order: tuple[str, ...] = AXES
) -> Spread:
    """Simulate a plan on several numbers of devices; those on which it does not run or fit are left out.

    Args:
        workload: the model.
        cluster: of any number of devices; it is made as large as each count needs.
        plan: on one of them.
        counts: of devices.
        order: of the axes.
    """
    steps, left_out = [], {}
    for count in counts:
        try:
            steps.append(_step(workload, cluster, plan_on(plan, count), order))
        except ValueError as error:
            left_out[count] = " ".join(str(error).split())
    return Spread(tuple(steps), left_out)


def _step(workload: Workload, cluster: Cluster, plan: Plan, order: tuple[str, ...]) -> Step:
    per_node, ranks = cluster.devices_per_node, plan.world_size
    devices = ranks if ranks <= per_node else -(-ranks // per_node) * per_node
    step = simulate(workload, replace(cluster, num_devices=devices), plan, order=order)
    if not step.memory.fits(cluster.device):
        needed, there = format_bytes(step.memory.max_bytes), format_bytes(cluster.device.memory_bytes)
        raise ValueError(f"it does not fit: one of {ranks} devices holds {needed}, and has {there}")
    return step
