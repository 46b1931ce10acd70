"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read in this order:

1. `flat_unit`: one unit. `Unit.start_gather` and `finish_gather` make its parameters whole, `Unit.free` frees them, and
   `start_scatter` reduces their gradients.
2. `gradient`: a unit's gradient on its way to the shard. `step`: an optimizer's step on shards.
3. `hooks`: when. `_before` and `_after` stand around a unit's forward, `ForwardCall` around its backward.
4. `prefetch`: which unit is gathered next, and what happens when a rank runs a different one.
5. `wrapping`: which parameters belong to a unit. `resharded`: what stands in a module for a parameter that was freed.
6. `fully_shard`: `FullyShard`, all of it for real models.
"""
