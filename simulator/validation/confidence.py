"""How far published steps like one's own were from their predictions: `errors.csv`, which `distlab validate` writes.

Steps are alike that ran on the same device and stack, dense models or mixtures of experts. Where fewer than LEAST rows
are so, all devices count together, then all stacks; since rows of one table err together, there tables are counted, and
their range stands beside that of fewer rows. Predictions are those that saw least of the rows: their structure left
out, or never fitted to.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from distlab.plan import Cluster, Workload
from simulator.hardware.presets import device
from simulator.step.result import Step

LEAST, FEW = 3, 9  # rows that are alike; tables, of which nine in ten can be within some error
OFTEN = 0.65  # of the rows: "more often than"


class Like(NamedTuple):
    """What steps share that are alike."""

    kind: str
    device: str
    stack: str

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.kind}, {self.device or 'any device'}, {f'stack {self.stack}' if self.stack else 'any stack'}"

    def wider(self) -> tuple[Like, Like, Like]:
        """Return this and what is less alike, the nearest first."""
        return self, self._replace(device=""), Like(self.kind.split()[0], "", "")


class PublishedError(NamedTuple):
    """How far predictions were from published figures of steps that are alike.

    Attributes:
        quantity: "time" or "memory".
        like: what they share.
        rows: published figures.
        mean: of |predicted / published - 1|, each table counted once.
        most: a new row, or all rows of a new table, are within that nine times in ten (Vovk et al. 2005, conformal).
        above: part of the rows whose prediction is too large, each table counted once.
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
        tables = " tables" * (not self.like.device)
        return f"{self.mean:.1%} on average, 9 in 10{tables} within {self.most:.0%}{often}: {many}"


def like_of(workload: Workload, cluster: Cluster) -> Like:
    """Return what a step shares with those like it; a device with figures of its own is like no preset."""
    kind = "mixture" if any(layer.experts for layer in workload.layers) else "dense"
    kind += " with LoRA" * any(layer.base_bytes for layer in workload.layers)
    own = cluster.device
    try:
        name = own.name if device(own.name).peak_flops_per_s == own.peak_flops_per_s else "own device"
    except ValueError:
        name = "own device"
    return Like(kind, name, cluster.software.name)


def errors_from(quantity: str, rows: Sequence[tuple[Like, float, str]]) -> Iterator[PublishedError]:
    """Return the errors of all sets of rows that are alike, from each row's predicted / published - 1 and its table."""
    pools: dict[Like, dict[str, list[float]]] = {}
    for like, error, table in rows:
        for each in like.wider():
            pools.setdefault(each, {}).setdefault(table, []).append(error)
    for like, tables in sorted(pools.items()):
        found = [np.array(own) for own in tables.values()]
        found = [*np.concatenate(found)[:, None]] if like.device else found
        if len(found) >= (LEAST if like.device else FEW) and like.device != "own device":
            mean, above = np.mean([(abs(own).mean(), (own > 0).mean()) for own in found], axis=0)
            worst, place = sorted(float(abs(own).max()) for own in found), math.ceil(0.9 * (len(found) + 1))
            figures = (float(mean), worst[min(len(found), place) - 1], float(above))
            yield PublishedError(quantity, like, sum(map(len, found)), *figures)


def text_of(errors: Sequence[PublishedError]) -> str:
    """Return the text of `errors.csv`."""
    head = "quantity,kind,device,stack,rows,mean,most,above"
    rows = (f"{o.quantity},{','.join(o.like)},{o.rows},{o.mean:.3f},{o.most:.3f},{o.above:.2f}" for o in errors)
    return "\n".join([head, *rows]) + "\n"


@cache
def known_errors() -> dict[tuple[str, Like], PublishedError]:
    """Return what `errors.csv` has."""
    text = resources.files("simulator.validation").joinpath("errors.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))[1:]
    made = [PublishedError(row[0], Like(*row[1:4]), int(row[4]), *map(float, row[5:])) for row in rows]
    return {(each.quantity, each.like): each for each in made}


def error_of(quantity: str, workload: Workload, cluster: Cluster) -> PublishedError | None:
    """Return how far predictions of "time" or "memory" were off for steps like this one; None: too few are known."""
    like, known = like_of(workload, cluster), known_errors()
    return next((known[quantity, each] for each in like.wider() if (quantity, each) in known), None)


def words_of_error(quantity: str, workload: Workload, cluster: Cluster) -> str:
    """Return the same in words."""
    found, like = error_of(quantity, workload, cluster), like_of(workload, cluster)
    wide = known_errors().get((quantity, like.wider()[2]))
    more = f"; of all {wide.like.kind} steps, 9 in 10 tables within {wide.most:.0%}" if wide and found != wide else ""
    return f"{found}{more}" if found else f"not known: no published row is like this one ({like})"


def words_on_step(workload: Workload, cluster: Cluster, held_bytes: float) -> dict[str, str]:
    """Return how far a step's time and memory may be off, and whether the verdict of its fit hangs on that."""
    words = {f"error_of_{each}": words_of_error(each, workload, cluster) for each in ("time", "memory")}
    found = error_of("memory", workload, cluster)
    if found and abs(held_bytes / cluster.device.memory_bytes - 1) < found.most:
        words["error_of_memory"] += "; the verdict is within that error"
    return words


def words_on_plans(steps: Sequence[Step]) -> str:
    """Return how far the times of plans are off, the best first, and how many differ from it by no more."""
    first = steps[0]
    found = error_of("time", first.workload, first.cluster)
    words = words_of_error("time", first.workload, first.cluster)
    if found is None:
        return words
    longest, name = first.steady_s * (1 + found.mean), first.cluster.name
    equal = len(list(takewhile(lambda step: step.cluster.name == name and step.steady_s <= longest, steps)))
    return words + f"; plans 1 to {equal} are within {found.mean:.1%}: equal as far as known" * (equal > 1)
