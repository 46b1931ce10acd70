"""Best-first search: simulate plans in the order of what they cannot be better than, until nothing can be better.

A row comes off the heap with a bound. First the bound is drawn tighter, by the stages into which the row cuts the
model; then memory is counted; then the step is simulated. A simulated step that comes off the heap is at most as long
as every bound that is left, so it is the best: exactly the plan that simulating all of them would find.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Plan
from simulator.advisor.bounds import tight_s
from simulator.advisor.candidates import candidates
from simulator.advisor.question import Candidates, Question
from simulator.memory.memory import memory_of
from simulator.step.result import Step
from simulator.step.simulate import simulate

ROUGH, TIGHT, EXACT = range(3)
TELL_EVERY = 25
Tell = Callable[[int, int, float], None]


@dataclass(frozen=True, eq=False)
class Choice:
    """A plan that was simulated and fits.

    Attributes:
        question: what it is an answer to.
        plan: the plan.
        step: its step.
    """

    question: Question
    plan: Plan
    step: Step

    @property
    def seconds(self) -> float:
        """Of a step in a run."""
        return self.step.steady_s

    @property
    def microbatch(self) -> int:
        """Samples in a micro-batch."""
        return self.step.workload.samples


@dataclass(eq=False)
class Search:
    """Plans for one question, simulated as far as was necessary.

    Attributes:
        found: all plans in columns.
        num_simulated: steps simulated so far.
        is_complete: False after an interrupt, where better plans may be left.
    """

    found: Candidates
    num_simulated: int = 0
    is_complete: bool = True
    _exact: dict[int, Choice | None] = field(default_factory=dict)
    _tight: dict[int, float] = field(default_factory=dict)

    def best(
        self,
        count: int = 1,
        *,
        among: NDArray[np.bool_] | None = None,
        most: int | None = None,
        tell: Tell | None = None,
    ) -> list[Choice]:
        """Return the plans with the shortest steps, the best first; of equal ones the first in the order of rows.

        Args:
            count: how many.
            among: rows to choose from; None: all.
            most: steps to simulate at most; then the best of them are returned. None: as many as it takes.
            tell: called now and then with the rows left, the steps simulated, and the best so far in seconds.

        An interrupt ends the search: what was simulated by then is returned, and `is_complete` is False.
        """
        rows = np.flatnonzero(self.found.fitting if among is None else self.found.fitting & among)
        heap = [
            (bound, ROUGH, row) for row, bound in zip(rows.tolist(), self.found.bound_s[rows].tolist(), strict=True)
        ]
        heapq.heapify(heap)
        chosen: list[Choice] = []
        last = None if most is None else self.num_simulated + most
        try:
            while heap and len(chosen) < count and self.num_simulated != last:
                bound, level, row = heapq.heappop(heap)
                if level == EXACT:
                    chosen.append(self._choice(row))
                elif level == ROUGH:
                    heapq.heappush(heap, (max(bound, self.tight_s(row)), TIGHT, row))
                elif (choice := self.exact(row)) is not None:
                    heapq.heappush(heap, (choice.seconds, EXACT, row))
                    if tell and self.num_simulated % TELL_EVERY == 0:
                        tell(len(heap), self.num_simulated, min(each.seconds for each in self.choices))
        except KeyboardInterrupt:
            self.is_complete = False
        done = sorted((entry for entry in heap if entry[1] == EXACT), key=lambda entry: (entry[0], entry[2]))
        return chosen + [self._choice(row) for _, _, row in done[: count - len(chosen)]]

    @property
    def choices(self) -> list[Choice]:
        """All that was simulated and fits."""
        return [choice for choice in self._exact.values() if choice is not None]

    def _choice(self, row: int) -> Choice:
        choice = self._exact[row]
        assert choice is not None, "only rows that fit are kept"
        return choice

    def exact(self, row: int) -> Choice | None:
        """Simulate a row; None where it does not fit, or no program runs it."""
        if row not in self._exact:
            self._exact[row] = self._simulate(row)
        return self._exact[row]

    def _simulate(self, row: int) -> Choice | None:
        question, plan, workload = self.found.question, self.found.plan(row), self.found.workload(row)
        device = question.device
        if not memory_of(workload, plan).fits(device):
            return None
        step = simulate(workload, question.cluster, plan)
        self.num_simulated += 1
        return Choice(question, plan, step) if step.memory.fits(device) else None

    def tight_s(self, row: int) -> float:
        """Return a time that a row's step is not below, from the stages that the model is cut into."""
        if row not in self._tight:
            self._tight[row] = tight_s(self.found, row)
        return self._tight[row]

    def too_large(self) -> list[int]:
        """Return rows that do not fit and could be faster than the best, those that lack least memory first."""
        best = min((choice.seconds for choice in self.choices), default=np.inf)
        large = ~self.found.fitting
        large[[row for row, choice in self._exact.items() if choice is None]] = True
        rows = np.flatnonzero(large & (self.found.bound_s < best))
        return [int(row) for row in rows[np.argsort(self.found.bytes[rows], kind="stable")]]


def search(question: Question) -> Search:
    """Return a search over all plans for a question; see `Search.best`.

    Raises:
        ValueError: no plan divides the model and the batch among the devices.
    """
    return Search(candidates(question))
