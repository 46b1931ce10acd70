"""Days and dollars: a run with failures, and the cheapest offer that is in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab_lesson_15.checks.shared import judge_slips

from distlab.grading import Evidence, Fault, Mutant

Offer = tuple[str, int, float, float]


class Bill(NamedTuple):
    """A run: steps, seconds of one, GPUs, price, hours between failures of a GPU, seconds to save and to restart."""

    words: str
    arguments: tuple[int, float, int, float, float, float, float]


class Market(NamedTuple):
    """Offers and a deadline."""

    words: str
    offers: tuple[Offer, ...]
    days: float


BILLS = (
    Bill("64 GPUs that hardly fail", (10_000, 10.0, 64, 2.5, 1e12, 1e-6, 0.0)),
    Bill("1,024 GPUs, saved in 60 s, restarted at once", (50_000, 8.0, 1024, 2.0, 50_000.0, 60.0, 0.0)),
    Bill("1,024 GPUs, restarts of 10 minutes", (50_000, 8.0, 1024, 2.0, 50_000.0, 60.0, 600.0)),
    Bill("16,384 GPUs, as Llama 3", (1_000_000, 3.0, 16_384, 2.5, 50_000.0, 30.0, 600.0)),
    Bill("16,384 GPUs that fail often: a third is left", (1000, 3.0, 16_384, 2.5, 20_000.0, 300.0, 1200.0)),
    Bill("100,000 GPUs, an hour to restart: nothing is left", (1000, 3.0, 100_000, 2.5, 50_000.0, 600.0, 3600.0)),
    Bill("900 GPUs, a failure every 4 s: exactly nothing is left", (1000, 3.0, 900, 2.5, 1.0, 2.0, 0.0)),
)
MARKETS = (
    Market("one offer, in time", (("a", 8, 10.0, 2.0),), 20.0),
    Market("the cheapest is too late", (("late", 8, 40.0, 2.0), ("dear", 64, 6.0, 3.0), ("good", 32, 12.0, 2.5)), 20.0),
    Market("the lowest price per hour is slow hardware", (("old", 64, 19.0, 1.5), ("new", 64, 6.0, 3.0)), 20.0),
    Market("fewer GPUs are not cheaper", (("few", 8, 19.0, 9.0), ("many", 64, 3.0, 2.0)), 20.0),
    Market("the fastest is dear", (("fast", 512, 2.0, 3.0), ("slow", 64, 12.0, 3.0)), 20.0),
    Market("the fastest has a high price", (("fast", 8, 10.0, 9.0), ("good", 8, 12.0, 2.0)), 20.0),
    Market("done on the last day", (("exact", 8, 20.0, 2.0), ("dear", 64, 5.0, 4.0)), 20.0),
    Market("equal costs", (("slow", 8, 16.0, 2.0), ("fast", 16, 8.0, 2.0)), 20.0),
    Market("equal costs, the shorter one first", (("quick", 16, 8.0, 2.0), ("idle", 8, 16.0, 2.0)), 20.0),
    Market("all too late", (("a", 8, 40.0, 2.0), ("b", 16, 21.0, 2.0)), 20.0),
    Market("no offers", (), 20.0),
)


def drive_bill(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every run."""
    return [fn(*case.arguments) for case in BILLS]


def drive_cheapest(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every market."""
    return [fn(list(case.offers), case.days) for case in MARKETS]


def bill_of(case: Bill, slip: str = "") -> tuple[float, float]:
    """Return days and dollars, or what a slip makes of them."""
    num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s = case.arguments
    between = mtbf_hours * (1 if slip == "hours" else 3600) / (1 if slip == "one GPU fails" else num_gpus)
    interval = math.sqrt((1 if slip == "half of Young" else 2) * save_s * between)
    lost = save_s / interval + interval / ((1 if slip == "a whole interval" else 2) * between)
    lost += 0 if slip == "restarts forgotten" else restart_s / between
    lost -= save_s / interval if slip == "half forgotten" else 0.0  # at Young's interval both halves are equal
    useful = 1 - (0 if slip == "no failures" else lost)
    if useful == 0 or (useful < 0 and slip != "below zero"):
        return math.inf, math.inf
    longer = {"multiplied": useful, "added": 1 + lost}.get(slip, 1 / useful)
    hours = num_steps * step_s * longer / 3600
    paid = 1 if slip == "one GPU is paid" else num_gpus
    return hours / 24, (hours / 24 if slip == "per day" else hours) * paid * price


BILL_SLIPS = {
    "no failures": "Failures and checkpoints cost time too: divide by the part that trains",
    "one GPU fails": "Any of the GPUs stops all of them: M is mtbf_hours over their number",
    "hours": "mtbf_hours are hours, save_s and restart_s seconds",
    "half of Young": "Young's interval is sqrt(2 x save_s x M): the 2 is missing",
    "a whole interval": "A failure throws away half an interval on average",
    "restarts forgotten": "Each failure costs restart_s too: restart_s / M",
    "half forgotten": "Saving loses save_s / interval of the time, and work since the last save interval / (2 M): both",
    "multiplied": "A part of the time trains, so the run takes longer: divide by that part",
    "added": "The parts are of all time, lost time among it: divide by 1 - lost, do not multiply by 1 + lost",
    "below zero": "Where failures leave no time the run never ends: return infinity for both",
    "one GPU is paid": "The price is for one GPU: multiply by num_gpus",
    "per day": "The price is for an hour, not for a day",
}


def cheapest_of(case: Market, slip: str = "") -> str | None:
    """Return the name of the right offer, or what a slip makes of it."""
    keys: dict[str, Callable[[Offer], Any]] = {
        "price per hour": lambda offer: offer[3],
        "GPUs forgotten": lambda offer: offer[2] * offer[3],
        "days forgotten": lambda offer: offer[1] * offer[3],
        "fastest": lambda offer: offer[2],
        "ties": lambda offer: offer[1] * offer[2] * offer[3],
        "ties by name": lambda offer: (offer[1] * offer[2] * offer[3], offer[0]),
        "longer of equals": lambda offer: (offer[1] * offer[2] * offer[3], -offer[2]),
    }
    key = keys.get(slip, lambda offer: (offer[1] * offer[2] * offer[3], offer[2]))
    limit = math.inf if slip == "deadline ignored" else case.days
    in_time = [offer for offer in case.offers if (offer[2] < limit if slip == "last day" else offer[2] <= limit)]
    if slip == "deadline last":
        first = min(case.offers, key=key, default=None)
        return first[0] if first and first[2] <= case.days else None
    return min(in_time, key=key)[0] if in_time else None


CHEAPEST_SLIPS = {
    "deadline ignored": "It is done too late: look at the days first",
    "deadline last": "The cheapest of all is too late, but others are in time: leave out the late ones, then choose",
    "price per hour": "The lowest price of an hour is not the lowest bill: GPUs x hours x price",
    "GPUs forgotten": "The price is for one GPU: multiply by the number of GPUs",
    "days forgotten": "The bill grows with the days: GPUs x hours x price",
    "fastest": "In time is in time: of those that are, take the cheapest, not the fastest",
    "last day": "A run that is done on the last day is in time: <=",
    "ties": "Both cost the same: take the one that is done sooner",
    "longer of equals": "Both cost the same: take the one that is done sooner, and this one takes longer",
    "ties by name": "Both cost the same: take the one that is done sooner, whatever their names",
}


def judge_bill(evidence: Evidence) -> Iterator[Fault]:
    """Compare every run's days and dollars."""
    yield from judge_slips(evidence, BILLS, bill_of, BILL_SLIPS)


def judge_cheapest(evidence: Evidence) -> Iterator[Fault]:
    """Compare every market's answer."""
    yield from judge_slips(evidence, MARKETS, cheapest_of, CHEAPEST_SLIPS)


def budget_bill(evidence: Evidence) -> list[str]:
    """Say what failures cost."""
    plain = math.prod(BILLS[3].arguments[:2]) / 86_400
    return [f"{BILLS[3].words}: {evidence.results[0][3][0] / plain - 1:.0%} longer than without failures"]


def budget_cheapest(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    return [f"{len(MARKETS)} markets"]


_KEY = "24 * offer[1] * offer[2] * offer[3]"
WRONG_BILLS = (
    Mutant("nothing fails", "no failures", "divide by the part that trains", 1, "popular claim").edit(
        "1 - save_s / interval - interval / (2 * between) - restart_s / between", "1"
    ),
    Mutant("one GPU's failures", "one GPU fails", "Any of the GPUs", 1).without(" / num_gpus"),
    Mutant("hours for seconds", "hours", "seconds", 1).without("3600 * "),
    Mutant("sqrt without 2", "half of Young", "the 2 is missing", 1).edit("sqrt(2 *", "sqrt(1 *"),
    Mutant("a whole interval lost", "a whole interval", "half an interval", 1).edit("(2 * between)", "between"),
    Mutant("restart at once", "restarts forgotten", "restart_s / M", 1).without(" - restart_s / between"),
    Mutant("saves for nothing", "half forgotten", "save_s / interval", 1).without("- save_s / interval "),
    Mutant("nothing lost", "half forgotten", "since the last save", 1).without("- interval / (2 * between) "),
    Mutant("times what trains", "multiplied", "the run takes longer", 1).edit("/ useful / 3600", "* useful / 3600"),
    Mutant("added on top", "added", "do not multiply", 1).edit("/ useful / 3600", "* (2 - useful) / 3600"),
    Mutant("time runs back", "below zero", "never ends", 1).edit("if useful > 0", "if useful != 0"),
    Mutant("one GPU paid", "one GPU is paid", "multiply by num_gpus", 1).without(" * num_gpus"),
)
WRONG_CHEAPEST = (
    Mutant("cheapest, then in time", "deadline last", "then choose", 1, "a real purchase").body(f"""
        if not offers:
            return None
        best = min(offers, key=lambda offer: ({_KEY}, offer[2]))
        return best[0] if best[2] <= days else None
    """),
    Mutant("late", "deadline ignored", "too late", 1).edit(" if offer[2] <= days", ""),
    Mutant("price of an hour", "price per hour", "not the lowest bill", 1, "a real purchase").edit(_KEY, "offer[3]"),
    Mutant("one GPU", "GPUs forgotten", "multiply by the number", 1).without("* offer[1] "),
    Mutant("an hour of all", "days forgotten", "grows with the days", 1).without("* offer[2] "),
    Mutant("fastest", "fastest", "not the fastest", 1).edit(_KEY, "offer[2]"),
    Mutant("before the last day", "last day", "<=", 1).edit("<= days", "< days"),
    Mutant("first of equals", "ties", "done sooner", 1).edit(f"({_KEY}, offer[2])", _KEY),
    Mutant("ties by name", "ties by name", "whatever their names", 1).edit(
        f"({_KEY}, offer[2])", f"({_KEY}, offer[0])"
    ),
    Mutant("min of nothing", "raised", "min()", 1).without("if not in_time:\n    return None"),
)
