"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read `flat_unit` (one unit: gather, free, scatter), `hooks` (when), `prefetch` (which comes next), `wrapping` (what
belongs to a unit) and `fully_shard` (`FullyShard`, all of it for real models). `construct` builds a model that no rank
could hold.
"""
