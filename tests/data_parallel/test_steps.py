"""What each rung sends, measured by the recorder; and when."""

import pytest
import torch
import torch.distributed as dist
from equal import averaging

from distlab.comm import recorded
from distlab.data_parallel import (
    DataParallel,
    Overlapped,
    broadcast_parameters,
    loss_weight,
    train_step,
)
from distlab.data_parallel.steps import in_buckets
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


def measure(way):
    model = mixed_model()
    rank = dist.get_rank()
    with recorded() as construction:
        if way == "data_parallel":
            synchronize = DataParallel(model, bucket_bytes=4_000, first_bucket_bytes=1_000).synchronize
        else:
            broadcast_parameters(model)
            synchronize = averaging(way, model, 4_000)
    loss = forward(model)
    with recorded() as step:
        loss.backward()
        dist.barrier()  # marks the end of backward in the record
        synchronize()
    return (
        step.records.ops(rank),
        step.records.payload_bytes(rank, "all_reduce"),
        construction.records.num_calls("broadcast"),
        construction.records.payload_bytes(rank, "broadcast"),
    )


NUM_BUCKETS = 3  # two of float32 (at least 4,000 bytes, and the rest) and one of float64


@pytest.mark.parametrize(
    ("way", "num_during", "num_after", "num_bytes"),
    [
        ("per_parameter", 0, NUM_PARAMETERS, GRADIENT_BYTES),
        ("flat", 0, 2, GRADIENT_BYTES),
        ("bucketed", 0, NUM_BUCKETS, GRADIENT_BYTES),
        ("overlapped", NUM_BUCKETS, 0, GRADIENT_BYTES),
        ("data_parallel", NUM_BUCKETS, 1, ROUNDED_BYTES),  # a small first bucket; the last waits for synchronize
    ],
)
def test_calls_and_bytes_are_as_documented(ranks, way, num_during, num_after, num_bytes):
    frozen, mask, count = 20 * 4, 3, 8
    for ops, all_reduce_bytes, num_broadcasts, broadcast_bytes in ranks(2).run(measure, way):
        assert ops == ("all_reduce",) * num_during + ("barrier",) + ("all_reduce",) * num_after  # and nothing else
        assert all_reduce_bytes == num_bytes
        assert num_broadcasts == 4  # float32, float64, bool, int64
        assert broadcast_bytes == GRADIENT_BYTES + frozen + mask + count


def test_broadcast_makes_all_replicas_the_first_ranks(ranks):
    def make():
        model = mixed_model()
        model[3].weight = torch.nn.Parameter(torch.randn(20, 20).t())  # a transposed layout
        before = {name: value.clone() for name, value in model.state_dict().items()}
        broadcast_parameters(model)
        return before, model.state_dict(), model[1].weight is model[0].weight

    results = ranks(3).run(make)
    first_before = results[0][0]
    assert not torch.equal(results[1][0]["5.weight"], first_before["5.weight"])
    for _, after, tied in results:
        assert tied
        assert all(torch.equal(after[name], first_before[name]) for name in first_before)


def test_broadcast_starts_at_the_first_rank_of_a_group(ranks):
    def make():
        groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, dist.get_rank())
        broadcast_parameters(model, groups[dist.get_rank() % 2])
        return model.weight[0, 0].item()

    assert ranks(4).run(make) == [0.0, 1.0, 0.0, 1.0]


def test_overlapped_buckets_start_in_order_whatever_the_order_of_gradients(ranks):
    def average(world_order):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        overlapped = Overlapped(layers, None, 288)  # a layer each
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        for index in world_order if dist.get_rank() else range(4):  # rank 1 runs its layers in a different order
            x = layers[index](x)
        with recorded() as sent:
            x.sum().backward()
            mine = [p.grad.clone() for p in layers.parameters()]
            overlapped.synchronize()
        return mine, [p.grad for p in layers.parameters()], sent.records.num_calls("all_reduce")

    (mine0, mean0, calls0), (mine1, mean1, calls1) = ranks(2).run(average, [2, 0, 3, 1])
    assert calls0 == calls1 == 4
    for a, b, mean, other in zip(mine0, mine1, mean0, mean1, strict=True):
        assert torch.equal(mean, other)
        assert torch.allclose(mean, (a + b) / 2)


@pytest.mark.parametrize("way", ["per_parameter", "flat", "bucketed", "overlapped"])
def test_a_parameter_that_one_rank_did_not_use_counts_as_zeros(ranks, way):
    def average():
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        synchronize = averaging(way, layers, 40)
        for _ in range(2):
            layers.zero_grad()
            x = layers[0](torch.ones(1, 3))
            if dist.get_rank() == 0:
                x = layers[1](x)
            x.sum().backward()
            mine = None if layers[1].bias.grad is None else layers[1].bias.grad.clone()
            synchronize()
        return mine, layers[1].bias.grad, layers[2].bias.grad

    (mine, used, unused), (nothing, other, _) = ranks(2).run(average)
    assert nothing is None
    assert torch.equal(used, mine / 2)
    assert torch.equal(used, other)
    assert torch.equal(unused, torch.zeros(3))


def test_buckets_hold_the_last_parameters_first_and_one_data_type_each():
    model = mixed_model()
    buckets = in_buckets([p for p in model.parameters() if p.requires_grad], 4_000)
    assert len(buckets) == NUM_BUCKETS
    assert buckets[0][0] is model[-1].bias
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)
    assert sum(len(bucket) for bucket in buckets) == NUM_PARAMETERS


@pytest.mark.parametrize(("shares", "num_total"), [((4, 3), 7), ((2, 2, 1), 5)])
def test_weighted_means_of_unequal_shares_are_the_mean_of_all(shares, num_total):
    samples = torch.rand(num_total, dtype=torch.float64)
    parts = samples.split(list(shares))
    weighted = [part.mean() * loss_weight(len(part), num_total, len(shares)) for part in parts]
    assert torch.allclose(sum(weighted) / len(shares), samples.mean(), atol=1e-15)
    assert loss_weight(4, 8, 2) == 1.0


def test_a_step_marks_what_it_does():
    model = torch.nn.Linear(2, 1)
    spans = SpanWriter(0)
    called = []
    loss = train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch=(torch.ones(3, 2), torch.zeros(3, 1)),
        loss_fn=torch.nn.functional.mse_loss,
        synchronize=lambda: called.append(True),
        spans=spans,
    )
    assert called == [True]
    assert not loss.requires_grad
    kinds = [(span.name, span.kind, span.lane) for span in spans.trace()]
    assert kinds == [
        ("forward", "F", "compute"),
        ("backward", "B", "compute"),
        ("synchronize", "wait", "compute"),
        ("optimizer", "optimizer", "compute"),
    ]
