"""What LARS and LAMB keep, and how often they wait for the device."""

import pytest
import torch
from torch import nn

from distlab.comm import recorded
from distlab.large_batch import LAMB, LARS, Moments, lamb_update, lars_update


@pytest.mark.parametrize(("make", "num_buffers"), [(LARS, 1), (LAMB, 2)])
def test_buffers_are_of_the_parameters_size_and_all_norms_are_read_at_once(monkeypatch, make, num_buffers):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer, waits, tolist = make(model.parameters(), 0.1), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or tolist(tensor))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(waits) == 2  # norms of the weights and of what moves them, together
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    size = sum(parameter.numel() for parameter in model.parameters())
    assert sum(value.numel() for value in kept if value.dim()) == num_buffers * size


@pytest.mark.on_ranks(1)
def test_formulas_make_new_tensors_and_send_nothing():
    weight, gradient, zeros = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    with recorded() as seen:
        new_weight, buffer = lars_update(weight, gradient, zeros, lr=0.1)
        lamb_weight, moments = lamb_update(weight, gradient, Moments(zeros, zeros, 0), lr=0.1)
    made = [new_weight, buffer, lamb_weight, moments.mean, moments.square]
    same = [torch.equal(weight, torch.ones(3)), torch.equal(gradient, torch.full((3,), 2.0)), not zeros.any()]
    given = {tensor.data_ptr() for tensor in (weight, gradient, zeros)}
    assert len(list(seen.records.calls(0))) == 0
    assert same == [True] * 3
    assert [tensor.data_ptr() in given for tensor in made] == [False] * 5
