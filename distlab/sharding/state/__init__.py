"""The state of a sharded model and its optimizer: in shards or whole. One format serves `FullyShard`, ZeRO and meshes.

Read in this order:

1. `distlab.blocks.modules.named_parts`: the format, which is what each rank writes.
2. `parts`: what a rank and its optimizer keep, as parts, joined from parts that any number of ranks wrote, and whole.
3. `of_model`: what programs call for a `FullyShard` model: `ShardedState`, `full_state_dict` and its reverse.

`ShardedOptimizer` has its own side; a mesh's is `distlab.hybrid.state`.
"""
