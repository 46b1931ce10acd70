"""Pipeline schedules: the order in which each rank runs its micro-batches, as data."""

from distlab.plan.schedules.basic import add_communication, gpipe, one_f_one_b
from distlab.plan.schedules.grammar import KINDS, Action, Schedule, parse_action, parse_schedule

__all__ = [
    "KINDS",
    "Action",
    "Schedule",
    "add_communication",
    "gpipe",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
]
