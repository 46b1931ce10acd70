"""ZeRO-1 and ZeRO-2: optimizer state and gradients in shards, parameters whole.

Read `optimizer` (`PlainSharded`, then `ShardedOptimizer`), `scatter_in_backward` (when buckets are sent),
and `shard_bucket` (one bucket). `distlab.gradient_status` makes one error on all ranks. `offload` updates in the host's
memory.
"""
