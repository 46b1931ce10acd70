"""What the exchange of gradients and parameters costs between replicas.

Read `buckets` (one all-reduced bucket), then `compression` (what a codec adds), `shard_costs` (gathers and scatters of
ZeRO and FSDP) and `fsdp_units` (which layers are gathered together).
"""
