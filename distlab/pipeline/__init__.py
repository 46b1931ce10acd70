"""Pipelines: the model cut into stages, one or several a rank, and micro-batches that flow through them.

Begin with `plain`, the whole idea by hand on one screen: GPipe for one stage a rank and fixed shapes.

Then any schedule (they are plans: see distlab.plan.schedules): `route` (what a rank must know of the plan), `execute`
(a step: a walk through the plan with a table of eight lines), `stage` (one stage's forward and backward), `wire`
(messages that nobody waits for longer than he must), and `run` (`Pipeline`, all of it for real models).

What makes it safe: `shapes` (values of any nesting, taken apart), `batch` (cut into micro-batches), `negotiate` (is the
schedule valid, are the stages here, do they fit?), `faults` (a stage that raises, told to all ranks).

A backward pass in two parts for zero-bubble schedules: `backward` (`SplitBackward`) and `layers` (a rule for each kind
of layer). Making stages of a model: `split`, and `tied` (a weight that several stages use). What a rank saves: `state`.
"""

from distlab.pipeline.faults import StageError
from distlab.pipeline.run import Pipeline
from distlab.pipeline.split import measure_costs, split_gpt, split_sequential, stage_state_names
from distlab.pipeline.state import StageState
from distlab.pipeline.tied import TiedParameter, find_tied

__all__ = [
    "Pipeline",
    "StageError",
    "StageState",
    "TiedParameter",
    "find_tied",
    "measure_costs",
    "split_gpt",
    "split_sequential",
    "stage_state_names",
]
