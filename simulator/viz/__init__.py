"""Pictures of traces, plans, records and predictions; each with a text that says the same.

Every picture is a pure function (`draw_timeline`, `mesh_figure`) from a Trace (or recorded calls, or a cost model) to a
matplotlib Figure, and has a `describe_` twin that returns its text for readers who cannot see it. `to_png` renders a
figure; no window is ever opened. Panels with sliders stand in files of their own (`train_step_panel`, `ring_panel`,
`race_panel`, `bucket_panel`, `compression_panel`, `memory_panel`, `sharding_panel`, `schedule_panel`,
`schedule_editor`, `shards_panel`, `context_panel`, `degrees_panel`), which need ipywidgets.
"""

from simulator.viz.collectives.fit_picture import describe_fit, draw_fit
from simulator.viz.collectives.messages import describe_message_diagram, draw_message_diagram
from simulator.viz.collectives.race import describe_race, draw_race
from simulator.viz.collectives.ring import draw_ring_steps
from simulator.viz.collectives.ring_frame import describe_ring_frame, draw_ring_frame
from simulator.viz.collectives.ring_record import RecordedCall, describe_ring_steps
from simulator.viz.compression.compression import describe_compression, draw_compression
from simulator.viz.context_parallel.context import context_figure, describe_context
from simulator.viz.data_parallel.bucket_sweep import describe_bucket_sweep, draw_bucket_sweep
from simulator.viz.data_parallel.train_step import describe_train_step, draw_train_step, step_of
from simulator.viz.drawing.style import to_png
from simulator.viz.expert_parallel.routing import describe_routing, routing_figure
from simulator.viz.large_batch.scaling import describe_scaling, draw_scaling
from simulator.viz.memory.compare import (
    describe_measured_memory,
    describe_memory_of_plans,
    draw_measured_memory,
    draw_memory_of_plans,
)
from simulator.viz.memory.memory import describe_memory, draw_memory
from simulator.viz.mesh.axis_order import describe_placement, placement_figure
from simulator.viz.mesh.degrees import degrees_figure, describe_degrees
from simulator.viz.mesh.mesh import describe_mesh, mesh_figure
from simulator.viz.schedules.bubbles import (
    describe_bubbles,
    describe_memory_against_bubble,
    draw_bubbles,
    draw_memory_against_bubble,
)
from simulator.viz.schedules.compare import describe_schedules, draw_schedules
from simulator.viz.schedules.run import ScheduleRun, run_schedule
from simulator.viz.schedules.schedule import describe_schedule, draw_schedule
from simulator.viz.schedules.sweep import sweep_memory, sweep_microbatches
from simulator.viz.sharding.unit_size import describe_sharding, draw_sharding
from simulator.viz.tensor_parallel.mlp_shards import describe_mlp, mlp_figure
from simulator.viz.tensor_parallel.shard_parts import cut_weights
from simulator.viz.tensor_parallel.shards import describe_shards, shards_figure
from simulator.viz.timeline.timeline import describe_timeline, draw_timeline

__all__ = [
    "RecordedCall",
    "ScheduleRun",
    "context_figure",
    "cut_weights",
    "degrees_figure",
    "describe_bubbles",
    "describe_bucket_sweep",
    "describe_compression",
    "describe_context",
    "describe_degrees",
    "describe_fit",
    "describe_measured_memory",
    "describe_memory",
    "describe_memory_against_bubble",
    "describe_memory_of_plans",
    "describe_mesh",
    "describe_message_diagram",
    "describe_mlp",
    "describe_placement",
    "describe_race",
    "describe_ring_frame",
    "describe_ring_steps",
    "describe_routing",
    "describe_scaling",
    "describe_schedule",
    "describe_schedules",
    "describe_sharding",
    "describe_shards",
    "describe_timeline",
    "describe_train_step",
    "draw_bubbles",
    "draw_bucket_sweep",
    "draw_compression",
    "draw_fit",
    "draw_measured_memory",
    "draw_memory",
    "draw_memory_against_bubble",
    "draw_memory_of_plans",
    "draw_message_diagram",
    "draw_race",
    "draw_ring_frame",
    "draw_ring_steps",
    "draw_scaling",
    "draw_schedule",
    "draw_schedules",
    "draw_sharding",
    "draw_timeline",
    "draw_train_step",
    "mesh_figure",
    "mlp_figure",
    "placement_figure",
    "routing_figure",
    "run_schedule",
    "shards_figure",
    "step_of",
    "sweep_memory",
    "sweep_microbatches",
    "to_png",
]
