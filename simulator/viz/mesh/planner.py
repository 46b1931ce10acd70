"""Draw a whole plan: its degrees, what the run costs, a step of it over time, and what its ranks hold."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from simulator.runs.money import Bill
from simulator.units import format_s, format_span
from simulator.viz.drawing.lanes import Side, place, shaded
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.plot import frame, put_title, spread_evenly
from simulator.viz.drawing.style import TEXT_PT
from simulator.viz.drawing.wording import percent
from simulator.viz.mesh.degrees import (
    LEFT_IN,
    MEMORY_LOW_IN,
    describe_degrees,
    draw_equation,
    draw_memory_bars,
    fit_and_utilization,
)
from simulator.viz.timeline.draw_rows import Scene, fill_axes, legend_boxes, limit_of, styles_of
from simulator.viz.timeline.timeline import MAX_BOXES

HEIGHT_IN, TIMELINE_IN, TALL_IN, SPANS_IN = 8.6, 6.0, 1.75, 3.3
MAX_ROWS = 8


def planner_figure(bill: Bill, *, title: str | None = None) -> Figure:
    """Draw a plan's degrees and wires, the price of its run, a step of some ranks over time, and their memory.

    Args:
        bill: what a run by the plan takes: `bill(simulate(...), Run(...))`.
        title: replaces the takeaway.
    """
    figure, pen = sheet(HEIGHT_IN)
    draw_equation(pen, bill.step.plan, bill.step, HEIGHT_IN - 1.3)
    pen.words((LEFT_IN, HEIGHT_IN - 2.0), cost_words(bill), size=TEXT_PT, bold=True, side="left")
    _draw_step(figure, pen, bill)
    draw_memory_bars(figure, pen, bill.step, top=2.65, bottom=MEMORY_LOW_IN)
    pen.flush()
    put_title(figure, title or fit_and_utilization(bill.step), _setting(bill))
    return figure


def describe_planner(bill: Bill) -> str:
    """Say in words what `planner_figure` shows."""
    return f"{describe_degrees(bill.step)}\nThe run: {cost_words(bill)}."


def cost_words(bill: Bill) -> str:
    """Say what the run takes."""
    dollars = "" if bill.dollars is None else f", {bill.dollars:,.0f} dollars"
    fails = f"; {percent(bill.goodput.useful, 1)} of the time counts" if bill.run.failures else ""
    return f"{bill.run.num_tokens:.3g} tokens: {format_span(86_400 * bill.days)}{dollars}{fails}"


def _setting(bill: Bill) -> str:
    cluster, price = bill.step.cluster, bill.run.price
    paid = "" if price is None else f", {price:g} dollars per GPU and hour"
    return f"{bill.step.workload.name} on {bill.num_devices} GPUs of {cluster.name}{paid}"


def _draw_step(figure: Figure, pen: Pen, bill: Bill) -> None:
    """Draw what the first rank of some stages computes in a step."""
    step = bill.step
    stages = spread_evenly(step.num_pipeline_ranks, MAX_ROWS)
    ranks = sorted(step.layout.ranks[stages, 0].tolist())
    trace = step.trace.from_zero()
    trace = shaded(trace.select(np.isin(trace.rank, ranks) & trace.is_word("lane", "compute")))
    sides, exact = (Side(trace, False),), len(trace) <= MAX_BOXES
    placement = place(sides, ranks, ("compute",), seen=(np.ones(len(trace), bool),), levels=exact)
    scene = Scene(sides, placement, styles_of(sides), limit_of(sides))
    margins = {"left": 1.15, "right": 0.5, "top": HEIGHT_IN - TIMELINE_IN, "bottom": TIMELINE_IN - TALL_IN}
    fill_axes(frame(figure, **margins, bare=True), scene, (0.0, scene.limit_s), exact=exact)
    what = "a rank of each stage computes" if step.num_pipeline_ranks > 1 else "every rank computes"
    some = f" ({len(stages)} of {step.num_pipeline_ranks} stages)" if len(stages) < step.num_pipeline_ranks else ""
    heading = f"what {what} over a step{some}: {format_s(step.duration_s)}"
    pen.words((LEFT_IN, TIMELINE_IN + 0.15), heading, size=TEXT_PT, bold=True, side="left")
    pen.legend(legend_boxes(scene.styles, False), low=SPANS_IN)
