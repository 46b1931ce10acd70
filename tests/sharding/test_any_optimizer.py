"""Optimizers, groups and schedules as programs bring them: equal to plain torch, or refused in words."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedules

from distlab.rng import generator
from distlab.sharding import ShardedOptimizer


class Small(nn.Module):
    """A matrix that odd numbers cut, a norm, a frozen layer, a parameter that no batch uses, and one of no elements."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(5, 3)
        self.empty = nn.Linear(0, 3, bias=False)
        self.double()
        self.kind = torch.float32
        self.empty.float()  # so that it has a bucket of its own, without elements
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator(0, 0, name))

    def forward(self, x):
        return self.last(self.frozen(self.norm(self.first(x)).tanh())) + self.empty(x[:, :0].to(self.kind)).double()


def batch(step, rank):
    return torch.randn(4, 7, generator=generator(step, rank, "batch"), dtype=torch.float64)


def by_dim(parameters, **options):
    """Return groups as nanoGPT makes them: matrices decay, vectors do not."""
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.3, **options}, {"params": vectors, "weight_decay": 0.0}]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(by_dim(p), lr=0.02),
    "amsgrad": lambda p: torch.optim.Adam(by_dim(p), lr=0.02, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(by_dim(p), lr=0.02, fused=True),
    "nesterov": lambda p: torch.optim.SGD(by_dim(p), lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(by_dim(p), lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(by_dim(p), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(by_dim(p), lr=0.05, initial_accumulator_value=0.1),
}
STEPS = 6


def sharded(name, **options):
    model = Small()
    return model, ShardedOptimizer(model, OPTIMIZERS[name], unused="zeros", bucket_bytes=200, **options)


def update(model, optimizer, steps):
    """Train; a ShardedOptimizer on this rank's data, a plain one on that of all four parts."""
    alone = not isinstance(optimizer, ShardedOptimizer)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = range(12) if alone else range(dist.get_rank(), 12, num_ranks)
    for step in steps:
        torch.stack([model(batch(step, part)).square().mean() for part in mine]).mean().backward()
        if not alone:
            optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()


def wanting(model):
    return [p for p in model.parameters() if p.requires_grad]


def alone(name, start=None, steps=range(STEPS)):
    model = Small()
    optimizer = OPTIMIZERS[name](wanting(model))
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
    update(model, optimizer, steps)
    return model.state_dict(), optimizer.state_dict()


def far(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one if one[name].numel())


def same_state(one, other):
    """Whether two plain states agree: groups in one order, every tensor within rounding."""
    assert [g["params"] for g in one["param_groups"]] == [g["params"] for g in other["param_groups"]]
    for number in one["state"].keys() & other["state"].keys():
        if any(isinstance(value, torch.Tensor) and not value.numel() for value in one["state"][number].values()):
            continue  # a parameter without elements is in no shard, and what is kept of it changes nothing
        for key, value in one["state"][number].items():
            if isinstance(value, torch.Tensor):
                assert value.shape == other["state"][number][key].shape
                assert torch.allclose(value, other["state"][number][key], atol=1e-10, rtol=0), (number, key)


def train_and_save(names, start):
    """Train half the steps, from a plain state where one is given; return models and full states."""
    found = {}
    for name in names:
        model, optimizer = sharded(name, stage=1 + (name in ("adamw", "nesterov")))
        steps = range(3)
        if start is not None:
            model.load_state_dict(start[name][0])
            optimizer.load_full_state_dict(start[name][1])
            steps = range(3, STEPS)
        update(model, optimizer, steps)
        found[name] = model.state_dict(), optimizer.full_state_dict()
        optimizer.close()
    return found


@pytest.mark.soak_where(world_size=(1, 2))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_states_go_to_plain_torch_and_come_back(ranks, world_size):
    names = ["adamw", "nesterov", "adagrad"] if world_size < 3 else [*OPTIMIZERS]
    halves = {name: alone(name, steps=range(3)) for name in names}
    began = ranks(world_size).run(train_and_save, names, None)
    went_on = ranks(world_size).run(train_and_save, names, halves)
    for name in names:
        model, state = alone(name)
        for half in (result[name] for result in began):
            there = alone(name, half, range(3, STEPS))
            assert far(there[0], model) <= 1e-10, name
            same_state(there[1], state)
            counts = [kept["step"] for kept in half[1]["state"].values() if isinstance(kept.get("step"), torch.Tensor)]
            assert len({one.data_ptr() for one in counts}) == len(counts), "each tensor counts its own steps"
        for result in went_on:
            assert far(result[name][0], model) <= 1e-10, name


SCHEDULES = {  # of a function, of momentum, of a loss, of other schedules
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.03, 2, cycle_momentum=True),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.04, total_steps=8),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "one after the other": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.2, 1.0, 2), schedules.CosineAnnealingLR(o, 4)], [2]
    ),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=3),
}


def scheduled(name, model, optimizer):
    schedule = SCHEDULES[name](optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    moving = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    for step in range(STEPS):
        update(model, optimizer, [step])
        average.update_parameters(model)
        moving.update_parameters(model)
        schedule.step(*([1.0] if name == "plateau" else []))
    return [one.state_dict() for one in (model, average, moving)]


def with_schedules():
    found = {}
    for name in SCHEDULES:
        model, optimizer = sharded("nesterov" if name == "cyclic" else "adamw", stage=2)
        found[name] = scheduled(name, model, optimizer)
        optimizer.close()
    return found


def test_schedules_and_averages_of_torch_equal_one_process(ranks):
    results = ranks(3).run(with_schedules)
    for name in SCHEDULES:
        model = Small()
        optimizer = OPTIMIZERS["nesterov" if name == "cyclic" else "adamw"](wanting(model))
        expected = scheduled(name, model, optimizer)
        for result in results:
            assert all(far(one, other) <= 1e-10 for one, other in zip(result[name], expected, strict=True)), name


def of_others():
    make = lambda p: torch.optim.SGD([nn.Parameter(one.detach().clone()) for one in p], lr=0.1)  # noqa: E731
    with pytest.raises(ValueError, match="make_optimizer made an optimizer of other parameters"):
        ShardedOptimizer(Small(), make, unused="zeros")


def test_an_optimizer_of_other_parameters_is_refused_on_every_rank(ranks):
    ranks(2).run(of_others)
