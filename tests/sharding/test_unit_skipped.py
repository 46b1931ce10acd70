"""A unit that one rank skips, in forward or in backward: every rank names it, and none waits for the others."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.sharding import FullyShard


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.skips = ()

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index not in self.skips:
                x = block(x).tanh()
        return x


@pytest.mark.parametrize("skipped", [1, 3])
def test_a_block_that_one_rank_skips_is_named_on_every_rank_and_none_waits(ranks, skipped):
    def steps():
        model, x = FullyShard(Skipping()), torch.ones(2, 4)
        texts = []
        for skips in ((), (skipped,) if dist.get_rank() == 1 else (), (skipped,), ()):
            model.module.skips = skips
            try:
                model(x).sum().backward()
                model.synchronize()
                texts.append([unit.shard.grad is None for unit in model.units])
                model.zero_grad()
            except ValueError as error:
                texts.append(str(error))
        return texts

    for texts in ranks(3).run(steps):
        assert texts[0] == texts[3] == [False] * 4
        assert texts[2] == [index == skipped for index in range(4)]  # all of them skip it: nothing is wrong
        assert "ranks disagree on the units that this forward pass runs, in order" in texts[1]
        assert f'"blocks.{skipped}"' in texts[1]
        assert "rank 1 has" in texts[1]


class Stopping(Skipping):
    """Forward runs every block; backward does not reach those before `stops`."""

    stops = 0

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x.detach() if index == self.stops else x).tanh()
        return x


def test_a_unit_that_backward_skips_on_one_rank_is_named_on_every_rank_and_none_waits(ranks):
    """FSDP2 of torch 2.13 hangs: rank 0 waits in an all-gather, which rank 1 has ended its backward without."""

    def steps():
        model, x = FullyShard(Stopping()), torch.ones(2, 4)
        texts = []
        for stops, has_backward in (
            (0, True),
            (2 * (dist.get_rank() == 1), True),
            (2, True),
            (0, dist.get_rank() != 2),
        ):
            model.module.stops = stops
            try:
                loss = model(x).sum()
                if has_backward:
                    loss.backward()
                model.synchronize()
                texts.append([unit.shard.grad is None for unit in model.units])
            except ValueError as error:
                texts.append(str(error))
            model.zero_grad()
        model.module.stops = 0
        loss = model(x).sum() + model(2 * x).sum()  # two forward passes and one backward
        loss.backward()
        model.synchronize()
        return texts, [unit.shard.grad.to_local().abs().sum().item() > 0 for unit in model.units]

    for texts, goes_on in ranks(3).run(steps):
        assert texts[0] == [False] * 4
        assert "ranks disagree on the units that this backward pass reaches" in texts[1]
        assert '"blocks.0"' in texts[1]
        assert texts[2] == [True, True, False, False]  # all of them stop there: nothing is wrong
        assert "ranks disagree on the units that this backward pass reaches" in texts[3]
        assert all(goes_on)
