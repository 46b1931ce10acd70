"""The state of a sharded model: in shards or whole.

Read `model_state` (tensors by name), `shard_format` (what a rank writes), `sharded` (`ShardedState`) and `full`.
"""
