"""ZeRO-1 and ZeRO-2: optimizer state and gradients in shards, parameters whole.

Read `optimizer` (`PlainSharded`, then `ShardedOptimizer`), `scatter_in_backward` (when buckets are sent),
`shard_bucket` (one bucket's way, and the memory lent to it). `gradients.gradient_status` makes one error on
all ranks.
"""
