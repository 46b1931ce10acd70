"""What a training run costs on each of several clusters: days, dollars, and which number of devices pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from distlab.plan import Workload
from simulator.advisor.search import Choice

HOURS_A_DAY, SECONDS_AN_HOUR = 24, 3600


class Bill(NamedTuple):
    """A training run by one plan.

    Attributes:
        choice: the plan.
        num_steps: of the run.
        days: of nothing but steps: no failures, no evaluation.
        dollars: at the question's price; None where it has none.
    """

    choice: Choice
    num_steps: int
    days: float
    dollars: float | None


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


def bill(choice: Choice, num_tokens: float) -> Bill:
    """Return what a run of so many tokens takes.

    Raises:
        ValueError: the tokens are no positive number.
    """
    if not 0 < num_tokens < math.inf:
        raise ValueError(f"the run has {num_tokens} tokens; pass a positive number, such as 1e12")
    question = choice.question
    num_steps = math.ceil(num_tokens / (question.batch_size * tokens_of(choice.step.workload)))
    hours = num_steps * choice.seconds / SECONDS_AN_HOUR
    dollars = None if question.price is None else hours * question.cluster.num_devices * question.price
    return Bill(choice, num_steps, hours / HOURS_A_DAY, dollars)


def price_of(found: Bill) -> float:
    """Return dollars, or device-hours where there is no price."""
    hours = found.days * HOURS_A_DAY * found.choice.question.cluster.num_devices
    return hours if found.dollars is None else found.dollars


def curve(choices: Sequence[Choice], num_tokens: float) -> Curve:
    """Return the cost curve over the best plan of each cluster.

    Raises:
        ValueError: there is no choice, or only some have a price.
    """
    bills = tuple(bill(choice, num_tokens) for choice in choices)
    if not bills or len({each.dollars is None for each in bills}) > 1:
        raise ValueError("a cost curve needs a plan at least, and prices for all clusters or none")
    shortest, cheapest = min(bills, key=lambda each: each.days), min(bills, key=price_of)
    return Curve(bills, shortest, cheapest, min(bills, key=lambda each: each.days * price_of(each)))
