"""One pass of rules: let ranks act in the order of time, each choosing F, I or W by what it knows at that moment.

A rank whose turn it is takes the first of these that it can:

1. W, where its debt (I whose W has not run) is above the rank's allowance: memory must come back first;
2. F, where an input is there, its lead (F whose I has not run) is below the rank's allowance, and memory has room;
3. I, where a gradient is there;
4. W, where the wait for the next F or I is long enough, or where waiting would make this rank the one with the largest
   bubble of all; or where memory is all that an input waits for;
5. nothing: it waits for its neighbours.

Allowances of lead and debt give the shape: leads fill the warm-up, debts fill the drain, and both cost memory. After
the warm-up a rank at its allowances repeats I, W, F.

Source: rules 4 and 5 and "memory first" follow Qi et al. 2023 (arXiv:2401.10241), section 3.1, whose B is our I.
Allowances instead of its "stage i stays one F ahead of stage i + 1", and the walk in the order of time, are ours.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from distlab.plan.schedules.grammar import F, I, W

UNKNOWN = 1 << 62  # the time of what no neighbour has started yet


class PassCosts(NamedTuple):
    """Times in whole numbers, one per stage, so that a steady state repeats exactly."""

    forward: list[int]
    input_gradient: list[int]
    weight_gradient: list[int]
    communication: list[int]


class Rules(NamedTuple):
    """What one pass may choose from.

    Attributes:
        lead: for each rank, the most F whose I has not run.
        debt: for each rank, the most I whose W has not run, before W comes first.
        patience: how much of a W must fit into a wait for W to fill it: 1, all of it; 0, nothing.
        limit: memory of a rank, in micro-batches' activations.
        held: the part of a micro-batch's activations that stays until W when I has run.
    """

    lead: list[int]
    debt: list[int]
    patience: float
    limit: float
    held: float


class Draft(NamedTuple):
    """A schedule of one stage per rank: kinds alone, since each kind goes through the micro-batches in order.

    Attributes:
        kinds: for each rank, the codes of what it runs.
        input_ends: for each rank, when each of its I ends.
        span: the longest time that any rank takes from its first start to its last end.
        end: when the last rank ends.
    """

    kinds: list[list[int]]
    input_ends: list[list[int]]
    span: int
    end: int


def follow_rules(num_microbatches: int, costs: PassCosts, rules: Rules) -> Draft:
    """Plan the micro-batches by the rules, in one to two microseconds per action."""
    walk = _Walk(num_microbatches, costs, rules)
    walk.run()
    assert all(count == num_microbatches for count in walk.num_w), "the rules left ranks waiting for each other"
    spans = [end - start for start, end in zip(walk.start, walk.end, strict=True)]
    return Draft(walk.kinds, walk.input_ends, max(spans), max(walk.end))


class _Walk:
    """All ranks in the order of time: what each has run so far, and when it looks again."""

    def __init__(self, num_microbatches: int, costs: PassCosts, rules: Rules) -> None:
        ranks = len(costs.forward)
        self.last, self.num_microbatches, self.costs, self.rules = ranks - 1, num_microbatches, costs, rules
        self.kinds: list[list[int]] = [[] for _ in range(ranks)]
        # When the input of each F and the gradient for each I arrive; what no neighbour has started is not there yet.
        self.inputs: list[list[int]] = [[0] * num_microbatches] + [[] for _ in range(ranks - 1)]
        self.gradients: list[list[int]] = [[] for _ in range(ranks)]
        self.input_ends: list[list[int]] = [[] for _ in range(ranks)]
        self.num_f, self.num_i, self.num_w = [0] * ranks, [0] * ranks, [0] * ranks
        self.start, self.end = [0] * ranks, [0] * ranks
        self.bubble, self.largest_bubble = [0] * ranks, 0
        self.turn = [0] + [UNKNOWN] * (ranks - 1)  # when each rank looks next
        self.queue = [(0, 0)]  # of turns; those that `turn` does not say any more are passed over

    def run(self) -> None:
        """Give each rank its turns until all is done.

        Most of a search is spent in this loop: hence the local names.
        """
        queue, turn, rules, act, fills = self.queue, self.turn, self.rules, self._act, self._fills
        all_f, all_i, all_w, inputs, gradients = self.num_f, self.num_i, self.num_w, self.inputs, self.gradients
        count, limit, held = self.num_microbatches, rules.limit, rules.held
        most_lead, most_debt = rules.lead, rules.debt
        while queue:
            now, rank = heapq.heappop(queue)
            if turn[rank] != now:
                continue
            num_f, num_i = all_f[rank], all_i[rank]
            lead, debt = num_f - num_i, num_i - all_w[rank]
            below = lead < most_lead[rank] and num_f < count
            room = below and lead + 1 + debt * held <= limit
            if debt > most_debt[rank]:
                again = act(rank, W, now)
            else:
                input_at = inputs[rank][num_f] if below and num_f < len(inputs[rank]) else UNKNOWN
                gradient_at = gradients[rank][num_i] if num_i < len(gradients[rank]) else UNKNOWN
                if room and input_at <= now:
                    again = act(rank, F, now)
                elif gradient_at <= now:
                    again = act(rank, I, now)
                elif debt and ((below and not room and input_at <= now) or fills(rank, now, room)):
                    again = act(rank, W, now)
                else:
                    again = min(input_at, gradient_at) if room else gradient_at
            turn[rank] = again
            if again != UNKNOWN:
                heapq.heappush(queue, (again, rank))

    def _fills(self, rank: int, now: int, room: bool) -> bool:
        """Say whether W should fill the wait for the next F or I, which takes this long at least."""
        costs, num_f, num_i = self.costs, self.num_f[rank], self.num_i[rank]
        soonest = UNKNOWN
        if num_i < len(self.gradients[rank]):
            soonest = self.gradients[rank][num_i]
        elif num_f > num_i:  # no rank has started it, so it takes at least that long
            soonest = now + costs.input_gradient[rank + 1] + costs.communication[rank + 1]
        if room:
            known = num_f < len(self.inputs[rank])
            input_at = (
                self.inputs[rank][num_f] if known else now + costs.forward[rank - 1] + costs.communication[rank - 1]
            )
            soonest = min(soonest, input_at)
        wait = soonest - now
        long_enough = wait >= self.rules.patience * costs.weight_gradient[rank]
        return long_enough or self.bubble[rank] + wait > self.largest_bubble

    def _act(self, rank: int, kind: int, now: int) -> int:
        """Run an action; return when it ends."""
        costs, told = self.costs, -1
        if not self.num_f[rank]:
            self.start[rank] = now
        elif now > self.end[rank]:
            self.bubble[rank] += now - self.end[rank]
            self.largest_bubble = max(self.largest_bubble, self.bubble[rank])
        if kind == F:
            end = now + costs.forward[rank]
            self.num_f[rank] += 1
            if rank < self.last:
                told = rank + 1
                self.inputs[told].append(end + costs.communication[rank])
            else:
                self.gradients[rank].append(end)
        elif kind == I:
            end = now + costs.input_gradient[rank]
            self.num_i[rank] += 1
            self.input_ends[rank].append(end)
            if rank:
                told = rank - 1
                self.gradients[told].append(end + costs.communication[rank])
        else:
            end = now + costs.weight_gradient[rank]
            self.num_w[rank] += 1
        self.kinds[rank].append(kind)
        self.end[rank] = end
        if told >= 0 and self.end[told] <= now < self.turn[told]:  # it waits, and now knows more
            self.turn[told] = now
            heapq.heappush(self.queue, (now, told))
        return end
