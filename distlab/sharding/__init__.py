"""Sharding: optimizer state, gradients and parameters, each held once in a group of ranks.

Begin with `plain`, the whole idea by hand on one screen. All of it sends with `calls` (the two halves of an all-reduce:
`gather_into`, `scatter_sum`) and with `distlab.collectives.direct` (the same, while a rank computes).

1. `zero`: stages 1 and 2 (`PlainSharded`, then `ShardedOptimizer`).
2. `fsdp`: stage 3, where parameters are whole only while they are used (`FullyShard`).
   `by_tensor`: the same, cut tensor by tensor (`ByTensor`).
3. `whole`: optimizers that look at whole tensors (Muon, LAMB), on flat shards (`WholeTensorOptimizer`).
4. `state`: what they save, in shards or whole, for any number of ranks.

`checks` refuses parameters that no shard can hold. `part` lets shards and their gradients refuse torch's tools that
would take a part for the whole. `by_element` finds, by trying it, whether an optimizer may have such a part, as
`of_pieces` gives it.
`cut_layers` knows what is different where tensor parallelism has cut the model's layers.
"""

from distlab.sharding.by_tensor import ByTensor as ByTensor
from distlab.sharding.calls import gather_into as gather_into, scatter_sum as scatter_sum
from distlab.sharding.fsdp.fully_shard import FullyShard as FullyShard
from distlab.sharding.state.of_model import (
    ShardedState as ShardedState,
    full_state_dict as full_state_dict,
    load_full_state_dict as load_full_state_dict,
)
from distlab.sharding.whole.optimizer import WholeTensorOptimizer as WholeTensorOptimizer
from distlab.sharding.zero.optimizer import PlainSharded as PlainSharded, ShardedOptimizer as ShardedOptimizer
