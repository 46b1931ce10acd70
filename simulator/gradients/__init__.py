"""What the exchange of gradients and parameters costs between replicas.

Read `buckets` (one all-reduced bucket), then `compression` (what a codec adds). `fsdp_units` has the calls of ZeRO and
FSDP, and which layers are gathered together. `whole_tensors` has optimizers that look at whole matrices.
"""
