"""Sharding: optimizer state, gradients and parameters, each held once in a group of ranks.

Begin with `plain`, the whole idea by hand on one screen. All of it sends with `calls` (the two halves of an all-reduce:
`gather_into`, `scatter_sum`) or with `distlab.collectives.direct` (the same, while a rank computes).

Stages 1 and 2, in `zero`: `optimizer` (`PlainSharded`, then `ShardedOptimizer`), `scatter_in_backward` (when buckets
are sent), `shard_bucket` (one bucket), `buffers` (what it is lent), `consolidate` and `own_state` (what is saved).

Stage 3: `flat_unit` (parameters that are whole only while they are used), `hooks` (when they come and go), `prefetch`
(which comes next), `wrapping` (what belongs to a unit), and `unit` (`FullyShard`, all of it for real models).

State of stage 3: `model_state` (it by tensor names), `saved` (what a rank writes, and how shards are cut anew),
`state_dict` (`ShardedState`, `sharded_state_dict` and `load_sharded_state_dict`: in shards), `full_state`
(`full_state_dict`, `full_optimizer_state` and what loads them: whole). `construct` builds a model that no rank could
hold (`build_sharded`, `draw_weights`), `offload` updates in the host's memory (`OffloadedOptimizer`, `offloaded`).
"""

from distlab.sharding.calls import gather_into, scatter_sum
from distlab.sharding.fsdp.construct import build_sharded, draw_weights
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.full import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from distlab.sharding.state.sharded import ShardedState, load_sharded_state_dict, sharded_state_dict
from distlab.sharding.zero.offload import OffloadedOptimizer, offloaded
from distlab.sharding.zero.optimizer import PlainSharded, ShardedOptimizer

__all__ = [
    "FullyShard",
    "OffloadedOptimizer",
    "PlainSharded",
    "ShardedOptimizer",
    "ShardedState",
    "build_sharded",
    "draw_weights",
    "full_optimizer_state",
    "full_state_dict",
    "gather_into",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "load_sharded_state_dict",
    "offloaded",
    "scatter_sum",
    "sharded_state_dict",
]
