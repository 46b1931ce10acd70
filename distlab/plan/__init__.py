"""What should happen, as plain data: meshes, buckets, partitions, pipeline schedules, and the records they share.

Plans are values made by pure functions: they print, compare and are checked with no process running. distlab runs them,
the simulator gives them times, and pictures are drawn from them.

Read `records` (`Plan`) and `hardware` (`Cluster`), then `mesh` and `axes`, `buckets`, `partition`, `sharding` and
`compression`. `work` and `regions` describe a model's layers in sizes alone; `require` checks fields.
`schedules` has the order in which each rank of a pipeline runs its micro-batches.
"""

from distlab.plan.axes import AXES, mesh_of
from distlab.plan.buckets import Bucket, assign_buckets
from distlab.plan.hardware import Cluster, Contention, Device, Link, Protocol
from distlab.plan.mesh import Mesh
from distlab.plan.partition import balance, split_evenly
from distlab.plan.records import Plan
from distlab.plan.regions import Product
from distlab.plan.schedules.basic import gpipe, naive, one_f_one_b
from distlab.plan.schedules.building_blocks import v_half, v_min
from distlab.plan.schedules.check.validate import Report, ScheduleError, text_grid, validate
from distlab.plan.schedules.communication import add_communication
from distlab.plan.schedules.families import SCHEDULES, Family, make_schedule
from distlab.plan.schedules.grammar import KINDS, Action, ActionTimes, Schedule, parse_action, parse_schedule
from distlab.plan.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from distlab.plan.schedules.search.automatic import automatic, zb_1p, zb_2p
from distlab.plan.schedules.v_shaped import dualpipe, dualpipe_v, zb_v
from distlab.plan.schedules.zero_bubble import zb_h1, zb_h2
from distlab.plan.sharding import FlatLayout, Precision, Sharding, make_units
from distlab.plan.work import Attention, Experts, Layer, Region, Work, Workload

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
    "Product",
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
