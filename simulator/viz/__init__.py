"""Pictures of traces, plans, records and predictions; each with a text that says the same.

Each picture is a pure function (`draw_timeline`, `mesh_figure`). It makes a matplotlib Figure of a Trace, of recorded
calls or of a cost model. Its `describe_` twin returns the text for readers who cannot see it. `to_png` renders a
figure; no window is ever opened. In a notebook a Mesh, Schedule, Trace, Memory, Plan or Step shows its own picture
(`show_objects`).

Panels have sliders and need ipywidgets: `Timeline`, `Panel`, and the functions `*_panel` and `schedule_editor`. They
load on first use, so that importing the package does not load ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from simulator.viz.collectives.links import describe_fit, describe_link_times, draw_fit, draw_link_times
from simulator.viz.collectives.messages import describe_message_diagram, draw_message_diagram
from simulator.viz.collectives.race import describe_race, draw_race
from simulator.viz.collectives.ring_frame import describe_ring_frame, draw_ring_frame
from simulator.viz.collectives.ring_record import RecordedCall
from simulator.viz.compression.compression import describe_compression, draw_compression
from simulator.viz.context_parallel.context import context_figure, describe_context
from simulator.viz.data_parallel.train_step import describe_train_step, draw_train_step, step_of
from simulator.viz.drawing.bars import describe_bars, draw_bars
from simulator.viz.drawing.mimebundle import picture_html
from simulator.viz.drawing.paint import darkened
from simulator.viz.drawing.plot import to_png
from simulator.viz.expert_parallel.routing import describe_routing, routing_figure
from simulator.viz.large_batch.learning_curves import describe_batch_sizes, draw_batch_sizes
from simulator.viz.large_batch.scaling import describe_scaling, draw_scaling
from simulator.viz.memory.compare import (
    describe_measured_memory,
    describe_memory_of_plans,
    draw_measured_memory,
    draw_memory_of_plans,
)
from simulator.viz.memory.memory import describe_memory, draw_memory
from simulator.viz.memory.unit_size import describe_sharding, draw_sharding
from simulator.viz.mesh.axis_order import describe_placement, placement_figure
from simulator.viz.mesh.degrees import degrees_figure, describe_degrees, describe_planner, planner_figure
from simulator.viz.mesh.mesh import describe_mesh, mesh_figure
from simulator.viz.runs.cost_curve import describe_cost_curve, draw_cost_curve
from simulator.viz.runs.goodput import describe_goodput, draw_goodput
from simulator.viz.runs.strategies import describe_strategy_map, draw_strategy_map
from simulator.viz.schedules.compare import describe_schedules, draw_schedules
from simulator.viz.schedules.run import ScheduleRun, run_schedule
from simulator.viz.schedules.schedule import describe_schedule, draw_schedule
from simulator.viz.show_objects import show_objects
from simulator.viz.tensor_parallel.shard_parts import cut_weights
from simulator.viz.tensor_parallel.shards import describe_shards, shards_figure
from simulator.viz.timeline.facts import facts_of
from simulator.viz.timeline.overlay import Overlay
from simulator.viz.timeline.sections import describe_sections, draw_sections
from simulator.viz.timeline.timeline import describe_timeline, draw_timeline

if TYPE_CHECKING:
    from simulator.viz.panels.communication import compression_panel, race_panel, ring_panel, train_step_panel
    from simulator.viz.panels.memory import memory_panel, sharding_panel
    from simulator.viz.panels.panel import Panel
    from simulator.viz.panels.planner import cost_panel, degrees_panel, goodput_panel, planner_panel, strategy_panel
    from simulator.viz.panels.schedules import schedule_editor, schedule_panel
    from simulator.viz.timeline.timeline_widget import Timeline

_HOMES = {
    "Panel": "panels.panel",
    "Timeline": "timeline.timeline_widget",
    "ring_panel": "panels.communication",
    "race_panel": "panels.communication",
    "train_step_panel": "panels.communication",
    "compression_panel": "panels.communication",
    "memory_panel": "panels.memory",
    "sharding_panel": "panels.memory",
    "degrees_panel": "panels.planner",
    "cost_panel": "panels.planner",
    "goodput_panel": "panels.planner",
    "planner_panel": "panels.planner",
    "strategy_panel": "panels.planner",
    "schedule_panel": "panels.schedules",
    "schedule_editor": "panels.schedules",
}
__all__ = [
    "Overlay",
    "Panel",
    "RecordedCall",
    "ScheduleRun",
    "Timeline",
    "compression_panel",
    "context_figure",
    "cost_panel",
    "cut_weights",
    "darkened",
    "degrees_figure",
    "degrees_panel",
    "describe_bars",
    "describe_batch_sizes",
    "describe_compression",
    "describe_context",
    "describe_cost_curve",
    "describe_degrees",
    "describe_fit",
    "describe_goodput",
    "describe_link_times",
    "describe_measured_memory",
    "describe_memory",
    "describe_memory_of_plans",
    "describe_mesh",
    "describe_message_diagram",
    "describe_placement",
    "describe_planner",
    "describe_race",
    "describe_ring_frame",
    "describe_routing",
    "describe_scaling",
    "describe_schedule",
    "describe_schedules",
    "describe_sections",
    "describe_sharding",
    "describe_shards",
    "describe_strategy_map",
    "describe_timeline",
    "describe_train_step",
    "draw_bars",
    "draw_batch_sizes",
    "draw_compression",
    "draw_cost_curve",
    "draw_fit",
    "draw_goodput",
    "draw_link_times",
    "draw_measured_memory",
    "draw_memory",
    "draw_memory_of_plans",
    "draw_message_diagram",
    "draw_race",
    "draw_ring_frame",
    "draw_scaling",
    "draw_schedule",
    "draw_schedules",
    "draw_sections",
    "draw_sharding",
    "draw_strategy_map",
    "draw_timeline",
    "draw_train_step",
    "facts_of",
    "goodput_panel",
    "memory_panel",
    "mesh_figure",
    "picture_html",
    "placement_figure",
    "planner_figure",
    "planner_panel",
    "race_panel",
    "ring_panel",
    "routing_figure",
    "run_schedule",
    "schedule_editor",
    "schedule_panel",
    "sharding_panel",
    "shards_figure",
    "step_of",
    "strategy_panel",
    "to_png",
    "train_step_panel",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"simulator.viz.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'simulator.viz' has no attribute {name!r}")


show_objects()
