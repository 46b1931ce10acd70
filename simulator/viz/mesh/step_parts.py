"""What a step's time goes into: compute, what each axis of the mesh exposes, and the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distlab.plan import AXES
from simulator.step.simulate import Step
from simulator.viz.drawing.pen import Pen
from simulator.viz.drawing.style import AXIS_STYLES, SMALL_PT, text_colour
from simulator.viz.drawing.words import width_in

COMPUTE, BUBBLE = "compute", "bubble"
COMPUTE_COLOUR, BUBBLE_COLOUR = "#56B4E9", "#D0D0D0"


class Part(NamedTuple):
    """A part of a step's time."""

    name: str
    letter: str
    words: str
    colour: str
    seconds: float


def parts_of(step: Step) -> list[Part]:
    """Split a step's duration on the rank that ends last; the parts sum to it.

    Exposed are the seconds of `Step.exposed_by_axis`, the bubble is the rank's other idle time before its last pass,
    and compute is the rest: layers, copies and the update.
    """
    exposed, bubble = step.exposed_by_axis, _bubble_s(step)
    by_axis = [
        Part(axis, AXIS_STYLES[axis].letter, f"{axis} exposed", AXIS_STYLES[axis].colour, exposed[axis])
        for axis in reversed(AXES)
    ]
    rest = step.duration_s - bubble - sum(part.seconds for part in by_axis)
    return [
        Part(COMPUTE, "", "compute", COMPUTE_COLOUR, rest),
        *by_axis,
        Part(BUBBLE, "b", "bubble", BUBBLE_COLOUR, bubble),
    ]


def draw_parts(
    pen: Pen,
    parts: Sequence[Part],
    corner: tuple[float, float],
    tall: float,
    scale: float,
    texts: Callable[[Part], Sequence[str]],
) -> float:
    """Draw a step's time as one bar, `scale` inches per second, and return where it ends.

    A part has the first of its texts that fits into it.
    """
    x, y = corner
    for part in parts:
        wide = part.seconds * scale
        if wide <= 0:
            continue
        pen.box((x, y), wide, tall, part.colour)
        text = next((text for text in texts(part) if wide > width_in(text, SMALL_PT) + 0.1), "")
        pen.words((x + wide / 2, y + tall / 2), text, colour=text_colour(part.colour))
        x += wide
    return x


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
