"""A layer cut over ranks: whose is which slice, and its numbers step by step.

Read `shards` (with `shard_parts` and `shard_card`), then `mlp_shards` and `mlp_case`; `shards_panel` is a widget.
"""
