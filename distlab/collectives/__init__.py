"""Collectives over send and receive: how ranks sum, copy and share tensors, and what each way costs.

Begin with `ring.py`. `tree.py` takes fewer steps, `halving.py` few steps and few bytes, `hierarchical.py` spares slow
links. These work in place on contiguous tensors, for any number of ranks and any length, and end with the same bits on
every rank. `direct.py` has the two halves of an all-reduce in one step each, to run while a rank computes. All begin
with `chunks.py`: one flat row, cut into chunks.
"""

from distlab.collectives.direct import DirectGather as DirectGather, DirectScatter as DirectScatter
from distlab.collectives.halving import (
    doubling_all_gather as doubling_all_gather,
    halving_doubling_all_reduce as halving_doubling_all_reduce,
    halving_reduce_scatter as halving_reduce_scatter,
)
from distlab.collectives.hierarchical import hierarchical_all_reduce as hierarchical_all_reduce
from distlab.collectives.ring import (
    RingAllReduce as RingAllReduce,
    naive_ring_all_reduce as naive_ring_all_reduce,
    plain_ring_all_reduce as plain_ring_all_reduce,
    ring_all_gather as ring_all_gather,
    ring_all_reduce as ring_all_reduce,
    ring_broadcast as ring_broadcast,
    ring_reduce_scatter as ring_reduce_scatter,
)
from distlab.collectives.tree import (
    double_tree_all_reduce as double_tree_all_reduce,
    tree_all_reduce as tree_all_reduce,
    tree_broadcast as tree_broadcast,
    tree_reduce as tree_reduce,
)
