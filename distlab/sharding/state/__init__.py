"""The state of a sharded model and its optimizer: in shards or whole. One format serves `FullyShard` and ZeRO.

Read in this order:

1. `distlab.modules.named_parts`: the format, which is what each rank writes.
2. `assemble`: rows are cut into parts, and put together from parts that any number of ranks wrote.
3. `optimizer_parts`: what an optimizer keeps, as parts, and the whole of it.
   `plain_state` reads what a plain torch optimizer keeps.
4. `model_tensors`: a `FullyShard` model by tensor names.
5. `sharded` (`ShardedState`) and `full` (`full_state_dict`): what programs call.

`ShardedOptimizer`'s side is `distlab.sharding.zero.state`.
"""
