"""What techniques ask of any module, without knowing each other.

Read `blocks` (the parts that are sharded or recomputed one by one), `structures` (tensors in whatever a model takes and
returns), `trial` (run a forward and leave no trace), `earlier_buffers` (what modules remembered before a function ran),
`local_compute` (the part of a tensor-parallel layer that a rank computes by itself), `split` (how a tensor lies on
tensor ranks), `moved` (parameters whose values went elsewhere) and `named_parts` (the format of saved shards).
"""
