"""Draw what degrees give: memory, where the time of a step goes, utilisation; with a run, its price and its step."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from distlab.plan import AXES, Plan
from simulator.memory.memory import KINDS
from simulator.runs.money import Bill
from simulator.step.simulate import Step
from simulator.sweeps.axis_order import axes_inside_nodes
from simulator.units import counted, format_bytes, format_s, format_span, percent
from simulator.viz.drawing import theme
from simulator.viz.drawing.lanes import Side, place, shaded
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import frame, spread_evenly, width_in
from simulator.viz.memory import CAPACITY_LINE, MEMORY_KINDS, boxes_of_kinds, stack_bars
from simulator.viz.mesh.mesh import axis_style
from simulator.viz.timeline.timeline import MAX_BOXES, Scene, fill_axes, legend_boxes, limit_of, styles_of

COMPUTE, BUBBLE = "compute", "bubble"
COMPUTE_COLOUR, BUBBLE_COLOUR = "#56B4E9", "#D0D0D0"


class TimePart(NamedTuple):
    """A part of a step's time."""

    name: str
    letter: str
    words: str
    colour: str
    seconds: float


def parts_of(step: Step) -> list[TimePart]:
    """Split a step's duration on the rank that ends last; the parts sum to it.

    Exposed are the seconds of `Step.exposed_by_axis`, the bubble is the rank's other idle time before its last pass,
    and compute is the rest: layers, copies and the update.
    """
    exposed, bubble = step.exposed_by_axis, _bubble_s(step)
    by_axis = [
        TimePart(axis, theme.AXIS_STYLES[axis].letter, f"{axis} exposed", theme.AXIS_STYLES[axis].colour, exposed[axis])
        for axis in reversed(AXES)
    ]
    rest = step.duration_s - bubble - sum(part.seconds for part in by_axis)
    return [
        TimePart(COMPUTE, "", "compute", COMPUTE_COLOUR, rest),
        *by_axis,
        TimePart(BUBBLE, "b", "bubble", BUBBLE_COLOUR, bubble),
    ]


def _bubble_s(step: Step) -> float:
    """Return how long the rank that ends last idles before its last pass, and not because a message is on its way."""
    timing, ends = step.timing, []
    for rank in range(step.num_pipeline_ranks):
        calls = timing.calls[rank] if timing.calls else ()
        ends.append(max([timing.optimizer[rank][1], *(call.end_ns for call in calls)]))
    rank = ends.index(max(ends))
    passes = slice(int(timing.order.offsets[rank]), int(timing.order.offsets[rank + 1]))
    start, end = timing.start_ns[passes], timing.end_ns[passes]
    idle_s = (int(end.max()) - int((end - start).sum())) / 1e9
    return max(0.0, idle_s - step.exposed_by_axis["pipeline"]) if step.num_pipeline_ranks > 1 else 0.0


HEIGHT_IN, LEFT_IN, BAR_IN, MAX_ROWS = 6.6, 0.25, 0.5, 6
TIME_IN, MEMORY_LOW_IN = 4.55, 1.25
RUN_HEIGHT_IN, TIMELINE_IN, TALL_IN, SPANS_IN, MAX_SPAN_ROWS = 8.6, 6.0, 1.75, 3.3, 8  # with the price of a run
BAD = "#B40000"
REASON_CHARACTERS = 110  # of a line


def draw_degrees(step: Step, *, num_devices: int | None = None) -> Picture:
    """Draw a plan's memory against the device's, its step's time by what it is spent on, and its utilisation.

    Args:
        step: what `simulate` returned.
        num_devices: GPUs that there are; those that the plan leaves idle are told. By default the plan uses all.
    """
    figure, pen = sheet(HEIGHT_IN)
    draw_equation(pen, step.plan, step, HEIGHT_IN - 1.3)
    _draw_time(pen, step)
    draw_memory_bars(figure, pen, step, top=2.9, bottom=MEMORY_LOW_IN)
    return pen.finish(fit_and_utilization(step), _speed_of_step(step, num_devices), *_say(step))


def _say(step: Step) -> list[str]:
    """Say a plan's equation, its step's time, its memory and what it sends."""
    parts = ", ".join(f"{part.words} {format_s(part.seconds)}" for part in parts_of(step) if part.seconds > 0)
    memory, capacity = step.memory, step.cluster.device.memory_bytes
    rank = memory.fullest_stage
    held = ", ".join(
        f"{MEMORY_KINDS[kind].words} {format_bytes(number)}"
        for kind, number in zip(KINDS, memory.at_peak_bytes[rank].tolist(), strict=True)
        if number
    )
    sent = ", ".join(f"{axis} {format_bytes(number)}" for axis, number in step.sent_bytes_by_axis.items() if number > 0)
    return [
        f"{equation(step.plan)}.",
        f"Time: {parts}.",
        f"Memory of the fullest rank: {format_bytes(memory.max_bytes)} of {format_bytes(capacity)}: {held}.",
        f"Sent per rank: {sent or 'nothing'}.",
    ]


def draw_impossible(plan: Plan, reason: str) -> Picture:
    """Draw the degrees of a plan that cannot run, and say why."""
    _, pen = sheet(HEIGHT_IN)
    draw_equation(pen, plan, None, HEIGHT_IN - 1.3)
    lines = textwrap.wrap(reason, REASON_CHARACTERS)
    top = TIME_IN - 0.1
    tall = 0.3 * len(lines) + 0.4
    pen.box((LEFT_IN, top - tall), theme.WIDTH_IN - 2 * LEFT_IN, tall, "#FBEDED", edge=BAD, line=1.6)
    for number, line in enumerate(lines):
        pen.words((LEFT_IN + 0.2, top - 0.35 - 0.3 * number), line, size=theme.TEXT_PT + 1, side="left")
    picture = pen.finish("This plan cannot run", "Drag a slider: the reason says which.")
    return picture._replace(words=f"This plan cannot run: {equation(plan)}. Why: {reason}.")


def equation(plan: Plan) -> str:
    """Write the product of all degrees, such as 'pipeline (2) x data (4) x ... x tensor (8) = 64 ranks'."""
    product = " x ".join(f"{axis} ({getattr(plan, axis)})" for axis in AXES)
    return f"{product} = {counted(plan.world_size, 'rank')}"


def fit_and_utilization(step: Step) -> str:
    """Return the takeaway: whether a step fits, how much of the peak it uses, and what costs most."""
    memory, capacity = step.memory, step.cluster.device.memory_bytes
    if memory.max_bytes > capacity:
        return f"Does not fit: {format_bytes(memory.max_bytes)} per rank, and a device has {format_bytes(capacity)}"
    parts = [part for part in parts_of(step) if part.name != COMPUTE]
    most = max(parts, key=lambda part: part.seconds)
    used = f"{percent(step.utilization)} of the peak is used"
    if most.seconds < 0.01 * step.duration_s:
        return f"Fits, and {used}: next to nothing is exposed"
    what = "the bubble" if most.name == "bubble" else f"the {most.name} axis"
    return f"Fits, and {used}: {what} costs most, {percent(most.seconds / step.duration_s)} of the step"


def _speed_of_step(step: Step, num_devices: int | None = None) -> str:
    plan, cluster = step.plan, step.cluster
    rate = f"{step.samples_per_s:,.3g} samples/s"
    on = f"{step.workload.name} on {cluster.name}, nodes of {cluster.devices_per_node}"
    idle = 0 if num_devices is None else num_devices - plan.world_size
    unused = f" {idle} of {num_devices} GPUs are idle." if idle > 0 else ""
    return f"{on}: {format_s(step.duration_s)} per step, {rate}.{unused}"


def draw_equation(pen: Pen, plan: Plan, step: Step | None, y: float) -> None:
    """Draw the degrees as boxes with a times between, and the wire that each axis is on; their middle is at y."""
    x = LEFT_IN
    inside = () if step is None else axes_inside_nodes(step.cluster, plan, step.order)
    for number, axis in enumerate(AXES):
        style, degree = axis_style(axis), getattr(plan, axis)
        if number:
            pen.words((x + 0.12, y), "x", size=theme.TEXT_PT)
            x += 0.24
        text = f"{axis} {degree}"
        wide = width_in(text, theme.TEXT_PT, True) + 0.25
        fill = style.colour if degree > 1 else theme.IDLE
        pen.box((x, y - 0.18), wide, 0.36, fill)
        ink = theme.text_colour(fill) if degree > 1 else theme.FAINT
        pen.words((x + wide / 2, y), text, size=theme.TEXT_PT, bold=degree > 1, colour=ink)
        if step is not None and degree > 1:
            where = "inside a node" if axis in inside else "between nodes"
            pen.words((x + wide / 2, y - 0.32), where, size=theme.LEAST_PT, colour=theme.FAINT)
        x += wide
    pen.heading((x + 0.15, y), f"=  {counted(plan.world_size, 'rank')}")
    rest = counted(plan.num_microbatches, "micro-batch")
    pen.words((theme.WIDTH_IN - 0.25, y), rest, size=theme.TEXT_PT, side="right", colour=theme.FAINT)


def _draw_time(pen: Pen, step: Step) -> None:
    """Draw the step's time as one bar, its parts named under it."""
    pen.heading((LEFT_IN, TIME_IN), f"time of a step: {format_s(step.duration_s)}")
    y = TIME_IN - 0.2 - BAR_IN
    shares = [(part, part.seconds / step.duration_s) for part in parts_of(step)]
    pieces = [
        (
            share * (theme.WIDTH_IN - 2 * LEFT_IN),
            part.colour,
            (f"{part.words} {percent(share)}", percent(share), part.letter),
        )
        for part, share in shares
    ]
    pen.bar((LEFT_IN, y), BAR_IN, pieces)
    used = [part for part in parts_of(step) if part.seconds > 0]
    words = [f"{part.words} {format_s(part.seconds)}" for part in used]
    boxes = [theme.LegendBox(part.colour, "white", part.letter, text) for part, text in zip(used, words, strict=True)]
    pen.legend(boxes, low=y - 0.4)


def draw_memory_bars(figure: Figure, pen: Pen, step: Step, *, top: float, bottom: float) -> None:
    """Draw what ranks of the pipeline hold at their peaks, with the device's memory as a line, between two heights."""
    memory, capacity = step.memory, step.cluster.device.memory_bytes
    ranks = spread_evenly(len(memory.at_peak_bytes), MAX_ROWS)
    names = [f"stage {rank}" if len(memory.at_peak_bytes) > 1 else "each rank" for rank in ranks]
    height = figure.get_size_inches()[1]
    axes = frame(figure, left=1.15, right=0.5, top=height - top, bottom=bottom, bare=True)
    limit = max(memory.max_bytes * 1.12, min(capacity, 3 * memory.max_bytes) * 1.05)
    stack_bars(axes, memory.at_peak_bytes[ranks], names, limit)
    if capacity <= limit:
        axes.axvline(capacity, gid="capacity", **CAPACITY_LINE)
        text = f"the device's {format_bytes(capacity)} "
        axes.text(capacity, -0.5, text, ha="right", va="bottom", fontsize=theme.SMALL_PT, color=theme.INK)
    heading = f"memory at each rank's peak; a device has {format_bytes(capacity)}"
    pen.heading((LEFT_IN, top + 0.15), heading)
    pen.legend(boxes_of_kinds(memory.at_peak_bytes[ranks]))


def draw_planner(bill: Bill) -> Picture:
    """Draw a plan's degrees and wires, the price of its run, a step of some ranks over time, and their memory.

    Args:
        bill: what a run by the plan takes: `bill(simulate(...), Run(...))`.
    """
    figure, pen = sheet(RUN_HEIGHT_IN)
    draw_equation(pen, bill.step.plan, bill.step, RUN_HEIGHT_IN - 1.3)
    pen.heading((LEFT_IN, RUN_HEIGHT_IN - 2.0), cost_words(bill))
    _draw_step(figure, pen, bill)
    draw_memory_bars(figure, pen, bill.step, top=2.65, bottom=MEMORY_LOW_IN)
    takeaway, lines = fit_and_utilization(bill.step), [*_say(bill.step), f"The run: {cost_words(bill)}."]
    picture = pen.finish(takeaway, _setting(bill))
    return picture._replace(words="\n".join([f"{takeaway}. {_speed_of_step(bill.step)}", *lines]))


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
    stages = spread_evenly(step.num_pipeline_ranks, MAX_SPAN_ROWS)
    ranks = sorted(step.layout.ranks[stages, 0].tolist())
    trace = step.trace.from_zero()
    trace = shaded(trace.select(np.isin(trace.rank, ranks) & trace.is_word("lane", "compute")))
    sides, exact = (Side(trace, False),), len(trace) <= MAX_BOXES
    placement = place(sides, ranks, ("compute",), seen=(np.ones(len(trace), bool),), levels=exact)
    scene = Scene(sides, placement, styles_of(sides), limit_of(sides))
    margins = {"left": 1.15, "right": 0.5, "top": RUN_HEIGHT_IN - TIMELINE_IN, "bottom": TIMELINE_IN - TALL_IN}
    fill_axes(frame(figure, **margins, bare=True), scene, (0.0, scene.limit_s), exact=exact)
    what = "a rank of each stage computes" if step.num_pipeline_ranks > 1 else "every rank computes"
    some = f" ({len(stages)} of {step.num_pipeline_ranks} stages)" if len(stages) < step.num_pipeline_ranks else ""
    heading = f"what {what} over a step{some}: {format_s(step.duration_s)}"
    pen.heading((LEFT_IN, TIMELINE_IN + 0.15), heading)
    pen.legend(legend_boxes(scene.styles, False), low=SPANS_IN)
