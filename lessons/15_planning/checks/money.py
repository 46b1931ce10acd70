"""Days and dollars: a run with failures, and the cheapest offer that is in time."""

from __future__ import annotations

import math

from distlab.course.grading.cases import Cases, Given
from distlab.grading import Evidence, Mutant

# Steps, seconds of one, GPUs, price, hours between failures of a GPU, seconds to save and to restart.
BILLS: Given = {
    "64 GPUs that hardly fail": (10_000, 10.0, 64, 2.5, 1e12, 1e-6, 0.0),
    "1,024 GPUs, saved in 60 s, restarted at once": (50_000, 8.0, 1024, 2.0, 50_000.0, 60.0, 0.0),
    "1,024 GPUs, restarts of 10 minutes": (50_000, 8.0, 1024, 2.0, 50_000.0, 60.0, 600.0),
    "16,384 GPUs, as Llama 3": (1_000_000, 3.0, 16_384, 2.5, 50_000.0, 30.0, 600.0),
    "16,384 GPUs that fail often: a third is left": (1000, 3.0, 16_384, 2.5, 20_000.0, 300.0, 1200.0),
    "100,000 GPUs, an hour to restart: nothing is left": (1000, 3.0, 100_000, 2.5, 50_000.0, 600.0, 3600.0),
    "900 GPUs, a failure every 4 s: exactly nothing is left": (1000, 3.0, 900, 2.5, 1.0, 2.0, 0.0),
}
MARKETS: Given = {  # offers, and days until the deadline
    "one offer, in time": ([("a", 8, 20.25, 2.0)], 20.5),
    "the cheapest is too late": ([("late", 8, 20.1, 2.0), ("dear", 64, 6.0, 3.0), ("good", 32, 12.0, 2.5)], 20.0),
    "the lowest price per hour is slow hardware": ([("old", 64, 19.0, 1.5), ("new", 64, 6.0, 3.0)], 20.0),
    "fewer GPUs are not cheaper": ([("few", 8, 19.0, 9.0), ("many", 64, 3.0, 2.0)], 20.0),
    "the fastest is dear": ([("fast", 512, 2.0, 3.0), ("slow", 64, 12.0, 3.0)], 20.0),
    "the fastest has a high price": ([("fast", 8, 10.0, 9.0), ("good", 8, 12.0, 2.0)], 20.0),
    "done on the last day": ([("exact", 8, 20.0, 2.0), ("dear", 64, 5.0, 4.0)], 20.0),
    "equal costs": ([("slow", 8, 16.0, 2.0), ("fast", 16, 8.0, 2.0)], 20.0),
    "equal costs, the shorter one first": ([("quick", 16, 8.0, 2.0), ("idle", 8, 16.0, 2.0)], 20.0),
    "all too late": ([("a", 8, 40.0, 2.0), ("b", 16, 21.0, 2.0)], 20.0),
    "no offers": ([], 20.0),
}


drive_bill, drive_cheapest = Cases(BILLS), Cases(MARKETS)


def budget_bill(evidence: Evidence) -> list[str]:
    """Say what failures cost."""
    words, run = list(BILLS.items())[3]
    plain = math.prod(run[:2]) / 86_400
    return [f"{words}: {evidence.results[0][words]['result'][0] / plain - 1:.0%} longer than without failures"]


def budget_cheapest(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    return [f"{len(MARKETS)} markets"]


_KEY = "24 * offer[1] * offer[2] * offer[3]"
_BOTH = "saving loses save_s / interval of the time, and work since the last save interval / (2 M): both"
WRONG_BILL = (
    Mutant(
        "nothing fails",
        "no failures",
        "failures and checkpoints cost time too: divide by the part that trains",
        1,
        "popular claim",
    ).edit("1 - save_s / interval - interval / (2 * between) - restart_s / between", "1"),
    Mutant(
        "one GPU's failures", "one GPU fails", "any of the GPUs stops all of them: M is mtbf_hours over their number", 1
    ).without(" / num_gpus"),
    Mutant("hours for seconds", "hours", "mtbf_hours are hours, save_s and restart_s seconds", 1).without("3600 * "),
    Mutant("sqrt without 2", "half of Young", "Young's interval is sqrt(2 x save_s x M): the 2 is missing", 1).edit(
        "sqrt(2 *", "sqrt(1 *"
    ),
    Mutant("a whole interval lost", "a whole interval", "a failure throws away half an interval on average", 1).edit(
        "(2 * between)", "between"
    ),
    Mutant("restart at once", "restarts forgotten", "each failure costs restart_s too: restart_s / M", 1).without(
        " - restart_s / between"
    ),
    Mutant("saves for nothing", "half forgotten", _BOTH, 1).without("- save_s / interval "),
    Mutant("nothing lost", "half forgotten", _BOTH, 1).without("- interval / (2 * between) "),
    Mutant(
        "times what trains", "multiplied", "a part of the time trains, so the run takes longer: divide by that part", 1
    ).edit("/ useful / 3600", "* useful / 3600"),
    Mutant("added on top", "added", "lost time is a part of all time: divide by 1 - lost, not times 1 + lost", 1).edit(
        "/ useful / 3600", "* (2 - useful) / 3600"
    ),
    Mutant(
        "time runs back", "below zero", "where failures leave no time the run never ends: return infinity for both", 1
    ).edit("if useful > 0", "if useful != 0"),
    Mutant("one GPU paid", "one GPU is paid", "the price is for one GPU: multiply by num_gpus", 1).without(
        " * num_gpus"
    ),
    Mutant("a day's price", "per day", "the price is for an hour, not for a day", 1).edit(
        "hours * num_gpus", "hours / 24 * num_gpus"
    ),
    Mutant("working days", "working days", "it has days of 8 hours; a run goes on at night", 1).edit(
        "hours / 24", "hours / 8"
    ),
    Mutant(
        "interval of one GPU", "interval of one GPU", "it takes Young's interval of one GPU, not of the whole job", 1
    ).edit("sqrt(2 * save_s * between)", "sqrt(2 * save_s * 3600 * mtbf_hours)"),
    Mutant(
        "per save", "per save", "there is a restart for each failure, not for each checkpoint: restart_s / M", 1
    ).edit("restart_s / between", "restart_s / interval"),
)
WRONG_CHEAPEST = (
    Mutant(
        "cheapest, then in time",
        "deadline last",
        "the cheapest of all is too late, but others are in time: leave out the late ones, then choose",
        1,
        "a real purchase",
    ).body(f"""
        if not offers:
            return None
        best = min(offers, key=lambda offer: ({_KEY}, offer[2]))
        return best[0] if best[2] <= days else None
    """),
    Mutant("late", "deadline ignored", "it is done too late: look at the days first", 1).edit(
        " if offer[2] <= days", ""
    ),
    Mutant(
        "price of an hour",
        "price per hour",
        "the lowest price of an hour is not the lowest bill: GPUs x hours x price",
        1,
        "a real purchase",
    ).edit(_KEY, "offer[3]"),
    Mutant("one GPU", "GPUs forgotten", "the price is for one GPU: multiply by the number of GPUs", 1).without(
        "* offer[1] "
    ),
    Mutant("an hour of all", "days forgotten", "the bill grows with the days: GPUs x hours x price", 1).without(
        "* offer[2] "
    ),
    Mutant("fastest", "fastest", "in time is in time: of those that are, take the cheapest, not the fastest", 1).edit(
        _KEY, "offer[2]"
    ),
    Mutant("before the last day", "last day", "a run that is done on the last day is in time: <=", 1).edit(
        "<= days", "< days"
    ),
    Mutant("first of equals", "ties", "both cost the same: take the one that is done sooner", 1).edit(
        f"({_KEY}, offer[2])", _KEY
    ),
    Mutant(
        "ties by name", "ties by name", "both cost the same: take the one that is done sooner, whatever their names", 1
    ).edit(f"({_KEY}, offer[2])", f"({_KEY}, offer[0])"),
    Mutant("min of nothing", "raised", "min()", 1).without("if not in_time:\n    return None"),
    Mutant("longer of equals", "longer of equals", "both cost the same: take the one that is done sooner", 1).edit(
        f"({_KEY}, offer[2])", f"({_KEY}, -offer[2])"
    ),
    Mutant("whole offer", "whole offer", "the whole offer is returned; its name alone is asked", 1).edit("[0]", ""),
)
