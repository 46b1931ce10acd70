"""Automatic zero bubble: search for the schedule that fits the times of the actions and a limit of memory.

Schedules made by hand (zb_h1, zb_h2) fit F = I = W and free communication. Real stages are not like that: this module
plans from measured times. It tries several settings of a few rules (`rules`) and keeps the best.

Tiling: of a long step it plans only as many micro-batches as it takes to get into the steady state, and repeats that.
In its steady state a rank repeats one F, one I and one W, in some order; where memory is short, something longer with
as many of each. What is followed by the same once more can be put in as often as wanted: the rank's lead, debt and
memory are the same after it.

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
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.require import require, require_count
from distlab.plan.schedules.basic import one_stage_a_rank
from distlab.plan.schedules.grammar import ActionTimes, F, I, Schedule, W
from distlab.plan.schedules.rules import Draft, PassCosts, Rules, follow_rules

RESOLUTION = 1_000_000  # the longest time, in the whole numbers that the search counts with
WORK = 150_000  # actions that a search may plan once it has a first schedule
WHOLE = 10_000  # actions of a step that is planned whole, without tiling
MARGIN = 12  # micro-batches beyond lead and debt that it takes to get into the steady state
UNIT_TIMES = ActionTimes(1.0, 1.0, 1.0)
Kinds = NDArray[np.int8]


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
    num_ranks: int, num_microbatches: int, times: ActionTimes = UNIT_TIMES, *, held_after_input_gradient: float = 1.0
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
        text = f"times has {column.size} numbers of {name}; pass one, or one for each of {num_ranks} stages"
        require(column.size in (1, num_ranks), text)
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


class Steady(NamedTuple):
    """Where a draft repeats.

    Attributes:
        period: micro-batches after which it does.
        cut: for each rank, the place before the 3 x period actions to repeat.
        cycle: time that they take, on the slowest rank.
    """

    period: int
    cut: NDArray[np.int64]
    cycle: float


def find_steady(draft: Draft, longest_period: int) -> Iterator[Steady]:
    """Find the periods that every rank keeps to for a while, the shortest first.

    Each rank is cut as near as can be to the same moment, since what ranks do at one moment fits together.
    """
    kinds, ends = np.array(draft.kinds, np.int8), np.array(draft.input_ends)  # [p, 3 m] and [p, m]
    length, rows = kinds.shape[1], np.arange(len(kinds))
    num_f, num_i = (np.pad(np.cumsum(kinds == kind, axis=1, dtype=np.int32), ((0, 0), (1, 0))) for kind in (F, I))
    done = (ends <= draft.end // 2).sum(axis=1)  # each rank's I at half-time, and its place then
    halfway = (num_i[:, 1:] < done[:, None]).sum(axis=1)
    distance = np.abs(np.arange(length) - halfway[:, None])
    for period in range(1, min(longest_period, length // 9) + 1):
        width = 3 * period
        # Places at which two periods have ended that are like what follows, with one F, I and W a micro-batch.
        index, differ = np.arange(length - width), kinds[:, :-width] != kinds[:, width:]
        alike = index - np.maximum.accumulate(np.where(differ, index, -1), axis=1)  # how many in a row end here
        repeats = alike[:, width - 1 :] >= 2 * width
        for count in (num_f, num_i):
            repeats &= count[:, width:-width] - count[:, : -2 * width] == period
        if repeats.any(axis=1).all():
            cut = np.where(repeats, distance[:, : repeats.shape[1]], length).argmin(axis=1)
            first = num_i[rows, cut]
            yield Steady(period, cut, float((ends[rows, first + period] - ends[rows, first]).max()))


def tile(draft: Draft, steady: Steady, num_copies: int) -> Kinds:
    """Return the kinds of the draft with the steady part of each rank that many times more."""
    width, rows = 3 * steady.period, []
    for row, cut in zip(np.array(draft.kinds, np.int8), steady.cut.tolist(), strict=True):
        rows.append(np.concatenate([row[:cut], np.tile(row[cut : cut + width], num_copies), row[cut:]]))
    return np.stack(rows)


def can_run(kinds: Kinds) -> bool:
    """Say whether ranks with this order never wait for each other in a circle.

    They do not where, for every j, each rank has run at least as many F before I j as the rank behind it. For then this
    runs: for j = 0, 1, ..., from the first rank to the last all F that come before I j, then I j from the last rank to
    the first. Where a rank has run fewer, the two wait for each other.
    """
    num_ranks, length = kinds.shape
    before = np.cumsum(kinds == F, axis=1, dtype=np.int32)[kinds == I].reshape(num_ranks, length // 3)
    own = before[-1] > np.arange(length // 3)
    return bool(own.all() and (before[1:] <= before[:-1]).all())


def span_and_end(kinds: Kinds, costs: PassCosts) -> tuple[int, int]:
    """Return the longest time from a rank's first start to its last end, and when the last rank ends.

    The cost of a tiled schedule is first guessed from its draft; before one is chosen, this runs it. In the order that
    `can_run` shows to be possible: for each micro-batch j, from the first rank to the last all that comes before I j,
    then I j from the last rank to the first.
    """
    num_ranks, length = kinds.shape
    last, rows = num_ranks - 1, [iter(row) for row in kinds.tolist()]
    clock, start = [0] * num_ranks, [-1] * num_ranks
    inputs: list[list[int]] = [[0] * (length // 3)] + [[] for _ in range(num_ranks)]  # when each arrives at each rank
    num_f, num_w = [0] * num_ranks, [0] * num_ranks
    for _microbatch in range(length // 3):
        for rank in range(num_ranks):
            now = clock[rank]
            for kind in rows[rank]:
                if kind == I:
                    break
                if kind == W:
                    now += costs.weight_gradient[rank]
                    num_w[rank] += 1
                    continue
                assert kind == F
                begin = max(now, inputs[rank][num_f[rank]])
                if start[rank] < 0:
                    start[rank] = begin
                now = begin + costs.forward[rank]
                num_f[rank] += 1
                inputs[rank + 1].append(now + costs.communication[rank])
            clock[rank] = now
        gradient = 0
        for rank in range(last, -1, -1):
            clock[rank] = max(clock[rank], gradient) + costs.input_gradient[rank]
            gradient = clock[rank] + costs.communication[rank]
    for rank, done in enumerate(num_w):
        clock[rank] += (length // 3 - done) * costs.weight_gradient[rank]
    return max(end - begin for begin, end in zip(start, clock, strict=True)), max(clock)


def schedule_of(kinds: Kinds) -> Schedule:
    """Number the micro-batches of each kind in order, one stage per rank."""
    num_ranks, length = kinds.shape
    microbatch = np.empty(kinds.shape, np.int32)
    for kind in (F, I, W):
        microbatch[kinds == kind] = np.tile(np.arange(length // 3, dtype=np.int32), num_ranks)
    return one_stage_a_rank(kinds, microbatch)


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
