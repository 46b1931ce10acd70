"""Models that nobody tuned data parallelism to, in two designs, against one process with the whole batch.

A small ResNet with batch norm over all ranks, on real digits; a mixture of experts of which each rank, in each step,
uses others. Ten updates, world sizes 1 to 4, batches that no world size above 1 divides.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.blocks.data import digits, rank_slice
from distlab.data_parallel import (
    DataParallel,
    HorovodOptimizer,
    broadcast_parameters,
    convert_sync_batchnorm,
    loss_weight,
    train_step,
)
from distlab.rng import generator

UPDATES = 10
BATCH_SIZE = 11


class Residual(nn.Module):
    def __init__(self, width, wider, stride):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, wider, 3, stride, 1, bias=False),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
        )
        self.first_norm, self.second_norm = nn.BatchNorm2d(wider), nn.BatchNorm2d(wider, momentum=None)
        shortcut = nn.Conv2d(width, wider, 1, stride, bias=False)
        self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(wider, affine=False))

    def forward(self, x):
        inner = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        return (inner + self.shortcut(x)).relu()


def resnet():
    stem = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    blocks = [Residual(4, 4, 1), Residual(4, 6, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))


class Mixture(nn.Module):
    """Each sample goes to one expert; one expert gets none for five updates; a trunk with batch norm before them."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(4))

    def forward(self, x):
        x, choices = self.trunk(x[:, :8]), x[:, 8].long()
        out = x.new_zeros(len(x), 3)
        for index in choices.unique().tolist():  # no call at all for an expert without samples
            mine = choices == index
            out[mine] = self.experts[index](x[mine])
        return out


def routed(step):
    draw = generator(0, step, "routed")
    x = torch.randn(BATCH_SIZE, 9, generator=draw, dtype=torch.float64)
    x[:, 8] = torch.randint(3 if step < UPDATES // 2 else 4, (BATCH_SIZE,), generator=draw).sort().values
    return x, x[:, :3].sin()


MODELS = {
    "resnet": (resnet, F.cross_entropy),
    "mixture": (Mixture, F.mse_loss),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.01),
}
CASES = [
    (model, optimizer, way)
    for model in MODELS
    for optimizer in OPTIMIZERS
    for way in ("replicas", "horovod")
    if (model, way) != ("mixture", "horovod")  # it counts what nobody used as zeros and decays it: see test_horovod
]


def batches(model, images):
    if model == "resnet":
        return [(x, y) for x, y in zip(*(part.split(BATCH_SIZE) for part in images), strict=True)]
    return [routed(step) for step in range(UPDATES)]


def train(model_name, optimizer_name, way, images):
    """Ten updates; return parameters and buffers."""
    rank, world_size = (0, 1) if way == "alone" else (dist.get_rank(), dist.get_world_size())
    make, loss_fn = MODELS[model_name]
    torch.manual_seed(rank)
    model = make().double()
    optimizer, synchronize = OPTIMIZERS[optimizer_name](model.parameters()), None
    if way != "alone":
        # Experts differ by rank, and with them the order of bucket and norm: messages of the two must not meet.
        convert_sync_batchnorm(model, dist.new_group() if model_name == "mixture" else None)
    if way == "replicas":
        unused = "zeros" if model_name == "mixture" else "error"
        synchronize = DataParallel(model, bucket_bytes=1_500, first_bucket_bytes=300, unused=unused).synchronize
    if way == "horovod":
        broadcast_parameters(model)
        optimizer = HorovodOptimizer(optimizer, model.named_parameters(), fusion_bytes=1_500)
    for inputs, targets in batches(model_name, images):
        start, stop = rank_slice(BATCH_SIZE, rank, world_size)
        weight = loss_weight(stop - start, BATCH_SIZE, world_size)
        batch = (inputs[start:stop], targets[start:stop])
        train_step(model, optimizer, batch=batch, loss_fn=loss_fn, synchronize=synchronize, weight=weight)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def images():
    data = digits()
    return data.train_inputs[: UPDATES * BATCH_SIZE].double().unflatten(1, (1, 8, 8)), data.train_targets[
        : UPDATES * BATCH_SIZE
    ]


@pytest.fixture(scope="module")
def alone(images):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank's; layers so small gain nothing from more
    try:
        return {(model, name): train(model, name, "alone", images) for model in MODELS for name in OPTIMIZERS}
    finally:
        torch.set_num_threads(before)


@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, alone, images, world_size):
    def run():
        return [train(*case, images) for case in CASES]

    results = ranks(world_size).run(run)
    for index, case in enumerate(CASES):
        expected = alone[case[:2]]
        for name, value in expected.items():
            found = results[0][index][name]
            assert (found.double() - value.double()).abs().max() <= 1e-10, (case, name)
            assert all(torch.equal(result[index][name], found) for result in results), f"{case}: {name} differs by rank"


def test_the_cases_are_what_they_say(alone):
    """Every model learns, statistics move, and the late expert stays as it was until it is used."""
    for (model, name), after in alone.items():
        torch.manual_seed(0)
        before = MODELS[model][0]().double().state_dict()
        still = {key for key in after if torch.equal(before[key], after[key])}
        assert not still, (model, name)
    routes = [routed(step)[0][:, 8] for step in range(UPDATES)]
    parts = [[set(x[slice(*rank_slice(BATCH_SIZE, rank, 3))].tolist()) for rank in range(3)] for x in routes]
    assert all(3.0 not in set().union(*part) for part in parts[: UPDATES // 2])  # nobody uses the last expert
    assert any(len({frozenset(own) for own in part}) == 3 for part in parts)  # each rank uses others
