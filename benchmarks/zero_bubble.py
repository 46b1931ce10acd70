"""The automatic zero-bubble search: its bubble rates next to the published ones, and the time that a search takes.

Source: Qi et al. 2023 (arXiv:2401.10241v2, 2024), tables 3, 5 and 9: models, bubble rates, and the profiled times from
which the paper computed them. Its "B" is our I. The times behind its table 8 were not published.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from _blocks import seconds_of
from _rows import Row, absolute
from _script import run_script

from distlab.plan import SCHEDULES, ActionTimes, automatic
from simulator import PipelineRun, simulate_schedule

SEQUENCE = 1024
BY_HAND = ("one_f_one_b", "zb_h1", "zb_h2")
ALLOWED = 0.0001


class BubbleCell(NamedTuple):
    """One column of table 5: a pipeline, its times in milliseconds, and the bubble rate of each schedule.

    Attributes:
        model: its name in table 3.
        heads: attention heads.
        hidden: width.
        ranks: stages, one per rank.
        microbatches: micro-batches of a step.
        times: milliseconds of F, I, W and communication, from table 9.
        rates: printed bubble rates by name of the schedule here; zb_2p within 2p of the paper's memory.
    """

    model: str
    heads: int
    hidden: int
    ranks: int
    microbatches: int
    times: ActionTimes
    rates: dict[str, float]

    @property
    def held_after_input_gradient(self) -> float:
        """The part of a layer's activations that W needs: 32 s b h bytes of s b h (34 + 5 a s / h) (table 1)."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * SEQUENCE)


_SCHEDULES = ("one_f_one_b", "zb_1p", "zb_h1", "zb_h2", "zb_2p")
_MODELS = {"1.5B": (24, 2304, 8), "6.2B": (32, 4096, 8), "14.6B": (40, 5120, 16), "28.3B": (48, 6144, 32)}
_ROWS = (
    ("1.5B", 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1585, 0.1083, 0.0433)),
    ("1.5B", 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.1242, 0.0837, 0.0039)),
    ("1.5B", 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0674, 0.0444, 0.0026)),
    ("6.2B", 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.1323, 0.0698, 0.0029)),
    ("6.2B", 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.1045, 0.0559, 0.0022)),
    ("6.2B", 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0554, 0.0294, 0.0010)),
    ("14.6B", 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397)),
    ("14.6B", 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088)),
    ("14.6B", 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576)),
    ("28.3B", 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421)),
    ("28.3B", 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106)),
    ("28.3B", 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594)),
)
BUBBLE_TABLE = tuple(
    BubbleCell(model, *_MODELS[model], microbatches, ActionTimes(*times), dict(zip(_SCHEDULES, rates, strict=False)))
    for model, microbatches, times, rates in _ROWS
)


def bubble_rate(run: PipelineRun) -> float:
    """Return the papers' bubble rate of a simulated schedule: (cost - work) / cost of the rank that takes longest.

    Its cost is the longest time from a rank's own first action to its own last one. The wait before a rank's first
    micro-batch is not counted, since the last ranks' optimizer may run on into the next step; `run.bubble_fraction`
    counts it. All ranks have the same work there; here it is the work of the rank that takes longest.
    """
    bounds = list(zip(run.order.offsets[:-1].tolist(), run.order.offsets[1:].tolist(), strict=True))
    costs = [int(run.end_ns[start:stop].max() - run.start_ns[start:stop].min()) for start, stop in bounds]
    longest = max(range(len(costs)), key=costs.__getitem__)
    start, stop = bounds[longest]
    work = int((run.end_ns[start:stop] - run.start_ns[start:stop]).sum())
    return 1 - work / costs[longest] if costs[longest] else 0.0


def rows(quick: bool = False) -> Iterator[Row]:
    for cell in BUBBLE_TABLE[:: 5 if quick else 1]:
        for name, published in cell.rates.items():
            yield _rate(cell, name, published)
    repeats = 1 if quick else 10
    for limit in (64, 128):
        search = partial(automatic, 64, 1024, ActionTimes(1.0, 1.0, 1.0, 0.05), limit)
        times = [seconds_of(search) for _ in range(repeats)]
        claim = f"automatic zero bubble for 64 stages x 1,024 micro-batches within {limit}"
        yield absolute(claim, times, bar=1.0, unit="s", note="196,608 actions; the steady state is tiled")


def _rate(cell: BubbleCell, name: str, published: float) -> Row:
    size = (cell.ranks, cell.microbatches)
    if name in BY_HAND:
        schedule, bar = SCHEDULES[name].make(*size), "equal to 4 decimals"
    else:
        held, limit = (1.0, cell.ranks) if name == "zb_1p" else (cell.held_after_input_gradient, 2 * cell.ranks)
        schedule = automatic(*size, cell.times, limit, held_after_input_gradient=held)
        bar = f"<= published + {ALLOWED}"
    ours = bubble_rate(simulate_schedule(schedule, cell.times))
    holds = abs(ours - published) <= 0.00005 + 1e-9 if name in BY_HAND else ours <= published + ALLOWED
    claim = f"bubble rate of {SCHEDULES[name].title}, {cell.model}, {cell.ranks} x {cell.microbatches}"
    note = "peer: arXiv:2401.10241 table 5; cost: the longest rank's own first start to last end"
    return Row(claim, ours, published, None, (ours, ours), "", bar, holds, note)


if __name__ == "__main__":
    run_script(__doc__, rows)
