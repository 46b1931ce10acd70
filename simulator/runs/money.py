"""What a training run takes: days, dollars, goodput, and which number of devices pays.

`spread` puts a plan on more or fewer devices: the same batch, tensor and pipeline ranks; replicas and micro-batches
change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distlab.plan import AXES, Cluster, Plan, Workload
from simulator.models.parts import tokens_of
from simulator.runs.failures import SECONDS_AN_HOUR, Failures, Goodput
from simulator.step.result import Step
from simulator.step.simulate import simulate
from simulator.units import format_bytes

HOURS_A_DAY = 24
MOST_TOKENS, MOST_PRICE = 1e24, 1e9
FEWER, MORE = 3, 4  # how often devices are halved and doubled


@dataclass(frozen=True)
class Run:
    """How long to train, at which price, and what goes wrong.

    Attributes:
        num_tokens: to train on.
        price: dollars for a device and an hour; None: not known.
        failures: what interrupts the run; None: nothing does, and nothing is saved.

    Raises:
        ValueError: the tokens or the price make no sense.
    """

    num_tokens: float
    price: float | None = None
    failures: Failures | None = None

    def __post_init__(self) -> None:
        if not 0 < self.num_tokens <= MOST_TOKENS:
            raise ValueError(f"the run has {self.num_tokens} tokens; pass a positive number, such as 1e12")
        if self.price is not None and not 0 <= self.price <= MOST_PRICE:
            raise ValueError(f"the price is {self.price}; pass dollars for a device and an hour")


class Bill(NamedTuple):
    """A training run by one plan.

    Attributes:
        step: of the plan.
        run: what was asked for.
        num_steps: of the run.
        goodput: where its time goes.
        days: with failures, where there are any.
        dollars: None where there is no price.
    """

    step: Step
    run: Run
    num_steps: int
    goodput: Goodput
    days: float
    dollars: float | None

    @property
    def num_devices(self) -> int:
        """Devices that are paid for: one for each rank."""
        return self.step.plan.world_size

    @property
    def price(self) -> float:
        """Dollars, or device-hours where there is no price."""
        return self.days * HOURS_A_DAY * self.num_devices if self.dollars is None else self.dollars

    @property
    def goodput_range(self) -> tuple[float, float]:
        """The least and the largest goodput by what is published; see `Failures.goodput_range`."""
        useful, failures = self.goodput.useful, self.run.failures
        return failures.goodput_range(self.step.workload, self.step.plan) if failures else (useful, useful)


class Curve(NamedTuple):
    """Bills of one run on several clusters, and the three that stand out.

    Attributes:
        bills: one for each cluster and number of devices, in the order given.
        shortest: the least time.
        cheapest: the least price; the least device-hours where there are no prices.
        sweet: the least product of time and price.
    """

    bills: tuple[Bill, ...]
    shortest: Bill
    cheapest: Bill
    sweet: Bill


def batch_of(step: Step) -> int:
    """Return the samples of a step."""
    return step.plan.num_replicas * step.plan.num_microbatches * step.workload.samples


def bill(step: Step, run: Run) -> Bill:
    """Return what a run by such steps takes.

    Raises:
        ValueError: failures leave almost no time.
    """
    num_steps = math.ceil(run.num_tokens / (batch_of(step) * tokens_of(step.workload)))
    found = Goodput(math.inf, 0.0, math.inf, 1.0)
    if run.failures is not None:
        how = (step.workload, step.plan)
        found = run.failures.goodput(step.plan.world_size, run.failures.waits_s(*how), run.failures.lag_s(*how))
    hours = num_steps * step.steady_s / found.useful / SECONDS_AN_HOUR
    dollars = None if run.price is None else hours * step.plan.world_size * run.price
    return Bill(step, run, num_steps, found, hours / HOURS_A_DAY, dollars)


def curve(bills: Sequence[Bill]) -> Curve:
    """Return the cost curve over bills of several clusters or numbers of devices.

    Raises:
        ValueError: there is no bill, or only some have a price.
    """
    if not bills or len({each.dollars is None for each in bills}) > 1:
        raise ValueError("a cost curve needs a plan at least, and prices for all clusters or none")
    shortest, cheapest = min(bills, key=lambda each: each.days), min(bills, key=lambda each: each.price)
    return Curve(tuple(bills), shortest, cheapest, min(bills, key=lambda each: each.days * each.price))


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
    """Return the plan on a different number of devices, with the same batch.

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
