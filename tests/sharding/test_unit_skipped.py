"""A unit that one rank skips, in forward or in backward: every rank names it, and none waits for the others."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding import FullyShard


class Chain(nn.Module):
    """Forward skips blocks, and backward does not reach those before `stops`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.skips, self.stops = (), 0

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index not in self.skips:
                x = block(x.detach() if index == self.stops else x).tanh()
        return x


def outcome(model, *, skips=(), stops=0, has_backward=True):
    """Return which units have no gradient after a step, or what was refused."""
    model.module.skips, model.module.stops = skips, stops
    try:
        loss = model(torch.ones(2, 4)).sum()
        if has_backward:
            loss.backward()
        model.synchronize()
        return [unit.shard.grad is None for unit in model.units]
    except ValueError as error:
        return str(error)
    finally:
        model.zero_grad()


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_block_that_one_rank_skips_is_named_on_every_rank_and_none_waits(ranks, skipped):
    def steps():
        model, mine = FullyShard(Chain()), (skipped,) if dist.get_rank() == 1 else ()
        return [outcome(model, skips=skips) for skips in ((), mine, (skipped,), ())]

    for first, refused, alike, last in ranks(3).run(steps):
        assert first == last == [False] * 4
        assert alike == [index == skipped for index in range(4)]  # all of them skip it: nothing is wrong
        assert "ranks disagree on the units that this forward pass runs, in order" in refused
        assert f'"blocks.{skipped}"' in refused
        assert "rank 1 has" in refused


def test_a_unit_that_backward_skips_on_one_rank_is_named_on_every_rank_and_none_waits(ranks):
    """FSDP2 of torch 2.13 hangs: rank 0 waits in an all-gather, which rank 1 has ended its backward without."""

    def steps():
        model, x, rank = FullyShard(Chain()), torch.ones(2, 4), dist.get_rank()
        ways = ({}, {"stops": 2 * (rank == 1)}, {"stops": 2}, {"has_backward": rank != 2})
        found = [outcome(model, **way) for way in ways]
        model.module.stops = 0
        (model(x).sum() + model(2 * x).sum()).backward()  # two forward passes and one backward
        model.synchronize()
        return found, [unit.shard.grad.to_local().abs().sum().item() > 0 for unit in model.units]

    for (first, reached, alike, passed), goes_on in ranks(3).run(steps):
        assert first == [False] * 4
        for refused in (reached, passed):
            assert "ranks disagree on the units that this backward pass reaches" in refused
        assert '"blocks.0"' in reached
        assert alike == [True, True, False, False]  # all of them stop there: nothing is wrong
        assert all(goes_on)
