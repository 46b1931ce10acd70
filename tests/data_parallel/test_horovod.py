"""The optimizer that averages: sends what it says, and refuses what would part the replicas."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import calls_of
from refused import message
from torch import nn

from distlab.data_parallel import HorovodOptimizer


def wrapped(model=None, named=None, decay=0.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
    return model, HorovodOptimizer(sgd, model.named_parameters() if named is None else named, **options)


def backward(model):
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.on_ranks(2)
def test_buffers_go_during_backward_in_order_and_carry_the_gradients_bytes():
    model, optimizer = wrapped(fusion_bytes=80)
    assert calls_of(lambda: backward(model)) == [("all_reduce", 80)] * 3
    assert calls_of(optimizer.step) == []
    model, optimizer = wrapped(backward_passes_per_step=2)
    actions = (partial(backward, model), partial(backward, model), optimizer.synchronize, optimizer.step)
    assert [len(calls_of(action)) for action in actions] == [0, 1, 0, 0], "the last pass sends, and nothing goes twice"
    optimizer.zero_grad()
    backward(model)
    assert len(calls_of(optimizer.step)) == 1, "earlier than planned: what is there is sent"


@pytest.mark.on_ranks(2)
def test_what_a_rank_or_nobody_used_counts_as_zeros_and_is_updated_as_documented():
    model, optimizer = wrapped(fusion_bytes=100, decay=0.5)
    alone, before = copy.deepcopy(model), model[2].weight.detach().clone()
    backward(alone[:2])
    if dist.get_rank() == 0:
        backward(model[:2])
    optimizer.step()
    for found, parameter in zip(model[:2].parameters(), alone[:2].parameters(), strict=True):
        assert torch.allclose(found.grad, parameter.grad / 2, rtol=0, atol=1e-6)
    assert torch.allclose(model[2].weight, before * 0.95)
    assert not model[2].weight.grad.any()


@pytest.mark.on_ranks(2)
def test_an_update_can_be_left_out_and_a_scheduler_takes_the_optimizer_inside():
    model, optimizer = wrapped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    before = model[0].weight.detach().clone()
    backward(model)
    optimizer.synchronize()
    optimizer.zero_grad()  # say, because a gradient was not finite: all ranks see the same mean
    assert torch.equal(before, model[0].weight)
    backward(model)
    optimizer.step()
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def zero_between(num_passes):
    model, optimizer = wrapped(backward_passes_per_step=num_passes)
    backward(model)
    optimizer.zero_grad()


def too_many_passes():
    model, _ = wrapped(backward_passes_per_step=2)
    for _ in range(3):
        backward(model)


def thawed_later():
    model, optimizer = wrapped()
    model[0].bias.requires_grad_(False)
    optimizer.synchronize()


def never_broadcast():
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, dist.get_rank())
    wrapped(model)


DISAGREE = "ValueError: ranks disagree on the values"
BAD = {
    thawed_later: "RuntimeError: rank {rank}: parameters were added, frozen or thawed",
    partial(zero_between, 1): "RuntimeError: rank {rank}: zero_grad() between backward() and step() would lose",
    partial(zero_between, 3): "RuntimeError: rank {rank}: zero_grad() between backward() and step()",
    too_many_passes: "RuntimeError: rank {rank}: 2.bias got gradient 3 before step(), expected 2: call step()",
    lambda: wrapped(named=[]): "ValueError: named_parameters names 0 of the 6 that are trained",
    lambda: wrapped(nn.Linear(1, 1).requires_grad_(False)): "ValueError: named_parameters names 0 of the 0 that are",
    never_broadcast: f"{DISAGREE} (broadcast_parameters sends rank 0's)",
    lambda: wrapped(nn.Linear(2, 2 + dist.get_rank())): DISAGREE,
    lambda: wrapped(fusion_bytes=100 + dist.get_rank()): DISAGREE,
}


@pytest.mark.on_ranks(2)
def test_what_would_part_the_replicas_is_an_error_on_every_rank():
    for action, words in BAD.items():
        assert words.format(rank=dist.get_rank()) in message(action)
