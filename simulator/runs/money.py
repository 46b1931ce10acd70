"""What a training run takes: days, dollars, goodput, and which number of devices pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distlab.plan import Workload
from simulator.runs.checkpoints import Goodput
from simulator.runs.failures import SECONDS_AN_HOUR, Failures
from simulator.step.result import Step

HOURS_A_DAY = 24
MOST_TOKENS, MOST_PRICE = 1e24, 1e9


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


def tokens_of(workload: Workload) -> int:
    """Return the tokens of a sample: the positions of its sequence; 1 where the model has no attention."""
    found = (region.attention for layer in workload.layers for region in layer.regions)
    return next((attention.num_positions for attention in found if attention), 1)


def batch_of(step: Step) -> int:
    """Return the samples of a step."""
    return step.plan.num_replicas * step.plan.num_microbatches * step.workload.samples


def goodput_of(step: Step, failures: Failures | None) -> Goodput:
    """Return where the time of a run of such steps goes.

    Raises:
        ValueError: failures leave almost no time.
    """
    if failures is None:
        return Goodput(math.inf, 0.0, math.inf, 1.0)
    return failures.goodput(step.plan.world_size, failures.waits_s(step.workload, step.plan))


def bill(step: Step, run: Run) -> Bill:
    """Return what a run by such steps takes.

    Raises:
        ValueError: failures leave almost no time.
    """
    num_steps = math.ceil(run.num_tokens / (batch_of(step) * tokens_of(step.workload)))
    found = goodput_of(step, run.failures)
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
