"""Gather and scatter fit together, whoever drives them, and misfits are refused at once."""

import pytest
import torch
import torch.distributed as dist

from distlab.sharding import gather_into, scatter_sum


def use_calls():
    rank, n = dist.get_rank(), dist.get_world_size()
    full = torch.arange(3.0 * n) * (rank + 1)
    shard = torch.empty(3)
    scatter_sum(full, shard)
    whole = torch.empty(3 * n)
    gather_into(whole, shard)
    again = torch.zeros(3 * n)
    again[3 * rank : 3 * rank + 3] = shard
    work = gather_into(again, again[3 * rank : 3 * rank + 3], async_op=True)
    work.wait()
    refused = []
    for call, other in ((gather_into, torch.empty(3 * n + 1)), (scatter_sum, torch.empty(3 * n, dtype=torch.float64))):
        with pytest.raises(ValueError, match="pad with FlatLayout") as caught:
            call(other, shard)
        refused.append(str(caught.value))
    return whole, again, refused


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scatter_and_gather_make_an_all_reduce(ranks, world_size):
    expected = torch.arange(3.0 * world_size) * sum(range(1, world_size + 1))
    for rank, (whole, again, refused) in enumerate(ranks(world_size).run(use_calls)):
        assert torch.equal(whole, expected)
        assert torch.equal(again, expected)
        assert all(text.startswith(f"rank {rank}: ") for text in refused)
