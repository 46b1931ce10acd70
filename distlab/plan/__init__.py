"""What should happen, as plain data: meshes, buckets, partitions, pipeline schedules, and the records they share.

Plans are values made by pure functions: they print, compare and are checked with no process running. distlab runs them,
the simulator gives them times, and pictures are drawn from them.
"""

from distlab.plan.buckets import Bucket, assign_buckets
from distlab.plan.mesh import Mesh
from distlab.plan.partition import balance, split_evenly
from distlab.plan.records import (
    Cluster,
    Contention,
    Device,
    Layer,
    Link,
    Plan,
    Protocol,
    Work,
    Workload,
)
from distlab.plan.schedules import (
    KINDS,
    Action,
    Schedule,
    add_communication,
    gpipe,
    one_f_one_b,
    parse_action,
    parse_schedule,
)
from distlab.plan.sharding import FlatLayout, Precision, Sharding, make_units
from distlab.plan.validate import Report, ScheduleError, text_grid, validate

__all__ = [
    "KINDS",
    "Action",
    "Bucket",
    "Cluster",
    "Contention",
    "Device",
    "FlatLayout",
    "Layer",
    "Link",
    "Mesh",
    "Plan",
    "Precision",
    "Protocol",
    "Report",
    "Schedule",
    "ScheduleError",
    "Sharding",
    "Work",
    "Workload",
    "add_communication",
    "assign_buckets",
    "balance",
    "gpipe",
    "make_units",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "split_evenly",
    "text_grid",
    "validate",
]
