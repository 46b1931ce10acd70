"""Best-first search: simulate plans in the order of their bounds, until no bound is below the best step.

A row comes off the heap with a bound. First the bound is drawn tighter, by the stages into which the row cuts the
model, then by running its passes and messages alone; then the step is simulated. Rows without room are left out on the
way. A simulated step that comes off the heap is at most as long as every bound that is left, so it is the best: exactly
the plan that simulating all of them would find.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Plan
from simulator.advisor.bounds import Pipelines
from simulator.advisor.candidates import candidates
from simulator.advisor.question import Candidates, Question, Shape
from simulator.step.result import Step
from simulator.step.simulate import simulate

ROUGH, TIGHT, RUN, EXACT = range(4)
TELL_EVERY = 25
Tell = Callable[[int, int, float], None]


@dataclass(frozen=True, eq=False)
class Choice:
    """A plan that was simulated and fits.

    Attributes:
        question: the question that this plan answers.
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

    @cached_property
    def pipelines(self) -> Pipelines:
        """Tight bounds."""
        return Pipelines(self.found)

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
        rows = np.arange(len(self.found)) if among is None else np.flatnonzero(among)
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
                    if self.may_fit(row):
                        heapq.heappush(heap, (max(bound, self.pipelines.short_s(row)), TIGHT, row))
                elif level == TIGHT and self.found.pipeline[row] > 1:
                    heapq.heappush(heap, (max(bound, self.pipelines.bound_s(row)), RUN, row))
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
        """Simulate a row; None where it does not fit."""
        if row not in self._exact:
            question = self.found.question
            step = simulate(self.found.workload(row), question.cluster, self.found.plan(row))
            self.num_simulated += 1
            self._exact[row] = Choice(question, step.plan, step) if step.memory.fits(question.device) else None
        return self._exact[row]

    def may_fit(self, row: int) -> bool:
        """Return whether a row's fullest rank may have room."""
        return self.pipelines.least_bytes(row) <= self.found.question.device.memory_bytes

    def tight_s(self, row: int) -> float:
        """Return a time that a row's step is not below: by its passes and messages."""
        return self.pipelines.bound_s(row) if self.found.pipeline[row] > 1 else 0.0

    @property
    def least_bytes(self) -> float:
        """Bytes that a device holds at least under the plan that needs least."""
        return min(map(self.pipelines.least_bytes, range(len(self.found))))

    def too_large(self) -> list[int]:
        """Return rows that do not fit and could be faster than the best, those that lack least memory first."""
        best = min((choice.seconds for choice in self.choices), default=np.inf)
        rows = np.flatnonzero(self.found.bound_s < best).tolist()
        large = [row for row in rows if not self.may_fit(row) or (row in self._exact and self._exact[row] is None)]
        return sorted(large, key=self.pipelines.least_bytes)


def search(question: Question, keep: Callable[[Shape], bool] | None = None) -> Search:
    """Return a search over all plans for a question, or over those of the shapes to keep; see `Search.best`.

    Raises:
        ValueError: no plan divides the model and the batch among the devices.
    """
    return Search(candidates(question, keep))
