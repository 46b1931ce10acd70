"""Two nodes of two ranks on this machine, with a wire of 40 MB/s between them: two levels against a flat ring.

The bars: an all-reduce in two levels takes at most 0.6 of a flat ring's time, and both take what the simulator predicts
within 10 %. The prediction knows two links, each fitted to ring all-reduces of other sizes: one inside the nodes, one
between them. Windows of four turns each lie between two calibrations. Those between which the machine drifted by more
than 5 % are dropped. Ranks meet before each call, whose time is that of its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, largest, timed
from _rows import Row, absolute, compare, noise
from _script import run_script

from distlab.collectives import hierarchical_all_reduce, ring_all_reduce
from distlab.comm import Nodes, Ranks, node_groups
from distlab.measure import interleave
from distlab.plan import Link
from simulator import all_reduce_s, fit_link, hierarchical_all_reduce_s

NODES = Nodes(2, between="40MB/s,200us")
NUM_RANKS, NUM_BYTES = 4, 4 << 20
INSIDE_BYTES = (1 << 18, 1 << 20, 6 << 20)  # of the all-reduces that calibrate; the judged ones have other sizes
BETWEEN_BYTES = (1 << 16, 1 << 19, 3 << 20)
WINDOWS, TURNS, DRIFT = 12, 4, 0.05


class Seen(NamedTuple):
    """What rank 0 returns; all times are of the slowest rank.

    Attributes:
        rounds: before, between and after the windows: seconds inside the nodes and between them, by size.
        windows: for each window, of two levels, the flat ring, and two levels again: seconds by turn.
    """

    rounds: list[tuple[list[float], list[float]]]
    windows: list[list[list[float]]]


def measure(windows: int) -> Seen:
    """Run on each rank: calibrate, time a window, calibrate, and so on."""
    torch.set_num_threads(1)
    groups = node_groups()
    local, cross = groups["local"], groups["node"]
    whole = torch.zeros(NUM_BYTES // 4)

    def ring(num_bytes: int, group: dist.ProcessGroup) -> Callable[[], object]:
        tensor = torch.zeros(num_bytes // 4)
        return lambda: ring_all_reduce(tensor, group)

    def calibrate() -> tuple[list[float], list[float]]:
        def seconds(program: Callable[[], float]) -> float:
            return float(np.median(largest([program() for _ in range(3)])))

        inside = [seconds(timed(ring(size, local), 3)) for size in INSIDE_BYTES]
        return inside, [seconds(timed(ring(size, cross), 2)) for size in BETWEEN_BYTES]

    def two_levels() -> object:
        return hierarchical_all_reduce(whole, local, cross)

    programs = [timed(call, 1) for call in (two_levels, lambda: ring_all_reduce(whole), two_levels)]
    calibrate()
    for program in programs:
        program()
    rounds, found = [calibrate()], []
    for _ in range(windows):
        found.append(largest(interleave(programs, TURNS)))
        rounds.append(calibrate())
    return Seen(rounds, found)


def fit(rounds: Sequence[tuple[list[float], list[float]]]) -> tuple[Link, Link]:
    """Fit the link inside a node and the one between nodes to the mean of some calibrations."""
    inside, between = (np.mean([one[tier] for one in rounds], axis=0).tolist() for tier in (0, 1))
    return fit_link(INSIDE_BYTES, inside, 2, "ring"), fit_link(BETWEEN_BYTES, between, 2, "ring")


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the ratio, the noise, and the error of each prediction."""
    by_value(__name__)
    with Ranks(NUM_RANKS, nodes=NODES, timeout_s=600, record=False) as ranks:
        seen: Seen = ranks.run(measure, 2 if quick else WINDOWS)[0]
    two, flat, again = np.concatenate(seen.windows, axis=1).tolist()
    what = f"all-reduce of {NUM_BYTES >> 20} MiB on 2 x 2 ranks, {NODES.between} between the nodes"
    yield compare(f"{what}: in two levels against a flat ring", two, flat, bar=0.6)
    yield noise(f"in two levels, {what}", again, two)
    errors: dict[str, list[float]] = {"in two levels": [], "a flat ring": []}
    for place, window in enumerate(seen.windows):
        before, after = seen.rounds[place : place + 2]
        if abs(sum(map(sum, before)) / sum(map(sum, after)) - 1) > DRIFT and not quick:
            continue
        inside, between = fit([before, after])
        predicted = {
            "in two levels": hierarchical_all_reduce_s(NUM_BYTES, 2, 2, intra_node=inside, inter_node=between),
            "a flat ring": all_reduce_s(NUM_BYTES, NUM_RANKS, between),
        }
        for (name, seconds), times in zip(predicted.items(), window, strict=False):
            errors[name].append(abs(seconds / float(np.median(times)) - 1))
    for name, found in errors.items():
        note = f"{len(found)} of {len(seen.windows)} windows"
        yield absolute(f"{what}, {name}: predicted against measured", found, bar=0.10, unit="relative", note=note)


if __name__ == "__main__":
    run_script(__doc__, rows)
