"""The two calls that sharding is made of: gather shards, and sum and scatter.

`gather_into` and `scatter_sum` are the two halves of an all-reduce. nccl brings both. gloo's all-gather is as fast as a
ring should be; its reduce-scatter makes one whole all-reduce per rank, so there we scatter by our own ring.

That ring is Python code that the caller drives, so the caller waits. `distlab.collectives.direct` has the two halves
that run by themselves while a rank computes.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single, reduce_scatter_single
from distlab.collectives import ring_reduce_scatter
from distlab.comm.p2p import needs_batches


def gather_into(
    full: Tensor, shard: Tensor, group: ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Fill `full` with the ranks' shards, in the order of the ranks.

    Shapes: shard [L], full [n L], both contiguous, of one dtype. `shard` may be this rank's part of `full` itself.
    Cost: one all-gather, (n-1) L elements sent per rank.
    Error: exact: bytes are copied.

    Args:
        full: where all shards go.
        shard: this rank's.
        group: the ranks.
        async_op: return at once with something to wait for; keep both tensors until then.

    Raises:
        ValueError: the sizes or types do not fit; nothing was sent then.
    """
    _check(full, shard, group, "gather_into")
    work: dist.Work | None = all_gather_single(full.detach(), shard.detach(), group=group, async_op=async_op)
    return work


def scatter_sum(full: Tensor, shard: Tensor, group: ProcessGroup | None = None) -> None:
    """Sum `full` over the ranks and leave this rank with its own part of the sum, in `shard`.

    Shapes: full [n L] -> shard [L], both contiguous, of one dtype. `full` holds partial sums afterwards. `shard` may be
        this rank's part of `full` itself; then nothing is copied.
    Cost: (n-1) L elements sent per rank.
    Error: each part is added up once, in one order, so the same input gives the same bits again.

    Raises:
        ValueError: the sizes or types do not fit; nothing was sent then.
    """
    _check(full, shard, group, "scatter_sum")
    full, shard = full.detach(), shard.detach()
    if needs_batches(full, group):
        reduce_scatter_single(shard, full, group=group)
        return
    own = ring_reduce_scatter(full, group)
    if own.data_ptr() != shard.data_ptr():
        shard.copy_(own)


def _check(full: Tensor, shard: Tensor, group: ProcessGroup | None, who: str) -> None:
    """Refuse sizes and types that do not fit; a ValueError names both sides."""
    num_ranks = dist.get_world_size(group)
    if full.numel() != num_ranks * shard.numel() or full.dtype != shard.dtype or full.device != shard.device:
        raise ValueError(
            f"rank {dist.get_rank(group)}: {who}: full has {full.numel()} elements ({full.dtype}, {full.device}) and "
            f"shard {shard.numel()} ({shard.dtype}, {shard.device}); expected one type and device, and full as large "
            f"as the shards of {num_ranks} ranks: pad with FlatLayout"
        )
