"""What should happen, as plain data: meshes, buckets, partitions, pipeline schedules, and the records they share.

Plans are values made by pure functions: they print, compare and are checked with no process running. distlab runs them,
the simulator gives them times, and pictures are drawn from them.

Read `records` (`Plan`) and `hardware` (`Cluster`), then `mesh`, `buckets`, `owners`, `partition`, `sharding`
and `compression`. `work` and `regions` describe a model's layers in sizes alone; `require` checks fields.
`schedules` has the order in which each rank of a pipeline runs its micro-batches.
"""

from distlab.plan.buckets import Bucket as Bucket, assign_buckets as assign_buckets
from distlab.plan.hardware import (
    PLAIN as PLAIN,
    Cluster as Cluster,
    Contention as Contention,
    Device as Device,
    Link as Link,
    Protocol as Protocol,
    Software as Software,
)
from distlab.plan.mesh import AXES as AXES, Mesh as Mesh, mesh_of as mesh_of
from distlab.plan.owners import (
    assign_owners as assign_owners,
    least_busiest as least_busiest,
    newton_schulz_flops as newton_schulz_flops,
)
from distlab.plan.partition import balance as balance, split_evenly as split_evenly
from distlab.plan.records import Plan as Plan
from distlab.plan.regions import (
    Attention as Attention,
    Experts as Experts,
    Product as Product,
    Region as Region,
    Work as Work,
)
from distlab.plan.schedules.automatic import automatic as automatic, zb_1p as zb_1p, zb_2p as zb_2p
from distlab.plan.schedules.basic import gpipe as gpipe, naive as naive, one_f_one_b as one_f_one_b
from distlab.plan.schedules.families import SCHEDULES as SCHEDULES, Family as Family, make_schedule as make_schedule
from distlab.plan.schedules.grammar import (
    KINDS as KINDS,
    Action as Action,
    ActionTimes as ActionTimes,
    Schedule as Schedule,
    parse_action as parse_action,
    parse_schedule as parse_schedule,
)
from distlab.plan.schedules.turns import (
    interleaved as interleaved,
    interleaved_zero_bubble as interleaved_zero_bubble,
    looped_bfs as looped_bfs,
    zb_h1 as zb_h1,
    zb_h2 as zb_h2,
)
from distlab.plan.schedules.v_shaped import dualpipe_v as dualpipe_v, v_half as v_half, v_min as v_min, zb_v as zb_v
from distlab.plan.schedules.validate import (
    ScheduleError as ScheduleError,
    ScheduleReport as ScheduleReport,
    add_communication as add_communication,
    text_grid as text_grid,
    validate as validate,
)
from distlab.plan.sharding import FlatLayout as FlatLayout, Precision as Precision, Sharding as Sharding
from distlab.plan.work import Layer as Layer, Workload as Workload
