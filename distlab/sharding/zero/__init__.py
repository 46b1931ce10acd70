"""ZeRO-1 and ZeRO-2: optimizer state and gradients in shards, parameters whole.

Read `optimizer` (`PlainSharded`, then `ShardedOptimizer`), `scatter_in_backward` (when buckets go), `shard_bucket`.
"""
