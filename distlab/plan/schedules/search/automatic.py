"""Automatic zero bubble: search for the schedule that fits the times of the actions and a limit of memory.

Schedules made by hand (zb_h1, zb_h2) fit F = I = W and free communication. Real stages are not like that: this module
plans from measured times. It tries several settings of a few rules (automatic_rules) and keeps the best; of a long step
it plans only as many micro-batches as it takes to get into the steady state, and repeats that (automatic_tiling).

What is best: the smallest span, the time of the slowest rank from its own first action to its own last one. That is
what a step costs when the optimizer of one rank need not wait for the others, and the papers' "cost"; of equal spans
the one whose last rank ends first.

Memory is counted in micro-batches' activations of a stage: an F takes one, its I gives back all but
`held_after_input_gradient` of it, its W the rest. With 1.0, the default, all is held until W, as
`validate(schedule).peak_in_flight` counts. 1F1B's first rank peaks at p.

Source: Qi et al. 2023 (arXiv:2401.10241), section 3.1: warm up with as many F as memory allows, then F and I by turns,
W in bubbles or when memory is full; a grid search over the choices. Written afresh from these words; settings and
tiling are ours.
The zero-bubble papers call our I "B".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from distlab.plan.require import require_count
from distlab.plan.schedules.grammar import ActionTimes, Schedule
from distlab.plan.schedules.search.rules import Draft, PassCosts, Rules, follow_rules
from distlab.plan.schedules.search.tiling import (
    Kinds,
    Steady,
    can_run,
    find_steady,
    schedule_of,
    span_and_end,
    tile,
)

RESOLUTION = 1_000_000  # the longest time, in the whole numbers that the search counts with
WORK = 150_000  # actions that a search may plan once it has a first schedule
WHOLE = 10_000  # actions of a step that is planned whole, without tiling
MARGIN = 12  # micro-batches beyond lead and debt that it takes to get into the steady state
UNIT_TIMES = ActionTimes(1.0, 1.0, 1.0)


# One choice for the rules: filled (0: warm up like 1F1B; 1: with as many F as fill the wait for the first I, if memory
# allows), and patience (how much of a W must fit into a wait for W to fill it).
SETTINGS = (  # the ones that win most often, alone and together with those before them, come first
    *((0, 0.5), (1, 0.5), (0.5, 1), (1.25, 0.5), (0.25, 0.5), (0.75, 0.5), (1, 1), (0, 1)),
    *((1.125, 1), (1.5, 0.5), (0.5, 0), (1.25, 0), (1, 0), (0, 0), (0.75, 1), (0.25, 1)),
)


def automatic(
    num_ranks: int,
    num_microbatches: int,
    times: ActionTimes = UNIT_TIMES,
    memory_limit: float | None = None,
    *,
    held_after_input_gradient: float = 1.0,
) -> Schedule:
    """Plan a zero-bubble schedule of one stage per rank for these times, with at most this much memory on every rank.

    Args:
        num_ranks: stages of the pipeline.
        num_microbatches: micro-batches of the step; any number, fewer than the ranks too.
        times: of the actions, in any unit.
        memory_limit: in micro-batches' activations; None: p, 1F1B's peak. 2p is about what no bubble at all takes.
        held_after_input_gradient: the part of a micro-batch's activations that stays until W when I has run.

    The search takes well under a second for 64 ranks x 1,024 micro-batches (benchmarks/zero_bubble.py measures it); a
    longer step takes no more than writing it down. A search by rules finds good schedules, not provably the best. Over
    200 random pipelines its span was at most 0.6 % above that of zb_h1 or zb_h2, where those fit. A tiled step's was
    at most as much above that of one planned whole.

    Raises:
        ValueError: a count below 1, a time that is negative or not one per stage, a limit below 1, a part outside 0..1.
    """
    require_count(num_ranks=num_ranks, num_microbatches=num_microbatches)
    memory_limit = num_ranks if memory_limit is None else memory_limit
    if not memory_limit >= 1:
        raise ValueError(
            f"memory_limit is {memory_limit}; a rank holds 1 micro-batch at least: pass a number from 1 up "
            f"({num_ranks}, the number of ranks, is what 1F1B takes)"
        )
    held = held_after_input_gradient
    if not 0 <= held <= 1:
        raise ValueError(f"held_after_input_gradient is {held}; pass the part that W still needs, from 0 to 1")
    costs = _whole_numbers(times, num_ranks)
    search = _Search(num_microbatches, costs)
    for filled, patience in SETTINGS:
        leads, debts = _allowances(filled, num_microbatches, costs, memory_limit, held)
        search.attempt(Rules(leads, debts, patience, memory_limit, held))
    return schedule_of(search.winner().kinds())


def zb_1p(num_ranks: int, num_microbatches: int, times: ActionTimes = UNIT_TIMES) -> Schedule:
    """Plan the automatic schedule within 1F1B's memory: p micro-batches on every rank.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 4, "ZB-1p".
    """
    return automatic(num_ranks, num_microbatches, times)


def zb_2p(
    num_ranks: int,
    num_microbatches: int,
    times: ActionTimes = UNIT_TIMES,
    *,
    held_after_input_gradient: float = 1.0,
) -> Schedule:
    """Plan the automatic schedule within twice 1F1B's memory: 2p micro-batches on every rank.

    The paper counts that an I gives back what its W does not need: of a GPT's layer 32 of 34 + 5 a s / h parts stay.

    Source: Qi et al. 2023 (arXiv:2401.10241), section 4, "ZB-2p".
    """
    held = held_after_input_gradient
    return automatic(num_ranks, num_microbatches, times, 2 * num_ranks, held_after_input_gradient=held)


def _whole_numbers(times: ActionTimes, num_ranks: int) -> PassCosts:
    """Scale the times to whole numbers, one per stage.

    Raises:
        ValueError: a time is negative or not finite, or there are not as many as stages.
    """
    columns = []
    for name, value in times._asdict().items():
        column = np.asarray(value, np.float64).reshape(-1)
        if column.size not in (1, num_ranks):
            raise ValueError(
                f"times has {column.size} numbers of {name}; pass one, or one for each of {num_ranks} stages"
            )
        if not (np.isfinite(column) & (column >= 0)).all():
            raise ValueError(f"times has {name} of {value!r}; pass times that are finite and not negative")
        columns.append(np.broadcast_to(column, num_ranks))
    longest = max(float(column.max()) for column in columns[:3])
    scale = RESOLUTION / longest if longest else 1.0
    return PassCosts(*(np.rint(column * scale).astype(np.int64).tolist() for column in columns))


def _allowances(
    filled: float, num_microbatches: int, costs: PassCosts, limit: float, held: float
) -> tuple[list[int], list[int]]:
    """Return what each rank is allowed of lead and of debt, within memory."""
    ranks = len(costs.forward)
    # From the start of a rank's first F to its first I, where nothing gets in the way.
    waits = [0] * ranks
    for rank in reversed(range(ranks)):
        waits[rank] = costs.forward[rank]
        if rank + 1 < ranks:
            travel = costs.communication[rank] + costs.communication[rank + 1]
            waits[rank] += waits[rank + 1] + costs.input_gradient[rank + 1] + travel
    most = min(math.floor(limit), num_microbatches)
    leads, debts = [], []
    for rank, (wait, forward, weight) in enumerate(zip(waits, costs.forward, costs.weight_gradient, strict=True)):
        low, high = ranks - rank, wait / max(forward, 1)
        leads.append(max(1, min(math.floor(low + filled * max(high - low, 0)), most)))
        # While the last I travel back, a rank has W to run; the later the rank, the longer they are under way.
        useful = waits[0] * (rank + 1) / ranks / max(weight, 1) + 2
        debts.append(math.floor(min(useful, num_microbatches, (limit - leads[rank]) / held if held else math.inf)))
    return leads, debts


class _Candidate(NamedTuple):
    """A schedule that some rules gave: a draft, and how often its steady part comes in addition."""

    draft: Draft
    steady: Steady | None = None
    copies: int = 0

    def guess(self) -> tuple[float, float]:
        """Return the span and the end of the last rank (the less, the better), from the draft's cycle."""
        longer = self.steady.cycle * self.copies if self.steady else 0
        return self.draft.span + longer, self.draft.end + longer

    def measure(self, costs: PassCosts) -> tuple[float, float]:
        """Return the same from a run. For a very long step, extrapolate from two shorter runs."""
        if self.steady is None:
            return self.draft.span, self.draft.end
        part = min(self.copies, 2 * len(self.draft.input_ends[0]) // self.steady.period + 2)
        span, end = span_and_end(tile(self.draft, self.steady, part), costs)
        if part == self.copies:
            return span, end
        less = part // 2
        before, _ = span_and_end(tile(self.draft, self.steady, less), costs)
        longer = (span - before) / (part - less) * (self.copies - part)
        return span + longer, end + longer

    def kinds(self) -> Kinds:
        """Write the whole schedule down."""
        if self.steady is None:
            return np.array(self.draft.kinds, np.int8)
        return tile(self.draft, self.steady, self.copies)


class _Search:
    """The schedules found so far, and how many more actions may be planned to find a better one."""

    def __init__(self, num_microbatches: int, costs: PassCosts) -> None:
        self.num_microbatches, self.costs = num_microbatches, costs
        self.found: list[_Candidate] = []
        self.left: float = WORK

    def attempt(self, rules: Rules) -> None:
        """Plan by these rules, unless it takes too long and there is a schedule already.

        All micro-batches are planned; or, of a long step, as few as show a steady state that can be repeated.
        """
        count, ranks = self.num_microbatches, len(rules.lead)
        planned = max(lead + debt for lead, debt in zip(rules.lead, rules.debt, strict=True)) + MARGIN
        if 3 * ranks * count <= WHOLE:
            planned = count
        while True:
            planned = min(planned, count)
            self.left -= 3 * ranks * planned
            if self.found and self.left < 0:
                return
            draft, more = follow_rules(planned, self.costs, rules), planned
            if planned == count:
                self.found.append(_Candidate(draft))
                return
            for steady in find_steady(draft, 2 * ranks):
                copies, rest = divmod(count - planned, steady.period)
                if can_run(tile(draft, steady, copies)):
                    if not rest:
                        self.found.append(_Candidate(draft, steady, copies))
                        return
                    more = rest  # so that whole periods are left
                    break
            planned += more

    def winner(self) -> _Candidate:
        """Measure the schedules, in the order of what they are guessed to cost, until no guess is below the best."""
        best, cost = self.found[0], (math.inf, math.inf)
        for candidate in sorted(self.found, key=_Candidate.guess):
            if candidate.guess() >= cost:
                break
            measured = candidate.measure(self.costs)
            if measured < cost:
                best, cost = candidate, measured
        return best
