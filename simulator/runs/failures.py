"""What interrupts a training run, how often to save, and what part of its time is training: in closed form, and drawn.

Failures come at random, at a constant rate: a published one, or one's own. A failure throws the run
back to its last checkpoint, after a restart; a second one may come during the restart, which then begins anew. A
segment is an interval of training and the save behind it. It takes M e^(R/M) (e^((t + C)/M) - 1) on average: M between
failures, R to restart, t to train, C to save.

Source: Young 1974 (doi 10.1145/361147.361115); Daly 2006 (doi 10.1016/j.future.2004.11.016), its complete model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Plan, Workload
from simulator.runs.published import HOST_COPY, RATES, STORES, Rate, Store, stores_of_size
from simulator.units import widths_of

SECONDS_AN_HOUR = 3600
LEAST_USEFUL = 1e-3


class Goodput(NamedTuple):
    """Where a run's time goes; the four parts of its time add up to 1.

    Attributes:
        mtbf_s: mean time between failures of all devices; infinite where none fails.
        save_s: training waits so long for a checkpoint.
        interval_s: of training between checkpoints; infinite where nothing needs to be saved.
        useful: training that counts: the goodput.
        saving: checkpoints.
        lost: training and saving that a failure undid.
        restarting: from a failure to the next step.
    """

    mtbf_s: float
    save_s: float
    interval_s: float
    useful: float
    saving: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0


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


def regroup_goodput(mtbf_s: float, num_replicas: int, *, regroup_s: float, replace_s: float) -> Goodput:
    """Return where the time goes where a failure stops one replica alone, and the others go on without a restart.

    Args:
        mtbf_s: mean time between failures of all replicas.
        num_replicas: among which the batch is divided.
        regroup_s: for which all wait per failure: when one has left, and when a new one takes a peer's state.
        replace_s: until there is a new one; meanwhile its part of the samples is not trained.

    Raises:
        ValueError: a time makes no sense, or replicas are gone for longer than they live.
    """
    _check(1.0, mtbf_s, regroup_s)
    there = 1 / (1 + replace_s / (num_replicas * mtbf_s))  # of each replica's time
    if not (num_replicas >= 1 and replace_s >= 0 and there > 1 / 2):
        raise ValueError(
            f"{num_replicas} replicas, each replaced in {replace_s} s: pass at least 1, and less than they live"
        )
    useful = there / (1 + there * regroup_s / mtbf_s)
    return Goodput(mtbf_s, 0.0, math.inf, useful, 0.0, 1 - there, there - useful)


def _check(save_s: float, mtbf_s: float, interval_s: float = 1.0) -> None:
    for name, value in (("save_s", save_s), ("mtbf_s", mtbf_s), ("interval_s", interval_s)):
        if not value > 0 or (name == "save_s" and math.isinf(value)):
            raise ValueError(f"{name} is {value!r}; pass a time above 0")


@dataclass(frozen=True)
class Failures:
    """What interrupts a run, and what each interruption and each checkpoint takes.

    Times without a source are assumptions to be replaced by one's own.

    Attributes:
        rate: failures of a device in an hour: the name of a published rate (RATES), or a number.
        restart_s: from a failure to the first step after it: notice, replace, start, load. 600 is an assumption.
        save_s: training waits so long for a checkpoint; None: until the store has taken all of its bytes.
        storage_bytes_per_s: what the store takes from all ranks together: a published store (STORES), or a number. By
            default it is a large cluster's, whatever the run's size: `goodput_range` has those of its size.
        interval_s: of training between checkpoints; None: the best one.
        asynchronous: training waits for the copy to the host alone, and the store takes it beside training: a failure
            meanwhile goes back to the checkpoint before, and the next one waits for its end.

    Raises:
        ValueError: a rate or a store is unknown or negative, or a time is not positive.
    """

    rate: str | float = "llama-3"
    restart_s: float = 600.0
    save_s: float | None = None
    storage_bytes_per_s: str | float = "megatron-2021-whole"
    interval_s: float | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        for name, known in (("rate", RATES), ("storage_bytes_per_s", STORES)):
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise ValueError(f"{name} is {value!r}; write a number, or one of {', '.join(known)}")
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or isinstance(value, str):
                continue
            if not 0 <= value <= MOST or (each.name in POSITIVE and value == 0):
                above = "above" if each.name in POSITIVE else "of at least"
                raise ValueError(f"{each.name} is {value!r}; write a number {above} 0, at most {MOST:g}")

    @property
    def published(self) -> Rate:
        """The rate and its source."""
        return RATES[self.rate] if isinstance(self.rate, str) else Rate(self.rate, "as given")

    def mtbf_s(self, num_devices: int) -> float:
        """Return the mean time between failures of a number of devices, any of which stops all; may be infinite."""
        hourly = self.published.per_device_hour * num_devices
        return SECONDS_AN_HOUR / hourly if hourly > RARE else math.inf

    @property
    def store(self) -> Store:
        """What takes the checkpoints, and its source."""
        given = self.storage_bytes_per_s
        return STORES[given] if isinstance(given, str) else Store(given, "as given")

    def writes_s(self, workload: Workload, plan: Plan) -> float:
        """Return how long the store takes for one checkpoint."""
        return checkpoint_bytes(workload, plan) / self.store.bytes_per_s(plan.world_size)

    def waits_s(self, workload: Workload, plan: Plan) -> float:
        """Return how long training waits for one checkpoint."""
        if self.save_s is not None:
            return self.save_s
        copied_s = checkpoint_bytes(workload, plan) / HOST_COPY.bytes_per_s(plan.world_size)
        written_s = self.writes_s(workload, plan)
        return min(copied_s, written_s) if self.asynchronous else written_s

    def lag_s(self, workload: Workload, plan: Plan) -> float:
        """Return how long a checkpoint is not there yet while training goes on: 0 where training waits for it."""
        return self.writes_s(workload, plan) if self.asynchronous else 0.0

    def goodput(self, num_devices: int, save_s: float, lag_s: float = 0.0) -> Goodput:
        """Return where the time of a number of devices goes, with checkpoints of a given duration, there so much later.

        Raises:
            ValueError: failures leave almost no time.
        """
        mtbf_s, interval_s = self.mtbf_s(num_devices), self.interval_s
        if lag_s and not math.isinf(mtbf_s):
            interval_s = max(best_s(save_s, mtbf_s) if interval_s is None else interval_s, lag_s)
        found = goodput(save_s, mtbf_s, restart_s=self.restart_s + lag_s, interval_s=interval_s)
        late = found.restarting + math.expm1(-self.restart_s / mtbf_s)  # what the lag undoes is lost
        return found._replace(lost=found.lost + late, restarting=found.restarting - late) if lag_s else found

    def goodput_range(self, workload: Workload, plan: Plan) -> tuple[float, float]:
        """Return the least and the largest goodput by published rates, its store and those of clusters of its size.

        From an early cluster with the slowest store to the best rate and the fastest. Numbers, a rate of "none" and
        restarts, which by hand take hours, are not varied. The least is 0 where failures leave almost no time.
        """
        fails = isinstance(self.rate, str) and self.rate != "none"
        rates = [name for name, rate in RATES.items() if rate.per_device_hour] if fails else [self.rate]
        stores: list[str | float] = [self.storage_bytes_per_s]
        if isinstance(self.storage_bytes_per_s, str) and self.save_s is None:
            stores += stores_of_size(plan.world_size)
        found = []
        for rate, store in product(rates, stores):
            one = replace(self, rate=rate, storage_bytes_per_s=store)
            try:
                good = one.goodput(plan.world_size, one.waits_s(workload, plan), one.lag_s(workload, plan))
                found.append(good.useful)
            except ValueError:
                found.append(0.0)
        return min(found), max(found)


MOST = 1e15
RARE = 1e-12  # failures an hour: one in more than 100 million years is none
POSITIVE = ("save_s", "storage_bytes_per_s", "interval_s")


def checkpoint_bytes(workload: Workload, plan: Plan) -> float:
    """Return the bytes of one checkpoint: parameters, master weights and the optimizer's state, each once.

    14 bytes for a parameter of mixed-precision Adam. The published 13.8 TB of 1T (2104.04473, section 5.10) are 2 %
    less than that.
    """
    widths = widths_of(workload, plan)
    return workload.num_parameters * (widths.parameter + widths.master + widths.optimizer)


Floats = NDArray[np.float64]
PERIODS = 512  # between failures, drawn for every run at once


def trained(uptime_s: Floats, interval_s: Floats | float, save_s: float) -> Floats:
    """Return the training that is saved in times between a restart and the next failure."""
    return np.asarray(np.floor(np.maximum(uptime_s, 0.0) / (interval_s + save_s)) * interval_s, np.float64)


def goodput_by_trial(
    save_s: float, mtbf_s: float, intervals_s: Floats, *, restart_s: float = 0.0, failures: int = 20_000, seed: int = 0
) -> Floats:
    """Return the useful part of the time with each interval [I]; all intervals see the same failures."""
    uptime = np.random.default_rng(seed).exponential(mtbf_s, failures)
    kept = trained(uptime - restart_s, np.asarray(intervals_s)[:, None], save_s)
    return np.asarray(kept.sum(axis=1) / uptime.sum(), np.float64)


def draw_runs(
    work_s: float,
    mtbf_s: float,
    interval_s: float,
    *,
    save_s: float,
    restart_s: float = 0.0,
    num_runs: int = 1000,
    seed: int = 0,
) -> Floats:
    """Return how long each of many runs takes until so much training is done [num_runs], in seconds.

    Failures are drawn in rounds of PERIODS, for all runs at once.
    """
    draws = np.random.default_rng(seed)
    if math.isinf(mtbf_s):
        saves = 0 if math.isinf(interval_s) else math.ceil(work_s / interval_s) - 1
        return np.full(num_runs, float(work_s + saves * save_s))
    ends, left, spent = np.full(num_runs, np.nan), np.full(num_runs, float(work_s)), np.zeros(num_runs)
    restarts = np.full(PERIODS, restart_s)
    restarts[0] = 0.0  # of the first round: the run starts without a failure
    running = np.arange(num_runs)
    while len(running):
        uptime = draws.exponential(mtbf_s, (len(running), PERIODS))
        trains = uptime - restarts
        kept = trained(trains, interval_s, save_s)
        before = np.cumsum(kept, axis=1) - kept
        rest = left[running, None] - before
        needs = rest + save_s * (np.ceil(rest / interval_s) - 1)  # the last segment needs no save
        is_end = needs <= trains
        done, last = is_end.any(axis=1), is_end.argmax(axis=1)
        rows = np.flatnonzero(done)
        starts = np.cumsum(uptime, axis=1) - uptime
        ends[running[rows]] = (spent[running] + starts[np.arange(len(running)), last])[rows] + (
            restarts[last] + needs[np.arange(len(running)), last]
        )[rows]
        spent[running] += uptime.sum(axis=1)
        left[running] -= kept.sum(axis=1)
        running = running[~done]
        restarts[0] = restart_s
    return ends
