"""Top-k on one screen: nothing lost, bytes as said."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, net, same_everywhere, thirteen

from distlab.blocks.data import rank_slice
from distlab.compression import PlainTopK


@pytest.mark.on_ranks(3)
def test_nothing_is_lost_and_bytes_are_as_said():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = net(0, rare=False)
    parameters = [one for one in model.parameters() if one.requires_grad]
    watched = model.entry.weight
    plain, moved, seen = PlainTopK(parameters, 0.1), 0, 0
    for step in range(5):
        inputs, targets = (part[slice(*rank_slice(13, rank, world_size))] for part in thirteen(step))
        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        seen = seen + watched.grad
        sent = calls_of(plain.average)
        moved = moved + watched.grad
        torch.optim.SGD(parameters, lr=0.1).step()
    owed = plain.memories[watched].clone()
    kept = [max(1, round(0.1 * p.numel())) for p in parameters]
    assert same_everywhere(moved)
    assert [num_bytes for _, num_bytes in sent] == [8 * k for k in kept for _ in ("places", "values")]
    assert owed.abs().max() > 0
    for total in (owed, seen):
        dist.all_reduce(total)
    torch.testing.assert_close(moved + owed / world_size, seen / world_size)
