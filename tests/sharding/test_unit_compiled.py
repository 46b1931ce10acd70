"""FullyShard and torch.compile: blocks compiled before or after, in place or not, and the whole model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import utils
from torch.distributed.fsdp import fully_shard

from distlab.comm import run
from distlab.rng import generator
from distlab.sharding import FullyShard

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x + self.narrow(torch.nn.functional.gelu(self.widen(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def compiled_blocks(module, backend):
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend=backend)
    return module


def in_place(module, backend):
    for block in module.blocks:
        block.compile(backend=backend)
    return module


def blocks_before(module, backend):
    return FullyShard(compiled_blocks(module, backend))


def in_place_before(module, backend):
    return FullyShard(in_place(module, backend))


def in_place_after(module, backend):
    model = FullyShard(module)
    in_place(module, backend)
    return model


def whole_outside(module, backend):
    return torch.compile(FullyShard(module), backend=backend)


def whole_inside(module, backend):
    return FullyShard(torch.compile(module, backend=backend))


def by_torch(module, backend):
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return in_place(module, backend)


WAYS = [blocks_before, in_place_before, in_place_after, whole_outside, whole_inside]


def train(wrap=None, backend="aot_eager"):
    torch.manual_seed(0)
    torch.compiler.reset()
    utils.counters.clear()
    module = Net().double()
    model = module if wrap is None else wrap(module, backend)
    rank, world_size = (0, 1) if wrap is None else (dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        rows = torch.randn(12, WIDTH, dtype=torch.float64, generator=generator(step, 0, "rows"))[rank::world_size]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(rows), rows.flip(-1)).backward()
        if hasattr(model, "synchronize"):
            model.synchronize()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, WIDTH, dtype=torch.float64))
    if hasattr(model, "summon"):
        with model.summon() as whole:
            parameters = [p.detach().clone() for p in whole.parameters()]
    else:
        parameters = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]
    assert wrap is None or utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return [output.detach(), *parameters]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_equal_one_process(ranks, backend):
    expected = train()

    def all_of_them():
        found = {}
        for way in (*WAYS, by_torch):
            result = train(way, backend)
            found[way.__name__] = max(
                (one - other).abs().max().item() for one, other in zip(result, expected, strict=True)
            )
        return found

    slow = backend == "inductor"  # it compiles C++, which takes longer than ranks of other tests may
    for found in run(all_of_them, 2, timeout_s=1200) if slow else ranks(2).run(all_of_them):
        assert found == {name: pytest.approx(0.0, abs=1e-10) for name in found}
