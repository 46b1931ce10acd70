"""How far published steps like one's own were from their predictions: `errors.csv`, which `distlab validate` writes.

Steps are alike that ran on the same device and stack, dense models or mixtures of experts, in one node or over nodes.
Where fewer than FEW ran so, those in one node and over nodes count together. Predictions are those that saw least of
the rows: their structure left out, or never fitted to.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np

from distlab.plan import Cluster, Plan, Workload
from simulator.hardware.presets import device
from simulator.step.result import Step

FEW = 3
OFTEN = 0.65  # of the rows: "more often than"


class Like(NamedTuple):
    """What steps share that are alike."""

    kind: str
    device: str
    stack: str
    where: str

    def __str__(self) -> str:
        """Return it in words."""
        return ", ".join(filter(None, (self.kind, self.device, f"stack {self.stack}" * bool(self.stack), self.where)))


class PublishedError(NamedTuple):
    """How far predictions were from published figures of steps that are alike.

    Attributes:
        quantity: "time" or "memory".
        like: what they share.
        rows: published figures.
        mean: of |predicted / published - 1|.
        most: nine of ten rows are within that.
        above: part of the rows whose prediction is too large.
    """

    quantity: str
    like: Like
    rows: int
    mean: float
    most: float
    above: float

    def __str__(self) -> str:
        """Return it in words."""
        size = ("too long", "too short") if self.quantity == "time" else ("too high", "too low")
        side = size[0] if self.above >= OFTEN else size[1] if self.above <= 1 - OFTEN else ""
        often = f", {side} more often than {size[side == size[0]]}" if side else ""
        many = f"{self.rows} published {'steps' if self.quantity == 'time' else 'figures'} like it ({self.like})"
        return f"{self.mean:.1%} on average, 9 in 10 within {self.most:.0%}{often}: {many}"


def like_of(workload: Workload, plan: Plan, cluster: Cluster) -> Like:
    """Return what a step shares with those like it; a device with figures of its own is like no preset."""
    kind = "mixture" if any(layer.experts for layer in workload.layers) else "dense"
    where = "one node" if plan.world_size <= cluster.devices_per_node else "over nodes"
    own = cluster.device
    try:
        name = own.name if device(own.name).peak_flops_per_s == own.peak_flops_per_s else "own device"
    except ValueError:
        name = "own device"
    return Like(kind, name, cluster.software.name, where)


def errors_from(quantity: str, rows: Sequence[tuple[Like, float]]) -> Iterator[PublishedError]:
    """Return the errors of all sets of rows that are alike, from each row's predicted / published - 1."""
    pools: dict[Like, list[float]] = {}
    for like, error in rows:
        for each in (like, like._replace(where="")):
            pools.setdefault(each, []).append(error)
    for like, own in sorted(pools.items()):
        if len(own) >= FEW and like.device != "own device":
            found = np.array(own)
            size = np.abs(found)
            most = float(np.quantile(size, 0.9))
            yield PublishedError(quantity, like, len(own), float(size.mean()), most, float((found > 0).mean()))


def text_of(errors: Sequence[PublishedError]) -> str:
    """Return the text of `errors.csv`."""
    head = "quantity,kind,device,stack,where,rows,mean,most,above"
    rows = (f"{each.quantity},{','.join(each.like)},{each.rows}" for each in errors)
    ends = (f"{each.mean:.3f},{each.most:.3f},{each.above:.2f}" for each in errors)
    return "\n".join([head, *map(",".join, zip(rows, ends, strict=True))]) + "\n"


@cache
def known_errors() -> dict[tuple[str, Like], PublishedError]:
    """Return what `errors.csv` has."""
    text = resources.files("simulator.validation").joinpath("errors.csv").read_text(encoding="utf-8")
    found = {}
    for quantity, *like, rows, mean, most, above in list(csv.reader(text.splitlines()))[1:]:
        key = Like(*like)
        found[quantity, key] = PublishedError(quantity, key, int(rows), float(mean), float(most), float(above))
    return found


def error_of(quantity: str, workload: Workload, plan: Plan, cluster: Cluster) -> PublishedError | None:
    """Return how far predictions of "time" or "memory" were off for steps like this one; None: none was published."""
    like, known = like_of(workload, plan, cluster), known_errors()
    return known.get((quantity, like)) or known.get((quantity, like._replace(where="")))


def words_of_error(quantity: str, workload: Workload, plan: Plan, cluster: Cluster) -> str:
    """Return the same in words."""
    found = error_of(quantity, workload, plan, cluster)
    return str(found) if found else f"not known: no published row is like this one ({like_of(workload, plan, cluster)})"


def words_on_step(workload: Workload, plan: Plan, cluster: Cluster, held_bytes: float) -> dict[str, str]:
    """Return how far a step's time and memory may be off, and whether the verdict of its fit hangs on that."""
    words = {f"error_of_{each}": words_of_error(each, workload, plan, cluster) for each in ("time", "memory")}
    found = error_of("memory", workload, plan, cluster)
    if found and abs(held_bytes / cluster.device.memory_bytes - 1) < found.most:
        words["error_of_memory"] += "; the verdict is within that error"
    return words


def words_on_plans(steps: Sequence[Step]) -> str:
    """Return how far the times of plans are off, the best first, and how many differ from it by no more."""
    first = steps[0]
    found = error_of("time", first.workload, first.plan, first.cluster)
    words = words_of_error("time", first.workload, first.plan, first.cluster)
    if found is None:
        return words
    equal = 1
    for step in steps[1:]:
        if step.cluster.name != first.cluster.name or step.steady_s > first.steady_s * (1 + found.mean):
            break
        equal += 1
    more = f"; plans 1 to {equal} are within {found.mean:.1%}: equal as far as known"
    return words + more * (equal > 1)
