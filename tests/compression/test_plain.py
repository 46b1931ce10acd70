"""Top-k on one screen: nothing lost, bytes as said, and with every element sent it trains as one process does."""

import pytest
import torch
import torch.distributed as dist
from equal import OPTIMIZERS
from torch import nn

from distlab.comm import recorded
from distlab.compression import PlainTopK

STEPS = 5


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)


def train(name, ratio):
    """Train on this rank's samples; return the weights, and what was sent and is owed, and all gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, moved, seen = model_of(), 0, 0
    plain = PlainTopK(model.parameters(), ratio)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        inputs, targets = (part.chunk(world_size)[rank] for part in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        seen = seen + model[0].weight.grad.clone()
        with recorded() as record:
            plain.average()
        moved = moved + model[0].weight.grad
        optimizer.step()
    sent = [call.num_bytes for call in record.records.rank(rank)]
    return [p.detach() for p in model.parameters()], moved, seen, plain.memories[model[0].weight], sent


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sending_all_elements_trains_as_one_process(ranks, world_size, name):
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    for weights, *_ in ranks(world_size).run(train, name, 1.0):
        for mine, want in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(mine, want.detach(), rtol=1e-9, atol=1e-11)


def test_nothing_is_lost_and_bytes_are_as_said(ranks):
    results = ranks(3).run(train, "sgd", 0.1)
    moved = results[0][1]
    assert all(torch.equal(moved, other) for _, other, *_ in results)
    owed, seen = (sum(result[part] for result in results) / 3 for part in (3, 2))
    torch.testing.assert_close(moved + owed, seen)
    assert owed.abs().max() > 0
    kept = [max(1, round(0.1 * p.numel())) for p in model_of().parameters()]
    assert all(result[4] == [8 * k for k in kept for _ in ("places", "values")] for result in results)
