"""The optimizer that averages: sends what it says, and refuses what would part the replicas."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.comm import recorded
from distlab.data_parallel import HorovodOptimizer, broadcast_parameters


def wrapped(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return model, HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


@pytest.mark.on_ranks(2)
def test_buffers_go_during_backward_in_order_and_carry_the_gradients_bytes():
    model, optimizer = wrapped(fusion_bytes=80)
    rank = dist.get_rank()
    with recorded() as backward:
        model(torch.randn(2, 4)).sum().backward()
    with recorded() as step:
        optimizer.step()
    sizes = [call.num_bytes for call in backward.records.calls(rank)]
    assert sizes == [80, 80, 80]
    assert step.records.num_calls() == 0


@pytest.mark.on_ranks(2)
def test_only_the_last_of_the_passes_sends_and_nothing_is_averaged_twice():
    model, optimizer = wrapped(backward_passes_per_step=2)
    counts = []

    def count(action):
        with recorded() as sent:
            action()
        counts.append(sent.records.num_calls())

    count(lambda: model(torch.randn(2, 4)).sum().backward())
    count(lambda: model(torch.randn(2, 4)).sum().backward())
    count(optimizer.synchronize)
    count(optimizer.step)
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    count(optimizer.step)  # earlier than planned: what is there is sent
    assert counts == [0, 1, 0, 0, 1]


@pytest.mark.on_ranks(2)
def test_a_rank_without_a_batch_counts_as_zeros_and_waits_for_nobody():
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    (alone(torch.ones(1, 4)).sum() / 2).backward()
    model, optimizer = wrapped(fusion_bytes=100)
    if dist.get_rank() == 0:
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for found, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(found.grad, parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.on_ranks(2)
def test_what_nobody_used_is_zeros_and_still_updated_as_documented():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    broadcast_parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = HorovodOptimizer(sgd, model.named_parameters())
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.allclose(model[1].weight, before * 0.95)
    assert model[1].weight.grad.abs().max().item() == 0.0


@pytest.mark.on_ranks(2)
def test_an_update_can_be_left_out_and_a_scheduler_takes_the_optimizer_inside():
    model, optimizer = wrapped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    before = model[0].weight.detach().clone()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # say, because a gradient was not finite: all ranks see the same mean
    same = torch.equal(before, model[0].weight)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert same
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def backward(model):
    model(torch.ones(1, 4)).sum().backward()


def zero_between(num_passes=1):
    model, optimizer = wrapped(backward_passes_per_step=num_passes)
    backward(model)
    optimizer.zero_grad()


def too_many_passes():
    model, _ = wrapped(backward_passes_per_step=2)
    for _ in range(3):
        backward(model)


def nameless():
    model = nn.Linear(2, 2)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("bias", model.bias)])


def frozen():
    model = nn.Linear(2, 2).requires_grad_(False)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def never_broadcast():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def other_shapes():
    model = nn.Linear(2, 2 + dist.get_rank())
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def thawed_later():
    model, optimizer = wrapped()
    model[0].bias.requires_grad_(False)
    optimizer.synchronize()


BAD = {
    thawed_later: "RuntimeError: rank {rank}: parameters were added, frozen or thawed",
    zero_between: "RuntimeError: rank {rank}: zero_grad() between backward() and step() would lose gradients",
    partial(zero_between, 3): "RuntimeError: rank {rank}: zero_grad() between backward() and step()",
    too_many_passes: "RuntimeError: rank {rank}: 2.bias got gradient 3 before step(), expected 2: call step()",
    nameless: "ValueError: named_parameters names 1 of the 2 that are trained",
    frozen: "ValueError: named_parameters names 0 of the 0 that are trained",
    never_broadcast: "ValueError: ranks disagree on the values (broadcast_parameters sends rank 0's)",
    other_shapes: "ValueError: ranks disagree on the values",
    lambda: wrapped(fusion_bytes=100 + dist.get_rank()): "ValueError: ranks disagree on the values",
}


@pytest.mark.on_ranks(2)
def test_what_would_part_the_replicas_is_an_error_on_every_rank():
    for action, words in BAD.items():
        assert words.format(rank=dist.get_rank()) in message(action)
