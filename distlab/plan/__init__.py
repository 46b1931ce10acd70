"""What should happen, as plain data: meshes, buckets, partitions, pipeline schedules, and the records they share.

Plans are values made by pure functions: they print, compare and are checked with no process running. distlab runs them,
the simulator gives them times, and pictures are drawn from them.

Read `records` (`Plan`, `Cluster`, `Workload`), then `mesh` and `axes`, `buckets`, `partition`, `sharding` and
`compression`. `work`, `passes` and `regions` describe a model's layers in sizes alone; `require` checks fields.
`schedules` has the order in which each rank of a pipeline runs its micro-batches.
"""

from distlab.plan.axes import AXES, mesh_of
from distlab.plan.buckets import Bucket, assign_buckets
from distlab.plan.mesh import Mesh
from distlab.plan.partition import balance, split_evenly
from distlab.plan.records import (
    Attention,
    Cluster,
    Contention,
    Device,
    Experts,
    Layer,
    Link,
    Plan,
    Protocol,
    Region,
    Work,
    Workload,
)
from distlab.plan.schedules import (
    KINDS,
    SCHEDULES,
    Action,
    ActionTimes,
    Family,
    Schedule,
    add_communication,
    automatic,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    make_schedule,
    naive,
    one_f_one_b,
    parse_action,
    parse_schedule,
    v_half,
    v_min,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
    zb_v,
)
from distlab.plan.schedules.check.validate import Report, ScheduleError, text_grid, validate
from distlab.plan.sharding import FlatLayout, Precision, Sharding, make_units

__all__ = [
    "AXES",
    "KINDS",
    "SCHEDULES",
    "Action",
    "ActionTimes",
    "Attention",
    "Bucket",
    "Cluster",
    "Contention",
    "Device",
    "Experts",
    "Family",
    "FlatLayout",
    "Layer",
    "Link",
    "Mesh",
    "Plan",
    "Precision",
    "Protocol",
    "Region",
    "Report",
    "Schedule",
    "ScheduleError",
    "Sharding",
    "Work",
    "Workload",
    "add_communication",
    "assign_buckets",
    "automatic",
    "balance",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "make_schedule",
    "make_units",
    "mesh_of",
    "naive",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "split_evenly",
    "text_grid",
    "v_half",
    "v_min",
    "validate",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
