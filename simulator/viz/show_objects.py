"""Let a Mesh, Schedule, Trace, Memory, Plan or Step show its own picture when a notebook's cell ends with it.

Those classes stand in packages that need numpy alone. So their method `_repr_mimebundle_` is set here, when
`simulator.viz` is imported, and an IPython that knows no picture shows their text as before. Where a picture cannot be
drawn, the object's own text is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from distlab.plan import AXES, SCHEDULES, Mesh, Plan, Schedule, make_schedule
from distlab.trace import Trace
from simulator.memory.memory import Memory
from simulator.step.simulate import Step
from simulator.viz.drawing.paint import pack_png, pixels_of
from simulator.viz.drawing.picture import Bundle, Picture, picture_html, with_picture
from simulator.viz.drawing.theme import DPI
from simulator.viz.memory import draw_memory
from simulator.viz.mesh.degrees import draw_degrees
from simulator.viz.mesh.mesh import draw_mesh
from simulator.viz.schedules import EQUAL, draw_schedules, run_schedule
from simulator.viz.timeline.timeline import draw_timeline


def _schedule(schedule: Schedule, name: str = "this schedule") -> Picture:
    """Draw the schedule with 1 ms for each forward, input gradient and weight gradient, and free communication."""
    return draw_schedules([run_schedule(f"{name} (1 ms per F, I and W)", schedule, EQUAL)])


def _plan(plan: Plan) -> list[Picture]:
    """Draw the mesh that the plan's degrees make and, where it has a pipeline, its schedule under the mesh."""
    pictures = [draw_mesh(Mesh([(axis, getattr(plan, axis)) for axis in AXES]))]
    if plan.pipeline > 1:
        ranks, stages = plan.pipeline, plan.stages_per_rank
        schedule = make_schedule(plan.schedule, ranks, plan.num_microbatches, stages_per_rank=stages)
        pictures.append(_schedule(schedule, SCHEDULES[plan.schedule].title))
    return pictures


PICTURES: Mapping[type, Callable[[Any], list[Picture]]] = MappingProxyType(
    {
        Plan: _plan,
        Mesh: lambda mesh: [draw_mesh(mesh)],
        Schedule: lambda schedule: [_schedule(schedule)],
        Trace: lambda trace: [draw_timeline(trace)],
        Memory: lambda memory: [draw_memory(memory)],
        Step: lambda step: [draw_degrees(step)],
    }
)


def _bundle(shown: object, draw: Callable[[Any], list[Picture]]) -> Bundle:
    """Return an object's pictures, one under the other, with their words; its own text if they cannot be drawn."""
    try:
        pictures = draw(shown)
        png = pack_png(np.vstack([pixels_of(each.figure) for each in pictures]))
    except Exception:  # a picture too many must never hide the object: too many ranks, a schedule that deadlocks
        return {"text/plain": repr(shown)}, {}
    title, words = "; ".join(each.title for each in pictures), "\n".join(each.words for each in pictures)
    page = {"text/html": picture_html(png, title=title, words=words, dpi=DPI)}
    return with_picture(page, png, title=title, words=words)


def show_objects() -> None:
    """Give each class its picture."""
    for kind, draw in PICTURES.items():

        def show(shown: object, draw: Callable[[Any], list[Picture]] = draw, **_options: object) -> Bundle:
            return _bundle(shown, draw)

        kind._repr_mimebundle_ = show  # type: ignore[attr-defined]
