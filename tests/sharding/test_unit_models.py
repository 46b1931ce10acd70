"""FullyShard and models that are not a plain chain of blocks: each equal to one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.rng import generator
from distlab.sharding import FullyShard

WIDTH = 6


class Shared(nn.Module):
    """A block used twice in a row and twice side by side; keyword arguments, dicts in and out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x):
        first, second = self.blocks
        x = first(x=x)["y"]
        x = first(x=x, scale=2.0)["y"]
        return second(x=x)["y"] + second(x=x.tanh())["y"]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)  # gets no gradient

    def forward(self, *, x, scale=1.0):
        return {"y": (self.linear(x) * scale).tanh(), "constant": 3, "none": None}


class Library(nn.Module):
    """torch's own modules, which read their weights in their own ways."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LSTM(WIDTH, WIDTH, batch_first=True),
                nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
                nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            ]
        )
        self.scale = nn.Parameter(torch.ones(()))  # a parameter without dimensions, in the root

    def forward(self, x):
        x = self.layers[0](x)[0]
        return self.layers[2](self.layers[1](x)) * self.scale


class Recomputed(nn.Module):
    """Blocks that torch's own checkpoint runs again in backward, hooks and all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Tied(nn.Module):
    """Two blocks that share a weight, and one whose order changes from step to step."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for index in (0, 1, 2, 3) if self.calls % 2 else (2, 0, 1, 3):
            x = self.blocks[index](x).tanh()
        return x


class Frozen(nn.Module):
    """Adapters beside frozen weights; one block is frozen as a whole."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        for parameter in [*self.blocks[1].parameters(), *self.blocks[2][0].parameters()]:
            parameter.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


MODELS = [Shared, Library, Recomputed, Tied, Frozen]


def train(make, *, sharded, num_steps=4, **options):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    torch.manual_seed(rank)
    module = make().double()
    model = FullyShard(module, **options) if sharded else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(num_steps, 8, 3, WIDTH, dtype=torch.float64, generator=generator(0, 0, "data"))
    for step, whole_batch in enumerate(data):
        batch = whole_batch[rank::world_size]
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch), batch.flip(-1))
        if step == 1:  # twice through one graph
            loss.backward(retain_graph=True)
        loss.backward()
        if sharded:
            model.synchronize()
        optimizer.step()
    with torch.no_grad():
        output = model(data[0])
    if not sharded:
        return output, {name: p.detach() for name, p in module.named_parameters()}
    assert not any(unit.is_whole for unit in model.units)
    with model.summon() as whole:
        return output, {name: p.detach().clone() for name, p in whole.named_parameters()}


def test_odd_models_equal_one_process(ranks):
    def all_of_them():
        return [
            train(make, sharded=True, reshard_after_forward=reshard, prefetch=prefetch)
            for make in MODELS
            for reshard, prefetch in ((True, 1), (False, 0))
        ]

    oracles = [train(make, sharded=False) for make in MODELS for _ in range(2)]
    for results in ranks(2).run(all_of_them):
        for index, ((output, weights), (wanted, expected)) in enumerate(zip(results, oracles, strict=True)):
            name = MODELS[index // 2].__name__
            assert weights.keys() == expected.keys(), name
            assert (output - wanted).abs().max() <= 1e-10, name
            for key, value in expected.items():
                assert (weights[key] - value).abs().max() <= 1e-10, f"{name}: {key}"


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
