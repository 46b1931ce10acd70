"""A layer cut over ranks: which rank holds which slice.

Read `shard_parts` (whose is which part), then `shards`, which draws it.
"""
