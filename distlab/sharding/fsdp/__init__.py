"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read in this order:

1. `flat_unit`: one unit. `Unit.start_gather` and `finish_gather` make its parameters whole, `Unit.free` frees them, and
   `start_scatter` reduces their gradients.
2. `hooks`: when. `_before` and `_after` stand around a unit's forward, `ForwardCall` around its backward.
3. `prefetch`: which unit is gathered next, and what happens when a rank runs another one.
4. `wrapping`: which parameters belong to a unit.
5. `fully_shard`: `FullyShard`, all of it for real models.

What makes models of every kind work:

6. `structures`: find tensors in what forward takes and returns. `inputs` casts and watches inputs.
7. `freed`: what stands in a module for a freed parameter.
8. `checks`: what is refused. `first_values`: all ranks begin with the same.
9. `construct`: build a model that no rank could hold whole.
"""
