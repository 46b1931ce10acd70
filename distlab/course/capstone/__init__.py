"""The capstone: a plan of your own trains on two nodes, survives a kill, and keeps a budget of seconds and bytes.

Read in this order:

1. `task`: the model, the machines, the budget, and the plan to begin with.
2. `train`: what each rank does.
3. `judge`: the run, a plain run beside it, and the verdict.
4. `board`: the class's table.
"""

from distlab.course.capstone.board import add_row as add_row, read_board as read_board, table as table
from distlab.course.capstone.judge import CapstoneVerdict as CapstoneVerdict, attempt as attempt
from distlab.course.capstone.task import FIRST_PLAN as FIRST_PLAN, BoardEntry as BoardEntry, read_entry as read_entry
