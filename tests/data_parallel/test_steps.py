"""What each rung sends, measured by the recorder, and when; what is sent once; and the optimizer that averages."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import averaging, calls_of, same_everywhere
from refused import message
from torch import nn

from distlab import data_parallel
from distlab.blocks.gradients.gradient_status import find_faults, gather_reports
from distlab.comm import recorded
from distlab.trace import SpanWriter


def mixed_model():
    """Two data types, a mask that is not a number, a tied weight, a frozen one."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(6)])
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.append(torch.nn.Linear(20, 4).double())
    model.register_buffer("mask", torch.rand(3) > 0.5)
    model.register_buffer("count", torch.tensor(dist.get_rank() if dist.is_initialized() else 0))
    return model


def forward(model):
    x = torch.randn(5, 20)
    for layer in list(model)[:-1]:
        x = layer(x)
    return model[-1](x.double()).square().mean()


NUM_SINGLE = 5 * 400 + 5 * 20  # float32: five different weights, six biases less the frozen one
NUM_DOUBLE = 84
GRADIENT_BYTES = 4 * NUM_SINGLE + 8 * NUM_DOUBLE
NUM_PARAMETERS = 12
BUCKETS = (672, 1680, 4960, 1760 + 4)  # as DataParallel's capacities cut them; the flag is in the last
ROUNDED_BYTES = sum(-(-num_bytes // 128) * 128 for num_bytes in BUCKETS)  # up to a cache line for each of 2 ranks

NUM_BUCKETS = 3  # two of float32 (at least 4,000 bytes, and the rest) and one of float64
WAYS = {  # calls during backward, calls after it, bytes of all
    "per_parameter": (0, NUM_PARAMETERS, GRADIENT_BYTES),
    "flat": (0, 2, GRADIENT_BYTES),
    "bucketed": (0, NUM_BUCKETS, GRADIENT_BYTES),
    "overlapped": (NUM_BUCKETS, 0, GRADIENT_BYTES),
    "data_parallel": (NUM_BUCKETS, 1, ROUNDED_BYTES),  # a small first bucket; the last waits for synchronize
}


@pytest.mark.on_ranks(2)
def test_calls_and_bytes_are_as_documented():
    rank, frozen, mask, count = dist.get_rank(), 20 * 4, 3, 8
    for way, (num_during, num_after, num_bytes) in WAYS.items():
        model = mixed_model()
        with recorded() as construction:
            if way == "data_parallel":
                synchronize = data_parallel.DataParallel(model, bucket_bytes=4000, first_bucket_bytes=1000).synchronize
            else:
                data_parallel.broadcast_parameters(model)
                synchronize = averaging(way, model, 4_000)
        loss = forward(model)
        with recorded() as step:
            loss.backward()
            dist.barrier()  # marks the end of backward in the record
            synchronize()
        sums = step.records.ops(rank)
        assert sums == ("all_reduce",) * num_during + ("barrier",) + ("all_reduce",) * num_after, way  # nothing else
        assert step.records.payload_bytes(rank, "all_reduce") == num_bytes, way
        assert construction.records.num_calls("broadcast") == 4, way  # float32, float64, bool, int64
        sent = construction.records.payload_bytes(rank, "broadcast")
        assert sent == GRADIENT_BYTES + frozen + mask + count, way


@pytest.mark.on_ranks(4)
def test_broadcast_makes_all_replicas_the_first_ranks():
    model = mixed_model()
    model[3].weight = torch.nn.Parameter(torch.randn(20, 20).t())  # a transposed layout
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data_parallel.broadcast_parameters(model)
    assert model[1].weight is model[0].weight
    for name, value in model.state_dict().items():
        assert same_everywhere(value.contiguous())
        assert dist.get_rank() or torch.equal(value, before[name])
    assert torch.equal(before["5.weight"], model[5].weight) == (dist.get_rank() == 0)
    groups, model = [dist.new_group(members) for members in ([0, 2], [1, 3])], torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, dist.get_rank())
    data_parallel.broadcast_parameters(model, groups[dist.get_rank() % 2])
    assert model.weight[0, 0].item() == dist.get_rank() % 2, "a group has a first rank of its own"


@pytest.mark.on_ranks(2)
def test_the_order_of_layers_does_not_matter_and_what_a_rank_did_not_use_counts_as_zeros():
    used = [[0, 1, 2], [2, 0]]
    for way in ("per_parameter", "flat", "bucketed", "overlapped"):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        alone, synchronize = copy.deepcopy(layers), averaging(way, layers, 40)
        for rank, order in enumerate(used):
            for model in (alone, layers) if rank == dist.get_rank() else (alone,):
                x = torch.full((1, 3), 1.0 + rank)
                for index in order:
                    x = model[index](x)
                (x.sum() if model is layers else x.sum() / 2).backward()
        assert (layers[1].bias.grad is None) == (dist.get_rank() == 1)
        synchronize()
        for mine, wanted in zip(layers.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, torch.zeros_like(mine) if wanted.grad is None else wanted.grad), way
            assert same_everywhere(mine.grad), way


def test_weights_of_unequal_shares_and_micro_batches_make_the_mean_of_all():
    assert [data_parallel.loss_weight(num, 12, 2) for num in (3, 1)] == [0.5, 1 / 6]  # micro-batches
    for shares, num_total in ((4, 3), 7), ((2, 2, 1), 5):
        samples = torch.rand(num_total, dtype=torch.float64)
        parts = samples.split(list(shares))
        weighted = [part.mean() * data_parallel.loss_weight(len(part), num_total, len(shares)) for part in parts]
        assert torch.allclose(sum(weighted) / len(shares), samples.mean(), atol=1e-15)


def test_a_step_marks_what_it_does():
    model, spans, called = torch.nn.Linear(2, 1), SpanWriter(0), []
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(3, 2), torch.zeros(3, 1))
    how = {"loss_fn": torch.nn.functional.mse_loss, "synchronize": lambda: called.append(True), "spans": spans}
    assert not data_parallel.train_step(model, optimizer, batch=batch, **how).requires_grad
    assert called == [True]
    kinds = [("forward", "F"), ("backward", "B"), ("synchronize", "wait"), ("optimizer", "optimizer")]
    assert [(span.name, span.kind) for span in spans.trace()] == kinds
    assert {span.lane for span in spans.trace()} == {"compute"}


@pytest.mark.on_ranks(2)
def test_what_is_built_agrees_for_40_bytes_and_faults_are_found_by_a_small_sum():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for build in (
        lambda: data_parallel.DistributedSampler(range(10)),
        lambda: data_parallel.convert_sync_batchnorm(torch.nn.BatchNorm1d(2)),
        lambda: data_parallel.HorovodOptimizer(optimizer, model.named_parameters()),
    ):
        assert calls_of(build) == [("all_gather", 40)]
    assert calls_of(lambda: data_parallel.DistributedSampler(range(10), rank=0, world_size=2)) == []
    words = ["the loss is odd"] if dist.get_rank() else []
    quiet, told = calls_of(lambda: gather_reports([0, 1, 2], [])), calls_of(lambda: gather_reports([0, 1, 2], words))
    assert quiet == [("all_gather", 3 + 1)]
    assert [op for op, _ in told] == ["all_gather"] * 3, "also lengths of the sentences, and the sentences"
    found = calls_of(lambda: find_faults([0, 0, 0], ["a", "b", "c"], None, unused="zero", step=1))
    assert found == [("all_reduce", 6 * 3)]


def wrapped(model=None, named=None, decay=0.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay)
    return model, data_parallel.HorovodOptimizer(sgd, model.named_parameters() if named is None else named, **options)


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
