"""Pictures of traces, plans, records and predictions; each with a text that says the same.

Each picture is a pure function (`draw_timeline`, `mesh_figure`). It makes a matplotlib Figure of a Trace, of recorded
calls or of a cost model. Its `describe_` twin returns the text for readers who cannot see it. `to_png` renders a
figure; no window is ever opened. In a notebook a Mesh, Schedule, Trace, Memory, Plan or Step shows its own picture
(`show_objects`).

Panels have sliders and need ipywidgets: `Timeline`, `Panel`, and the functions `*_panel` and `schedule_editor`. They
load on first use, so that importing the package does not load ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy
from simulator.viz.collectives.links import (
    describe_fit as describe_fit,
    describe_link_times as describe_link_times,
    draw_fit as draw_fit,
    draw_link_times as draw_link_times,
)
from simulator.viz.collectives.messages import (
    describe_message_diagram as describe_message_diagram,
    draw_message_diagram as draw_message_diagram,
)
from simulator.viz.collectives.race import describe_race as describe_race, draw_race as draw_race
from simulator.viz.collectives.ring_frame import (
    describe_ring_frame as describe_ring_frame,
    draw_ring_frame as draw_ring_frame,
)
from simulator.viz.collectives.ring_record import RecordedCall as RecordedCall
from simulator.viz.compression.compression import (
    describe_compression as describe_compression,
    draw_compression as draw_compression,
)
from simulator.viz.context_parallel.context import (
    context_figure as context_figure,
    describe_context as describe_context,
)
from simulator.viz.data_parallel.train_step import (
    describe_train_step as describe_train_step,
    draw_train_step as draw_train_step,
    step_of as step_of,
)
from simulator.viz.drawing.bars import describe_bars as describe_bars, draw_bars as draw_bars
from simulator.viz.drawing.mimebundle import picture_html as picture_html
from simulator.viz.drawing.paint import darkened as darkened
from simulator.viz.drawing.plot import to_png as to_png
from simulator.viz.expert_parallel.routing import describe_routing as describe_routing, routing_figure as routing_figure
from simulator.viz.large_batch.learning_curves import (
    describe_batch_sizes as describe_batch_sizes,
    draw_batch_sizes as draw_batch_sizes,
)
from simulator.viz.large_batch.scaling import describe_scaling as describe_scaling, draw_scaling as draw_scaling
from simulator.viz.memory.compare import (
    describe_measured_memory as describe_measured_memory,
    describe_memory_of_plans as describe_memory_of_plans,
    draw_measured_memory as draw_measured_memory,
    draw_memory_of_plans as draw_memory_of_plans,
)
from simulator.viz.memory.memory import describe_memory as describe_memory, draw_memory as draw_memory
from simulator.viz.memory.unit_size import describe_sharding as describe_sharding, draw_sharding as draw_sharding
from simulator.viz.mesh.axis_order import describe_placement as describe_placement, placement_figure as placement_figure
from simulator.viz.mesh.degrees import (
    degrees_figure as degrees_figure,
    describe_degrees as describe_degrees,
    describe_planner as describe_planner,
    planner_figure as planner_figure,
)
from simulator.viz.mesh.mesh import describe_mesh as describe_mesh, mesh_figure as mesh_figure
from simulator.viz.runs.cost_curve import describe_cost_curve as describe_cost_curve, draw_cost_curve as draw_cost_curve
from simulator.viz.runs.goodput import describe_goodput as describe_goodput, draw_goodput as draw_goodput
from simulator.viz.runs.strategies import (
    describe_strategy_map as describe_strategy_map,
    draw_strategy_map as draw_strategy_map,
)
from simulator.viz.schedules.compare import describe_schedules as describe_schedules, draw_schedules as draw_schedules
from simulator.viz.schedules.run import ScheduleRun as ScheduleRun, run_schedule as run_schedule
from simulator.viz.schedules.schedule import describe_schedule as describe_schedule, draw_schedule as draw_schedule
from simulator.viz.show_objects import show_objects
from simulator.viz.tensor_parallel.shard_parts import cut_weights as cut_weights
from simulator.viz.tensor_parallel.shards import describe_shards as describe_shards, shards_figure as shards_figure
from simulator.viz.timeline.facts import facts_of as facts_of
from simulator.viz.timeline.overlay import Overlay as Overlay
from simulator.viz.timeline.sections import describe_sections as describe_sections, draw_sections as draw_sections
from simulator.viz.timeline.timeline import describe_timeline as describe_timeline, draw_timeline as draw_timeline

if TYPE_CHECKING:
    from simulator.viz.panels.communication import (
        compression_panel as compression_panel,
        race_panel as race_panel,
        ring_panel as ring_panel,
        train_step_panel as train_step_panel,
    )
    from simulator.viz.panels.memory import memory_panel as memory_panel, sharding_panel as sharding_panel
    from simulator.viz.panels.panel import Panel as Panel
    from simulator.viz.panels.planner import (
        cost_panel as cost_panel,
        degrees_panel as degrees_panel,
        goodput_panel as goodput_panel,
        planner_panel as planner_panel,
        strategy_panel as strategy_panel,
    )
    from simulator.viz.panels.schedules import schedule_editor as schedule_editor, schedule_panel as schedule_panel
    from simulator.viz.timeline.timeline_widget import Timeline as Timeline


__getattr__ = lazy(__name__)


show_objects()
