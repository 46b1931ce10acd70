"""Context parallelism: one sequence spread over ranks, each with some of its positions.

Begin with `placement` (who holds which positions, and why in a zig-zag) and `plain` (ring attention by hand on one
screen: keys and values go round, means are merged by their log-sum-exp, autograd does backward).

Then `block`: attention to some of the keys, forward and backward, by torch's fused kernel. `ring` computes only what
the mask leaves, while the next keys travel. `all_to_all` is the other way: trade positions for heads and back.
`parallelize` makes a GPT of either.
"""

from distlab.context_parallel.all_to_all import all_to_all_attention as all_to_all_attention
from distlab.context_parallel.parallelize import (
    average_gradients_ as average_gradients_,
    context_parallel as context_parallel,
)
from distlab.context_parallel.placement import (
    gather_sequence as gather_sequence,
    position_ids as position_ids,
    scatter_sequence as scatter_sequence,
    zigzag_positions as zigzag_positions,
)
from distlab.context_parallel.plain import plain_ring_attention as plain_ring_attention
from distlab.context_parallel.ring import ring_attention as ring_attention
