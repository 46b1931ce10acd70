"""FullyShard and models that are not a plain chain of blocks: each equals one process, or is refused in words.

A unit that one rank skips, in forward or in backward, is named on every rank, and none waits for the others.
"""

import pytest
import torch
import torch.distributed as dist
from odd_models import EQUAL, train
from torch import nn

from distlab.sharding import FullyShard


@pytest.mark.parametrize(("world_size"), [2, pytest.param(3, marks=pytest.mark.soak)])
def test_odd_models_equal_one_process(ranks, world_size):
    options = [{}, *([{"reshard_after_forward": False, "prefetch": 0}] if world_size == 2 else [])]

    def all_of_them():
        return {make.__name__: [train(make, sharded=True, **one) for one in options] for make in EQUAL}

    oracles = {make.__name__: train(make, sharded=False) for make in EQUAL}
    for found in ranks(world_size).run(all_of_them):
        for name, expected in oracles.items():
            for got in found[name]:
                assert got.keys() == expected.keys(), name
                for key, value in expected.items():
                    torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


def test_what_summon_writes_stays_and_what_it_only_reads_does_not(ranks):
    def write():
        torch.manual_seed(0)
        model = FullyShard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
        seen = []
        for write in (True, False):
            with model.summon(write=write) as module, torch.no_grad():
                module[1].bias.fill_(7.0 if write else 9.0)
                seen.append(sorted(module.state_dict()))
            with model.summon() as module:
                seen.append(module[1].bias.tolist())
        return seen

    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert ranks(2).run(write) == [[names, [7.0, 7.0], names, [7.0, 7.0]]] * 2


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


def test_a_unit_that_one_rank_skips_is_named_on_every_rank_and_none_waits(ranks):
    """FSDP2 of torch 2.13 hangs where backward skips: rank 0 waits in an all-gather that rank 1 does not make."""

    def in_forward(skipped):
        model, mine = FullyShard(Chain()), (skipped,) if dist.get_rank() == 1 else ()
        return [outcome(model, skips=skips) for skips in ((), mine, (skipped,), ())]

    def in_backward():
        model, x, rank = FullyShard(Chain()), torch.ones(2, 4), dist.get_rank()
        ways = ({}, {"stops": 2 * (rank == 1)}, {"stops": 2}, {"has_backward": rank != 2})
        found = [outcome(model, **way) for way in ways]
        model.module.stops = 0
        (model(x).sum() + model(2 * x).sum()).backward()  # two forward passes and one backward
        model.synchronize()
        return found, [unit.shard.grad.to_local().abs().sum().item() > 0 for unit in model.units]

    for *forward, backward in ranks(3).run(lambda: (in_forward(1), in_forward(3), in_backward())):
        for skipped, (first, refused, alike, last) in zip((1, 3), forward, strict=True):
            assert first == last == [False] * 4
            assert alike == [index == skipped for index in range(4)]  # all of them skip it: nothing is wrong
            assert "ranks disagree on the units that this forward pass runs, in order" in refused
            assert f'"blocks.{skipped}"' in refused
            assert "rank 1 has" in refused
        (first, reached, alike, passed), goes_on = backward
        assert first == [False] * 4
        for refused in (reached, passed):
            assert "ranks disagree on the units that this backward pass reaches" in refused
        assert '"blocks.0"' in reached
        assert alike == [True, True, False, False]  # all of them stop there: nothing is wrong
        assert all(goes_on)
