"""All axes on one mesh: data x expert x context x tensor x pipeline, and sharded states, train as one process would.

The techniques are elsewhere, and none knows of the others. Here is what they must know of each other, and it is little.

Begin with `plain`: a mesh of data x tensor x pipeline by hand. Then `layout`: a rank's place on each axis, and which
part of a batch and of the model that makes its own. `rules` says what a plan asks of a model, and what cannot be
combined. `build` makes one GPT parallel on all axes, one technique after the other, and says why in this order; and it
tells parts from copies.

Then what everything depends on: `gradients`, with a table of which gradient is summed over which ranks, what a norm
counts, and how they travel without shards; `stage_averages` (over equal pipelines) and `shards` (with sharded states).

Last, `train`: `Hybrid`, all of it for real training, and who hears of a rank that raises; and `state`: what it saves,
whole or in parts.
"""

from distlab.blocks.clip import Gradient as Gradient
from distlab.hybrid.layout import Layout as Layout, joint_group as joint_group, lay_out as lay_out
from distlab.hybrid.plain import plain_mesh_step as plain_mesh_step
from distlab.hybrid.stage_averages import StageAverages as StageAverages
from distlab.hybrid.train import Hybrid as Hybrid
