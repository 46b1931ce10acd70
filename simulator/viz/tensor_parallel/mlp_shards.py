"""Draw a feed-forward layer cut over ranks, with its numbers: what one process and each rank has after each step.

The first line is one process, each further line is a rank. An entry's colour is the rank that has it alone. What every
rank has alike is grey-blue. A frame marks what the step has just made.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.plot import put_title
from simulator.viz.drawing.style import (
    FAINT,
    IDLE,
    INK,
    RANK_COLOURS,
    SHARED,
    SMALL_PT,
    TEXT_PT,
    WIDTH_IN,
    Colour,
    LegendBox,
    pale,
    text_colour,
)
from simulator.viz.drawing.wording import counted
from simulator.viz.tensor_parallel.mlp_case import STEPS, MlpCase, Stage, mlp_case

TOP_IN, FOOT_IN, LEFT_IN, HEAD_IN, CELL_IN, MAX_RANKS = 1.0, 0.95, 1.15, 0.35, 0.42, 4
GAP_IN, COMMON, SUMMAND, GRADIENT = 0.36, pale(SHARED, 0.35), "summand", "X's gradient"
Floats = NDArray[np.float64]


def mlp_figure(
    num_ranks: int = 2, step: int = len(STEPS) - 2, *, case: MlpCase | None = None, title: str | None = None
) -> Figure:
    """Draw the layer after a step: what one process has, and what each rank has.

    Args:
        num_ranks: 1 to 4, if `case` is not given.
        step: 0 to 5, as STEPS.
        case: numbers of one's own, of `mlp_case`.
        title: replaces the takeaway.

    Raises:
        ValueError: no such step, too many ranks to draw, or as `mlp_case`.
    """
    case = _checked(num_ranks, step, case)
    tall = max(len(stage.whole) for stage in case.stages) * CELL_IN + HEAD_IN
    height = TOP_IN + tall * (case.num_ranks + 1) + FOOT_IN
    figure, pen = sheet(height)
    stages = _stages(case, step)
    cell = min(0.6, (WIDTH_IN - LEFT_IN - 0.2 - GAP_IN * len(stages)) / sum(stage.whole.shape[1] for stage in stages))
    for line in range(case.num_ranks + 1):
        top = height - TOP_IN - tall * line
        name = "one process" if not line else f"rank {line - 1}"
        middle = top - HEAD_IN - (tall - HEAD_IN) / 2
        pen.words((0.16, middle), name, size=TEXT_PT if line else SMALL_PT, side="left", bold=True)
        x = LEFT_IN + 0.2
        for stage in stages:
            wide = stage.whole.shape[1] * cell
            if not line:
                pen.words((x + wide / 2, top - 0.17), stage.name, size=TEXT_PT, bold=True)
            if line or stage.name != SUMMAND:  # one process has no summands
                _draw_stage(pen, stage, (x, middle), cell, line - 1, step)
            added = (stage.name == SUMMAND and step >= 4) or stage.name == GRADIENT
            if added and line > 1:
                pen.words((x + wide / 2, top - 0.1), "+", size=TEXT_PT, bold=True)
            x += wide + GAP_IN
    pen.legend(
        [LegendBox(RANK_COLOURS[rank], "white", f"r{rank}", f"rank {rank}") for rank in range(case.num_ranks)]
        + [LegendBox(COMMON, "white", "", "on every rank alike"), LegendBox(IDLE, FAINT, "", "not here, or not yet")]
    )
    pen.flush()
    put_title(figure, title or _step_title(step), _held_and_sent(case, step))
    return figure


def describe_mlp(num_ranks: int = 2, step: int = len(STEPS) - 2, *, case: MlpCase | None = None) -> str:
    """Say in words and numbers what `mlp_figure` shows; arguments and errors as there."""
    case = _checked(num_ranks, step, case)
    lines = [f"{_step_title(step)}. {_held_and_sent(case, step)}"]
    for rank in range(case.num_ranks):
        new = [f"{stage.name} = {_written(stage.parts[rank])}" for stage in case.stages if stage.step == min(step, 4)]
        if step == len(STEPS) - 1:
            new = [f"part of X's gradient = {_written(case.gradient_parts[rank])}"]
        lines.append(f"Rank {rank}: {', '.join(new)}.")
    if step == len(STEPS) - 1:
        lines.append(f"X's gradient on every rank: {_written(case.gradient)}.")
    return "\n".join(lines)


def _checked(num_ranks: int, step: int, case: MlpCase | None) -> MlpCase:
    case = mlp_case(num_ranks) if case is None else case
    if not 0 <= step < len(STEPS):
        raise ValueError(f"there is no step {step}; choose 0 to {len(STEPS) - 1}")
    if case.num_ranks > MAX_RANKS:
        raise ValueError(f"{case.num_ranks} ranks; at most {MAX_RANKS} can be drawn with their numbers")
    return case


def _step_title(step: int) -> str:
    return f"Step {step}: {STEPS[step]}"


def _held_and_sent(case: MlpCase, step: int) -> str:
    hidden, ranks = case.stages[1].whole.shape[1], case.num_ranks
    on = f"{counted(ranks, 'rank')}"
    held = f"Y = GeLU(X A) B on {on}: {hidden // ranks} of {hidden} hidden features each."
    entries = case.stages[-1].whole.size
    if step < 4:
        return f"{held} Nothing was sent so far."
    return f"{held} Sent so far: {step - 3} all-reduce{'s' if step > 4 else ''} of {entries} numbers."


def _written(values: Floats) -> str:
    return "[" + "; ".join(" ".join(_number(value) for value in row) for row in values) + "]"


def _number(value: float) -> str:
    return f"{value + 0.0:.2f}".replace("-0.00", "0.00")


def _stages(case: MlpCase, step: int) -> tuple[Stage, ...]:
    """Return the columns of the picture: in the backward step X's gradient stands where X was."""
    if step < len(STEPS) - 1:
        return case.stages
    return (Stage(GRADIENT, case.gradient, case.gradient_parts, step), *case.stages[1:])


def _draw_stage(pen: Pen, stage: Stage, place: tuple[float, float], cell: float, rank: int, step: int) -> None:
    """Draw one value of one line (rank -1: one process): at its place in the whole, empty where the rank has none."""
    x, middle = place
    whole = stage.whole
    mine = whole if rank < 0 else stage.parts[rank]
    rows, columns = _place(whole, mine, rank)
    top = middle + len(whole) * CELL_IN / 2
    for row, column in np.ndindex(whole.shape):
        corner = (x + column * cell, top - (row + 1) * CELL_IN)
        known = row in rows and column in columns and (rank < 0 or stage.step <= step)
        fill = _fill(stage, rank, row, column) if known else IDLE
        pen.box(corner, cell, CELL_IN, fill)
        if known:
            value = float(mine[row - rows.start, column - columns.start])
            spot = (corner[0] + cell / 2, corner[1] + CELL_IN / 2)
            pen.words(spot, _number(value), size=min(SMALL_PT, 22 * cell), colour=text_colour(fill))
    if rank >= 0 and stage.step == step:
        corner = (x + columns.start * cell, top - rows.stop * CELL_IN)
        pen.outline(corner, len(columns) * cell, len(rows) * CELL_IN, INK, line=2.0)


def _place(whole: Floats, mine: Floats, rank: int) -> tuple[range, range]:
    """Return which rows and columns of the whole a rank's part is."""
    rows, columns = mine.shape
    first_row = rank * rows if rows < len(whole) else 0
    first_column = rank * columns if columns < whole.shape[1] else 0
    return range(first_row, first_row + rows), range(first_column, first_column + columns)


def _fill(stage: Stage, rank: int, row: int, column: int) -> Colour:
    """Return an entry's colour: its rank's, or one for what all have; in one process, paler, whose it will be."""
    if stage.name in ("X", "Y") or (rank < 0 and stage.name == GRADIENT):
        return COMMON
    if rank >= 0:
        return RANK_COLOURS[rank]
    count = len(stage.parts)
    at, size = (row, len(stage.whole)) if stage.name == "B" else (column, stage.whole.shape[1])
    return pale(RANK_COLOURS[at * count // size], 0.5)
