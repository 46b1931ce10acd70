"""The state of a sharded model and its optimizer: in shards or whole. One format serves `FullyShard`, ZeRO and meshes.

Read in this order:

1. `distlab.modules.named_parts`: the format, which is what each rank writes.
2. `assemble`: rows are cut into parts, and joined from parts that any number of ranks wrote.
3. `optimizer_parts`: what rows and their optimizer keep, as parts, taken up from parts, and whole.
4. `of_model`: what programs call for a `FullyShard` model: `ShardedState`, `full_state_dict` and the like.

`ShardedOptimizer`'s side is `distlab.sharding.zero.state`; a mesh's is `distlab.hybrid.state`.
"""
