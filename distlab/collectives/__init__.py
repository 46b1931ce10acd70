"""Collectives over send and receive: how ranks sum, copy and share tensors, and what each way costs.

Begin with `ring.py`. `tree.py` takes fewer steps, `halving.py` few steps and few bytes, `hierarchical.py` spares slow
links. These work in place on contiguous tensors, for any number of ranks and any length, and end with the same bits on
every rank. `direct.py` has the two halves of an all-reduce in one step each, to run while a rank computes. `hook.py`
lets data parallelism use the ring; `single_tensor.py` hides a difference between versions of torch. All begin with
`chunks.py`: one flat row, cut into chunks.
"""

from distlab.collectives.direct import DirectGather, DirectScatter
from distlab.collectives.halving import doubling_all_gather, halving_doubling_all_reduce, halving_reduce_scatter
from distlab.collectives.hierarchical import hierarchical_all_reduce
from distlab.collectives.hook import RingAllReduce
from distlab.collectives.ring import (
    naive_ring_all_reduce,
    plain_ring_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from distlab.collectives.tree import double_tree_all_reduce, tree_all_reduce, tree_broadcast, tree_reduce

__all__ = [
    "DirectGather",
    "DirectScatter",
    "RingAllReduce",
    "double_tree_all_reduce",
    "doubling_all_gather",
    "halving_doubling_all_reduce",
    "halving_reduce_scatter",
    "hierarchical_all_reduce",
    "naive_ring_all_reduce",
    "plain_ring_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_broadcast",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
]
