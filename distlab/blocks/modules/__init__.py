"""What techniques ask of any module, without knowing each other.

Read `blocks` (the parts that are sharded or recomputed one by one) and `structures` (tensors in whatever a model takes
and returns). For tensor parallelism: `split`, how a tensor lies on tensor ranks, and what a rank computes by itself.
`moved` refuses parameters whose values went elsewhere; `named_parts` is the format of saved shards.
"""
