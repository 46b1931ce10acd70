"""A layer cut over ranks: which rank holds which slice.

Read `shard_parts` (whose is which part), then `shards` and `shard_card`, which draw it.
"""
