"""Draw what degrees give: memory, where the time of a step goes, utilisation; with a run, its price and its step.

And what the order of a mesh's axes costs: one bar per order, and which axes leave the node in it. A node holds
neighbouring ranks, so the axes that vary fastest stay on its wires, and the others go between nodes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from distlab.plan import AXES, Plan
from simulator.memory.memory import KINDS
from simulator.runs.money import Bill
from simulator.step.simulate import Step
from simulator.sweeps.axis_order import axes_inside_nodes
from simulator.units import counted, format_bytes, format_s, format_span, in_words, percent
from simulator.viz.drawing import theme
from simulator.viz.drawing.lanes import scene_of
from simulator.viz.drawing.pen import Pen, Picture, sheet
from simulator.viz.drawing.plot import frame, spread_evenly, width_in
from simulator.viz.memory import CAPACITY_LINE, MEMORY_KINDS, boxes_of_kinds, stack_bars
from simulator.viz.mesh.mesh import axis_style
from simulator.viz.timeline.timeline import draw_rows, legend_boxes

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
    exposed, timing, ends = step.exposed_by_axis, step.timing, []
    for rank in range(step.num_pipeline_ranks):
        calls = timing.calls[rank] if timing.calls else ()
        ends.append(max([timing.optimizer[rank][1], *(call.end_ns for call in calls)]))
    rank = ends.index(max(ends))
    passes = slice(int(timing.order.offsets[rank]), int(timing.order.offsets[rank + 1]))
    start, end = timing.start_ns[passes], timing.end_ns[passes]
    idle_s = (int(end.max()) - int((end - start).sum())) / 1e9
    bubble = max(0.0, idle_s - exposed["pipeline"]) if step.num_pipeline_ranks > 1 else 0.0
    parts = [TimePart(BUBBLE, "b", "bubble", BUBBLE_COLOUR, bubble)]
    for axis in AXES:
        style = theme.AXIS_STYLES[axis]
        parts.insert(0, TimePart(axis, style.letter, f"{axis} exposed", style.colour, exposed[axis]))
    rest = step.duration_s - sum(part.seconds for part in parts)
    return [TimePart(COMPUTE, "", "compute", COMPUTE_COLOUR, rest), *parts]


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
    return pen.finish(*_say(step, num_devices))


def _say(step: Step, num_devices: int | None = None) -> list[str]:
    """Say whether a step fits and what costs most, its speed, the plan's equation, its time, memory and messages."""
    memory, capacity, cluster, plan = step.memory, step.cluster.device.memory_bytes, step.cluster, step.plan
    parts = [part for part in parts_of(step) if part.seconds > 0]
    lost = max(parts_of(step)[1:], key=lambda part: part.seconds)
    title = f"Does not fit: {format_bytes(memory.max_bytes)} per rank, and a device has {format_bytes(capacity)}"
    if memory.max_bytes <= capacity:
        what = "the bubble" if lost.name == BUBBLE else f"the {lost.name} axis"
        most = f"{what} costs most, {percent(lost.seconds / step.duration_s)} of the step"
        costs = "next to nothing is exposed" if lost.seconds < 0.01 * step.duration_s else most
        title = f"Fits, and {percent(step.utilization)} of the peak is used: {costs}"
    held = ", ".join(
        f"{MEMORY_KINDS[kind].words} {format_bytes(number)}"
        for kind, number in zip(KINDS, memory.at_peak_bytes[memory.fullest_stage].tolist(), strict=True)
        if number
    )
    sent = ", ".join(f"{axis} {format_bytes(number)}" for axis, number in step.sent_bytes_by_axis.items() if number > 0)
    idle = 0 if num_devices is None else num_devices - plan.world_size
    unused = f" {idle} of {num_devices} GPUs are idle." if idle > 0 else ""
    on = f"{step.workload.name} on {cluster.name}, nodes of {cluster.devices_per_node}"
    return [
        title,
        f"{on}: {format_s(step.duration_s)} per step, {step.samples_per_s:,.3g} samples/s.{unused}",
        f"{equation(plan)}.",
        f"Time: {', '.join(f'{part.words} {format_s(part.seconds)}' for part in parts)}.",
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
    pieces, boxes = [], []
    for part in parts_of(step):
        share = percent(part.seconds / step.duration_s)
        wide = part.seconds / step.duration_s * (theme.WIDTH_IN - 2 * LEFT_IN)
        pieces.append((wide, part.colour, (f"{part.words} {share}", share, part.letter)))
        if part.seconds > 0:
            text = f"{part.words} {format_s(part.seconds)}"
            boxes.append(theme.LegendBox(part.colour, "white", part.letter, text))
    pen.bar((LEFT_IN, y), BAR_IN, pieces)
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
    pen.heading((LEFT_IN, top + 0.15), f"memory at each rank's peak; a device has {format_bytes(capacity)}")
    pen.legend(boxes_of_kinds(memory.at_peak_bytes[ranks]))


def draw_planner(bill: Bill) -> Picture:
    """Draw a plan's degrees and wires, the price of its run, a step of some ranks over time, and their memory.

    Args:
        bill: what a run by the plan takes: `bill(simulate(...), Run(...))`.
    """
    cluster, run = bill.step.cluster, bill.run
    dollars = "" if bill.dollars is None else f", {bill.dollars:,.0f} dollars"
    fails = f"; {percent(bill.goodput.useful, 1)} of the time counts" if run.failures else ""
    costs = f"{in_words(run.num_tokens)} tokens: {format_span(86_400 * bill.days)}{dollars}{fails}"
    figure, pen = sheet(RUN_HEIGHT_IN)
    draw_equation(pen, bill.step.plan, bill.step, RUN_HEIGHT_IN - 1.3)
    pen.heading((LEFT_IN, RUN_HEIGHT_IN - 2.0), costs)
    _draw_step(figure, pen, bill.step)
    draw_memory_bars(figure, pen, bill.step, top=2.65, bottom=MEMORY_LOW_IN)
    paid = "" if run.price is None else f", {run.price:g} dollars per GPU and hour"
    takeaway, speed, *lines = _say(bill.step)
    picture = pen.finish(takeaway, f"{bill.step.workload.name} on {bill.num_devices} GPUs of {cluster.name}{paid}")
    return picture._replace(words="\n".join([f"{takeaway}. {speed}", *lines, f"The run: {costs}."]))


def _draw_step(figure: Figure, pen: Pen, step: Step) -> None:
    """Draw what the first rank of some stages computes in a step."""
    stages = spread_evenly(step.num_pipeline_ranks, MAX_SPAN_ROWS)
    ranks = sorted(step.layout.ranks[stages, 0].tolist())
    trace = step.trace.from_zero()
    scene = scene_of(trace.select(np.isin(trace.rank, ranks) & trace.is_word("lane", "compute")))
    margins = {"left": 1.15, "right": 0.5, "top": RUN_HEIGHT_IN - TIMELINE_IN, "bottom": TIMELINE_IN - TALL_IN}
    draw_rows(frame(figure, **margins, bare=True), scene, (0.0, scene.limit_s))
    what = "a rank of each stage computes" if step.num_pipeline_ranks > 1 else "every rank computes"
    some = f" ({len(stages)} of {step.num_pipeline_ranks} stages)" if len(stages) < step.num_pipeline_ranks else ""
    pen.heading((LEFT_IN, TIMELINE_IN + 0.15), f"what {what} over a step{some}: {format_s(step.duration_s)}")
    pen.legend(legend_boxes(scene.styles, False), low=SPANS_IN)


TOP_IN, FOOT_IN, LINE_IN, CHIP_IN, RIGHT_IN = 1.35, 0.95, 0.5, 0.5, 2.2
MOST = 8
Order = Sequence[str]


class _Row(NamedTuple):
    """One order: its axes of more than one rank, slowest first, those that stay inside a node, and its step."""

    axes: tuple[str, ...]
    inside: list[str]
    step: Step

    def figures(self, best: Step) -> str:
        """The step's time, and how much longer it is than the best."""
        slower = self.step.duration_s / best.duration_s - 1
        text = format_s(self.step.duration_s)
        return f"{text}, {percent(slower, 1, '+')}" if slower > 0 else text


def draw_placement(orders: Sequence[tuple[Order, Step]]) -> Picture:
    """Draw the step's time under each order of the axes, the fastest first.

    Of more than MOST orders the fastest, the slowest, and some evenly between are drawn.

    Args:
        orders: pairs of an order, slowest axis first, and its step, as `rank_orders` returns them. Orders that differ
            in axes of one rank alone are drawn once.

    Raises:
        ValueError: there is no order.
    """
    rows = _rows(orders)
    shown = [rows[index] for index in spread_evenly(len(rows), MOST)]
    height = TOP_IN + LINE_IN * len(shown) + FOOT_IN
    _, pen = sheet(height)
    left = LEFT_IN + CHIP_IN * max(len(row.axes) for row in shown) + 0.35
    room, longest = theme.WIDTH_IN - left - RIGHT_IN, shown[-1].step.duration_s
    top, used = height - TOP_IN, dict[str, TimePart]()
    pen.words((LEFT_IN, top + 0.2), "slow to fast axis", colour=theme.FAINT, side="left")
    for number, row in enumerate(shown):
        y, parts = top - (number + 1) * LINE_IN, parts_of(row.step)
        for place, axis in enumerate(row.axes):  # filled inside a node, hollow between nodes
            style, corner = axis_style(axis), (LEFT_IN + CHIP_IN * place, y + 0.08)
            fill = style.colour if axis in row.inside else "white"
            pen.box(corner, CHIP_IN - 0.1, LINE_IN - 0.16, fill, edge=style.colour, line=2.0)
            spot, ink = (corner[0] + (CHIP_IN - 0.1) / 2, y + LINE_IN / 2), theme.text_colour(fill)
            pen.words(spot, style.letter, size=theme.TEXT_PT, bold=True, colour=ink)
        names = [part.words if part.name == COMPUTE else part.letter for part in parts]
        pieces = [(p.seconds * room / longest, p.colour, (name,)) for p, name in zip(parts, names, strict=True)]
        end = pen.bar((left, y + 0.06), LINE_IN - 0.12, pieces)
        pen.words((end + 0.1, y + LINE_IN / 2), row.figures(rows[0].step), side="left", bold=not number)
        used |= {part.name: part for part in parts if part.seconds > 0}
    pen.legend([theme.LegendBox(part.colour, "white", part.letter, part.words) for part in used.values()])
    legend = "a filled letter: the axis stays inside a node; a hollow one: it leaves the node"
    pen.words((LEFT_IN, 0.6), legend, side="left")
    title, what, *lines = _say_orders(rows)
    some = f" {len(shown)} of {len(rows)} orders." if len(shown) < len(rows) else ""
    return pen.finish(title, what + some)._replace(words="\n".join([f"{title}. {what}", *lines]))


def _rows(orders: Sequence[tuple[Order, Step]]) -> list[_Row]:
    """Return the orders that differ, fastest first."""
    if not orders:
        raise ValueError("there is no order; pass pairs of an order and its step, as rank_orders returns them")
    found: dict[tuple[str, ...], _Row] = {}
    for order, step in orders:
        axes = tuple(axis for axis in order if getattr(step.plan, axis) > 1) or (order[-1],)
        inside = axes_inside_nodes(step.cluster, step.plan, order)
        found.setdefault(axes, _Row(axes, [axis for axis in axes if axis in inside], step))
    return sorted(found.values(), key=lambda row: row.step.duration_s)


def _say_orders(rows: Sequence[_Row]) -> list[str]:
    """Say which order is fastest, what is compared, each order's time, and what stays inside a node."""
    best, step = rows[0], rows[0].step
    ratio = rows[-1].step.duration_s / step.duration_s
    where = f"{' and '.join(best.inside)} inside a node" if best.inside else "every axis between nodes"
    title = f"Fastest with {where}; the worst order takes {ratio:.2f}x as long"
    if len(rows) == 1 or ratio < 1.005:
        title = "The order of the axes makes no difference here"
    degrees = " x ".join(f"{axis} ({getattr(step.plan, axis)})" for axis in best.axes)
    said = [title, f"{step.workload.name} on {step.cluster.name}, nodes of {step.cluster.devices_per_node}: {degrees}."]
    for row in rows:
        exposed = [f"{part.words} {format_s(part.seconds)}" for part in parts_of(row.step) if part.seconds > 0]
        name = f"{', '.join(row.axes)} (inside a node: {', '.join(row.inside) or 'none'})"
        said.append(f"{name}: {row.figures(step)}; {', '.join(exposed)}.")
    return said
