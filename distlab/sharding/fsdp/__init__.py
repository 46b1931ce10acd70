"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read in this order: `flat_unit` (one unit: gather, free, reduce), `gradient` (its way to the shard), `step` (an
optimizer's), `hooks` (when), `prefetch` (which unit is next), `wrapping` (which parameters belong to it), `resharded`
(what stands for one that was freed), `fully_shard` (all of it, for real models).
"""
