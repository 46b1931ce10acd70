"""Pictures of traces, plans, records and predictions: each a figure with the words that say the same.

Each picture is a pure function (`draw_timeline`, `draw_mesh`). It makes a Picture of a Trace, of recorded calls or of a
cost model: `.figure` is a matplotlib Figure, and `.words` are for readers who cannot see it. No window is ever opened.
In a notebook a Picture shows itself, and so does a Schedule.

Read `drawing` (how every picture looks), then one of `collectives`, `data_parallel`, `large_batch`, `sweeps`,
`memory`, `tensor_parallel`, `schedules`, `context_parallel`, `expert_parallel`, `mesh` and `runs` (days,
dollars and strategies), or `timeline`.

Panels have sliders and need ipywidgets: `Timeline`, `Panel`, the functions `*_panel` and `schedule_builder` (room
`builder`). They load on first use, so that importing the package does not load ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy
from simulator.viz.collectives.links import draw_fit as draw_fit, draw_link_times as draw_link_times
from simulator.viz.collectives.messages import (
    RecordedCall as RecordedCall,
    draw_message_diagram as draw_message_diagram,
)
from simulator.viz.collectives.race import draw_race as draw_race
from simulator.viz.context_parallel import draw_context as draw_context
from simulator.viz.data_parallel.step import step_of as step_of
from simulator.viz.data_parallel.train_step import draw_train_step as draw_train_step
from simulator.viz.drawing.bars import draw_bars as draw_bars, draw_sections as draw_sections
from simulator.viz.drawing.paint import to_png as to_png
from simulator.viz.drawing.pen import Picture as Picture
from simulator.viz.expert_parallel import draw_routing as draw_routing
from simulator.viz.large_batch import draw_batch_sizes as draw_batch_sizes, draw_scaling as draw_scaling
from simulator.viz.memory import (
    draw_measured_memory as draw_measured_memory,
    draw_memory as draw_memory,
    draw_memory_of_plans as draw_memory_of_plans,
)
from simulator.viz.mesh.degrees import (
    draw_degrees as draw_degrees,
    draw_placement as draw_placement,
    draw_planner as draw_planner,
)
from simulator.viz.mesh.mesh import draw_mesh as draw_mesh
from simulator.viz.runs import (
    draw_cost_curve as draw_cost_curve,
    draw_goodput as draw_goodput,
    draw_strategy_map as draw_strategy_map,
)
from simulator.viz.schedules import (
    ScheduleRun as ScheduleRun,
    draw_schedule as draw_schedule,
    draw_schedules as draw_schedules,
    run_schedule as run_schedule,
    show_schedules,
)
from simulator.viz.sweeps import draw_compression as draw_compression, draw_sharding as draw_sharding
from simulator.viz.tensor_parallel import draw_shards as draw_shards
from simulator.viz.timeline.facts import Overlay as Overlay, facts_of as facts_of
from simulator.viz.timeline.timeline import draw_timeline as draw_timeline

if TYPE_CHECKING:
    from simulator.viz.builder.builder import ScheduleBuilder as ScheduleBuilder, schedule_builder as schedule_builder
    from simulator.viz.panels.communication import (
        compression_panel as compression_panel,
        race_panel as race_panel,
        ring_panel as ring_panel,
        train_step_panel as train_step_panel,
    )
    from simulator.viz.panels.panel import Panel as Panel
    from simulator.viz.panels.planner import (
        degrees_panel as degrees_panel,
        goodput_panel as goodput_panel,
        memory_panel as memory_panel,
        planner_panel as planner_panel,
        sharding_panel as sharding_panel,
        strategy_panel as strategy_panel,
    )
    from simulator.viz.panels.schedules import schedule_panel as schedule_panel
    from simulator.viz.timeline.timeline_widget import Timeline as Timeline


__getattr__ = lazy(__name__)


show_schedules()
