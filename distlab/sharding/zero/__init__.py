"""ZeRO-1 and ZeRO-2: optimizer state and gradients in shards, parameters whole.

Read `optimizer` (`PlainSharded`, then `ShardedOptimizer`), `scatter_in_backward` (when buckets are sent),
`shard_bucket` (one bucket) and `buffers` (what it is lent). `distlab.gradient_status` makes one error on all ranks.
`consolidate` and `own_state` say what is saved; `offload` updates in the host's memory.
"""
