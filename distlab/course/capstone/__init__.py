"""The capstone: a plan of your own trains on two nodes, survives a kill, and keeps a budget of seconds and bytes.

Read `task` (the model, the machines, the budget, the plan to begin with, what each rank does), then `judge` (the run, a
plain run beside it, the verdict, and the class's table).
"""

from distlab.course.capstone.judge import (
    CapstoneVerdict as CapstoneVerdict,
    add_row as add_row,
    attempt as attempt,
    read_board as read_board,
    table as table,
)
from distlab.course.capstone.task import FIRST_PLAN as FIRST_PLAN, BoardEntry as BoardEntry, read_entry as read_entry
