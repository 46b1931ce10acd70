"""What is wrong with a schedule, and where: the error and the grid that points at it."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

import numpy as np

from distlab.plan.schedules.grammar import Action, Schedule


class ScheduleError(ValueError):
    """A schedule that cannot run, or would compute something else.

    Attributes:
        rank: rank of the fault, or None where no rank runs the stage.
        step: place in that rank's order, from 0, or None where something is missing.
        near: the step that the grid points at: `step`, or the step next to which the missing action belongs, if any.
        action: the action at fault, or the one that is missing.
        expected: what a right schedule has there.
        got: what this one has.
        advice: what to do.
        schedule: the whole schedule.
    """

    def __init__(self, schedule: Schedule, row: int | Action, *, expected: str, got: str, advice: str) -> None:
        """Describe the fault at a row of the schedule, or that of an action which is missing."""
        self.schedule, self._row = schedule, row
        self.expected, self.got, self.advice = expected, got, advice
        self.step: int | None = None
        self.rank: int | None = None
        self.near: int | None = None
        if isinstance(row, Action):
            self.action = row
            owned = np.flatnonzero(schedule.stage == row.stage)
            beside = owned[schedule.microbatch[owned] == row.microbatch]
            self.rank = int(schedule.rank[(beside if beside.size else owned)[-1]]) if owned.size else None
            self.near = int(schedule.step[beside[-1]]) if beside.size else None
        else:
            self.action = schedule.action(row)
            self.rank, self.step = int(schedule.rank[row]), int(schedule.step[row])
            self.near = self.step
        where = "no rank" if self.rank is None else f"rank {self.rank}"
        where += "" if self.step is None else f", step {self.step}"
        super().__init__(f"{where}, {self.action}: expected {expected}; got {got}; {advice}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the parts, so that the error travels from a rank to its launcher."""
        make = partial(ScheduleError, expected=self.expected, got=self.got, advice=self.advice)
        return make, (self.schedule, self._row)

    @property
    def grid(self) -> str:
        """The steps around the fault as text, with an arrow: at it, or where what is missing belongs."""
        return text_grid(self.schedule, self, context=3)


def text_grid(schedule: Schedule, fault: ScheduleError | None = None, *, context: int | None = None) -> str:
    """Print a schedule as a grid: one column per rank, one row per step, and an arrow at the row of the fault.

    A step is a place in a rank's order, not a time: ranks do not run their steps in lockstep. With `context`, only that
    many rows before and after the fault are printed.
    """
    rank, step = (None, None) if fault is None else (fault.rank, fault.near)
    missing = f"{fault.action} is missing" if fault is not None and fault.step is None else ""
    columns = [[str(action) for action in schedule.actions(r)] for r in range(schedule.num_ranks)]
    rows = [list(cells) for cells in zip_longest(*columns, fillvalue="")]
    shown = range(len(rows))
    if context is not None and step is not None:
        shown = range(max(step - context, 0), min(step + context + 1, len(rows)))
    labels = [f"step {index}" for index in shown]
    heads = [f"rank {index}" for index in range(len(columns))]
    widths = [max(len(head), *(len(rows[index][r]) for index in shown), 0) for r, head in enumerate(heads)]
    margin = max(map(len, labels), default=0)
    lines = [" " * margin + "  " + "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))]
    for label, index in zip(labels, shown, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(rows[index], widths, strict=True))
        arrow = f"  <-- rank {rank}: {missing or rows[index][rank]}" if index == step and rank is not None else ""
        lines.append(f"{label.ljust(margin)}  {cells}{arrow}")
    return "\n".join(line.rstrip() for line in lines)
