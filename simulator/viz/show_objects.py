"""Let a Mesh, Schedule, Trace, Memory, Plan or Step show its own picture when a notebook's cell ends with it.

Those classes stand in packages that need numpy alone. So their method `_repr_mimebundle_` is set here, when
`simulator.viz` is imported, and an IPython that knows no picture shows their text as before. Jupyter gets a PNG with
alt text, the same as HTML that follows its theme, and the text that says the same. If a picture cannot be drawn, the
object's own text is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from distlab.plan import AXES, SCHEDULES, ActionTimes, Mesh, Plan, Schedule, make_schedule
from distlab.trace import Trace
from simulator.memory.memory import Memory
from simulator.step.simulate import Step
from simulator.viz.drawing.mimebundle import Bundle, picture_html, title_of, with_picture
from simulator.viz.drawing.paint import darkened, pack_png
from simulator.viz.memory.memory import describe_memory, draw_memory
from simulator.viz.mesh.degrees import degrees_figure, describe_degrees
from simulator.viz.mesh.mesh import describe_mesh, mesh_figure
from simulator.viz.schedules.compare import describe_schedules, draw_schedules
from simulator.viz.schedules.run import run_schedule
from simulator.viz.timeline.timeline import describe_timeline, draw_timeline

Picture = tuple[Figure, str]
METHOD = "_repr_mimebundle_"
EQUAL_TIMES = ActionTimes(1.0, 1.0, 1.0)


def show_mesh(mesh: Mesh) -> list[Picture]:
    """Draw the groups of every axis."""
    return [(mesh_figure(mesh), describe_mesh(mesh))]


def show_schedule(schedule: Schedule, name: str = "this schedule") -> list[Picture]:
    """Draw the schedule with 1 ms for each forward, input gradient and weight gradient, and free communication."""
    runs = [run_schedule(f"{name} (1 ms per F, I and W)", schedule, EQUAL_TIMES)]
    return [(draw_schedules(runs), describe_schedules(runs))]


def show_plan(plan: Plan) -> list[Picture]:
    """Draw the mesh that the plan's degrees make and, where it has a pipeline, its schedule under the mesh."""
    pictures = show_mesh(Mesh([(axis, getattr(plan, axis)) for axis in AXES]))
    if plan.pipeline > 1:
        ranks, stages = plan.pipeline, plan.stages_per_rank
        schedule = make_schedule(plan.schedule, ranks, plan.num_microbatches, stages_per_rank=stages)
        pictures += show_schedule(schedule, SCHEDULES[plan.schedule].title)
    return pictures


PICTURES: Mapping[type, Callable[[Any], list[Picture]]] = MappingProxyType(
    {
        Mesh: show_mesh,
        Schedule: show_schedule,
        Plan: show_plan,
        Trace: lambda trace: [(draw_timeline(trace), describe_timeline(trace))],
        Memory: lambda memory: [(draw_memory(memory), describe_memory(memory))],
        Step: lambda step: [(degrees_figure(step), describe_degrees(step))],
    }
)


def bundle_of(shown: object, draw: Callable[[Any], list[Picture]]) -> Bundle:
    """Return an object's pictures, one under the other, with their text; its own text if they cannot be drawn."""
    try:
        pictures = draw(shown)
        light = pack_png(np.vstack([_pixels(FigureCanvasAgg(figure)) for figure, _ in pictures]))
        dark = pack_png(np.vstack([_dark_pixels(figure) for figure, _ in pictures]))
    except Exception:  # a picture too many must never hide the object: too many ranks, a schedule that deadlocks
        return {"text/plain": repr(shown)}, {}
    title = "; ".join(title_of(figure) for figure, _ in pictures)
    text = "\n".join(text for _, text in pictures)
    return with_picture({"text/html": picture_html(light, dark, title=title)}, light, title=title, text=text)


def show_objects() -> None:
    """Give each class its picture."""
    for kind, draw in PICTURES.items():

        def show(shown: object, draw: Callable[[Any], list[Picture]] = draw, **_options: object) -> Bundle:
            return bundle_of(shown, draw)

        setattr(kind, METHOD, show)


def _pixels(canvas: FigureCanvasAgg) -> NDArray[np.uint8]:
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba(), np.uint8)  # type: ignore[no-untyped-call]


def _dark_pixels(figure: Figure) -> NDArray[np.uint8]:
    with darkened(figure) as canvas:
        return _pixels(canvas)
