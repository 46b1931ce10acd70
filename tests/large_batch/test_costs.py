"""What LARS and LAMB keep, and how often they wait for the device."""

import pytest
import torch
from torch import nn

from distlab.large_batch import LAMB, LARS, lamb, lars


@pytest.mark.parametrize(("make", "module", "num_buffers"), [(LARS, lars, 1), (LAMB, lamb, 2)])
def test_buffers_are_of_the_parameters_size_and_all_norms_are_read_at_once(monkeypatch, make, module, num_buffers):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer, read, real = make(model.parameters(), 0.1), [], module.norms
    monkeypatch.setattr(module, "norms", lambda *lists: read.append(len(lists)) or real(*lists))
    waits, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or tolist(tensor))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert read == [2, 2]  # of the weights and of what moves them, together
    assert len(waits) == 2
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert sum(value.numel() for value in kept if value.dim()) == num_buffers * sum(
        parameter.numel() for parameter in model.parameters()
    )
