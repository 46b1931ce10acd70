"""Pipeline schedules: the order in which each rank runs its micro-batches, as data.

Read in this order:

1. `grammar`: what an action and a schedule are.
2. `basic` (naive, GPipe, 1F1B), `interleaved`, `zero_bubble`, `v_shaped` and `building_blocks`: schedules by hand. They
   write their rows with `turns` and `rows`.
3. `search`: zero-bubble schedules that are searched for.
4. `families`: all schedules by name.
5. `communication`: derives the sends and receives. `check` says whether a schedule can run.
"""

from distlab.plan.schedules.basic import gpipe, naive, one_f_one_b
from distlab.plan.schedules.building_blocks import v_half, v_min
from distlab.plan.schedules.communication import add_communication
from distlab.plan.schedules.families import SCHEDULES, Family, make_schedule
from distlab.plan.schedules.grammar import KINDS, Action, ActionTimes, Schedule, parse_action, parse_schedule
from distlab.plan.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from distlab.plan.schedules.search.automatic import automatic, zb_1p, zb_2p
from distlab.plan.schedules.v_shaped import dualpipe, dualpipe_v, zb_v
from distlab.plan.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "ActionTimes",
    "Family",
    "Schedule",
    "add_communication",
    "automatic",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "make_schedule",
    "naive",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "v_half",
    "v_min",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
