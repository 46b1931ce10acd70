"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read in this order:

1. `options`: what all units have in common, and where a whole gradient waits for its sum.
2. `flat_unit`: one unit. `Unit.start_gather` and `finish_gather` make its parameters whole, `Unit.free` frees them, and
   `start_scatter` reduces their gradients. `left_out`: tensors that no rank has a gradient of.
   `coming`: what stands in a gradient's place until its sum has come. `step`: an optimizer's step on shards.
3. `hooks`: when. `_before` and `_after` stand around a unit's forward, `ForwardCall` around its backward.
4. `prefetch`: which unit is gathered next, and what happens when a rank runs another one.
5. `host_gradient`: how an offloaded gradient gets to the host's memory.
6. `wrapping`: which parameters belong to a unit.
7. `fully_shard`: `FullyShard`, all of it for real models.

`construct` builds a model that no rank could hold whole. What makes models of every kind work stands in
`distlab.sharding.any_model`.
"""
