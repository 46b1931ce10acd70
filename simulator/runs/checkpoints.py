"""How often to save, and what part of a run's time is training: in closed form.

Failures come at random, at a constant rate. One throws the run back to its last checkpoint, after a restart; another
may come during the restart, which then begins anew. A segment is an interval of training and the save behind it. It
takes M e^(R/M) (e^((t + C)/M) - 1) on average: M between failures, R to restart, t to train, C to save.

Source: Young 1974 (doi 10.1145/361147.361115); Daly 2006 (doi 10.1016/j.future.2004.11.016), its complete model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LEAST_USEFUL = 1e-3


class Goodput(NamedTuple):
    """Where a run's time goes; the five parts of its time add up to 1.

    Attributes:
        mtbf_s: mean time between failures of all devices; infinite where none fails.
        save_s: training waits so long for a checkpoint.
        interval_s: of training between checkpoints; infinite where nothing needs to be saved.
        useful: training that counts, at full speed: the goodput.
        saving: checkpoints.
        lost: training and saving that a failure undid.
        restarting: from a failure to the next step.
        slow: what slow devices cost.
    """

    mtbf_s: float
    save_s: float
    interval_s: float
    useful: float
    saving: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    slow: float = 0.0


def young_s(save_s: float, mtbf_s: float) -> float:
    """Return Young's interval, sqrt(2 C M): right to first order, where saving takes much less than M."""
    _check(save_s, mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return Daly's interval of higher order; M where a save takes 2 M and more.

    Error: its goodput is within 0.1 % of the best where saving takes up to M / 2.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def best_s(save_s: float, mtbf_s: float) -> float:
    """Return the interval with the largest goodput: where e^-(t + C)/M = 1 - t/M."""
    _check(save_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        above = middle < 1 and math.log1p(-middle) + middle + save_s / mtbf_s > 0
        low, high = (middle, high) if above else (low, middle)
    return high * mtbf_s


def goodput(save_s: float, mtbf_s: float, *, restart_s: float = 0.0, interval_s: float | None = None) -> Goodput:
    """Return where the time goes.

    Args:
        save_s: training waits so long for a checkpoint.
        mtbf_s: mean time between failures; infinite: none.
        restart_s: from a failure to the next step.
        interval_s: of training between checkpoints; None: the best.

    Raises:
        ValueError: a time makes no sense, or failures leave less than LEAST_USEFUL of the time.
    """
    chosen = best_s(save_s, mtbf_s) if interval_s is None else interval_s
    _check(save_s, mtbf_s, chosen)
    late, restarts = (chosen + save_s) / mtbf_s, restart_s / mtbf_s
    if math.isinf(mtbf_s):
        useful = 1.0 if math.isinf(chosen) else chosen / (chosen + save_s)
    else:
        useful = chosen / (mtbf_s * math.exp(restarts) * math.expm1(late)) if late + restarts < 100 else 0.0
    if useful < LEAST_USEFUL:
        raise ValueError(
            f"the run does not get on: it fails every {mtbf_s:.3g} s, trains {chosen:.3g} s between checkpoints, saves "
            f"in {save_s:.3g} s and restarts in {restart_s:.3g} s; use fewer devices, or save and restart faster"
        )
    if math.isinf(mtbf_s):
        return Goodput(mtbf_s, save_s, chosen, useful, saving=1 - useful)
    saving, restarting = useful * save_s / chosen, -math.expm1(-restarts)
    lost = max(0.0, 1 - useful - saving - restarting)
    return Goodput(mtbf_s, save_s, chosen, useful, saving, lost, restarting)


def _check(save_s: float, mtbf_s: float, interval_s: float = 1.0) -> None:
    for name, value in (("save_s", save_s), ("mtbf_s", mtbf_s), ("interval_s", interval_s)):
        if not value > 0 or (name == "save_s" and math.isinf(value)):
            raise ValueError(f"{name} is {value!r}; pass a time above 0")
