"""Pipelines: the model cut into stages, one or several per rank, and micro-batches that flow through them.

Begin with `plain`, the whole idea by hand on one screen: GPipe for one stage per rank and fixed shapes.

Then any schedule (schedules are plans: see distlab.plan.schedules):

1. `route`: what a rank must know of the plan.
2. `execute`: a step is a walk through the plan with a table of eight lines.
3. `stage`: one stage's forward and backward.
4. `wire`: messages, with receives posted early.
5. `run`: `Pipeline`, all of it for real models.

What makes it safe: `shapes` (values of any nesting taken apart, a batch cut into micro-batches), `negotiate` (is the
schedule valid, do the stages fit?) and `faults` (a stage that raises, told to all ranks). Zero-bubble schedules need a
backward pass in two parts: `backward`. `model` makes stages of a model, holds weights that several stages use, and says
what a rank saves.
"""

from distlab.pipeline.faults import StageError as StageError
from distlab.pipeline.model.split import split_gpt as split_gpt, split_sequential as split_sequential
from distlab.pipeline.model.state import StageState as StageState
from distlab.pipeline.model.tied import TiedParameter as TiedParameter, find_tied as find_tied
from distlab.pipeline.run import Pipeline as Pipeline
