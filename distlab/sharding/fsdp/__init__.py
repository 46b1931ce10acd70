"""Fully sharded parameters (ZeRO-3, FSDP): whole only while their unit is at work.

Read `flat_unit` first: one unit is gathered, freed, and its gradients reduced. `gradient` is their way to the shard,
`step` an optimizer's step on shards. `hooks` says when all of this happens, `prefetch` which unit is next. `wrapping`
says which parameters belong to a unit, `resharded` what stands for one that was freed. `fully_shard` is all of it, for
real models.
"""
