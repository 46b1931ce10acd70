"""What the exchange of gradients and parameters costs between replicas.

Read `buckets` (one all-reduced bucket), then `compression` (what a codec adds), `fsdp_units` (gathers and scatters of
ZeRO and FSDP, and which layers are gathered together) and `whole_tensors` (optimizers that look at whole matrices).
"""
