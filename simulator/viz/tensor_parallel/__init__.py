"""A layer cut over ranks: which rank holds which slice, and its numbers step by step.

Read `shards` (with `shard_parts` and `shard_card`), then `mlp_case` and `mlp_shards`.
"""
