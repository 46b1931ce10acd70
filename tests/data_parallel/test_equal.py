"""Every design of data parallelism trains like one process, repeats bit for bit, and keeps its replicas equal.

Rows of three kinds: a GPT up the ladder; accumulation, clipping and unequal shares together; and a layer that some
ranks use in a step, behind a batch norm over all ranks. tests/zoo has models of every kind.
"""

from operator import methodcaller

import equal
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab import data_parallel

NORMED = equal.Task(lambda rank: nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), equal.net(rank)), equal.thirteen)


def ladder(rung):
    def technique(model, make):
        data_parallel.broadcast_parameters(model)
        return equal.Way(model, make(model.parameters()), equal.averaging(rung, model, 20_000))

    return technique


def horovod(clipped=False, **options):
    def technique(model, make):
        data_parallel.broadcast_parameters(model)
        made = data_parallel.HorovodOptimizer(make(model.parameters()), model.named_parameters(), **options)
        return equal.Way(model, made, made.synchronize if clipped else None)

    return technique


def with_norms_over_ranks(technique):
    """The layers that ranks use differ, and with them the order of bucket and norm: norms have a group of their own."""
    return lambda model, make: technique(data_parallel.convert_sync_batchnorm(model, dist.new_group()), make)


threes, halves = methodcaller("split", 3), methodcaller("chunk", 2)
OVERLAPPED, WIDE = ladder("overlapped"), equal.replicas(bucket_bytes=20_000, first_bucket_bytes=3_000)
ROWS = {
    **{
        rung: equal.Row(equal.BYTES, "sgd", ladder(rung))
        for rung in ("per_parameter", "flat", "bucketed", "overlapped")
    },
    "DataParallel": equal.Row(equal.BYTES, "sgd", WIDE),
    "overlapped, float32": equal.Row(equal.BYTES, "sgd", OVERLAPPED, torch.float32),
    "DataParallel, float32": equal.Row(equal.BYTES, "sgd", WIDE, torch.float32),
    "accumulated": equal.Row(equal.ROUTED, "sgd", equal.replicas(unused="zeros"), cut=threes, clip=0.3),
    "accumulated, mixed": equal.Row(equal.MIXED, "sgd", equal.replicas(unused="zeros"), cut=threes, clip=0.3),
    "tensors larger than a bucket": equal.Row(
        equal.ROUTED, "sgd", equal.replicas(unused="zeros", bucket_bytes=1), cut=threes, clip=0.3
    ),
    "accumulated, hooked": equal.Row(
        equal.ROUTED, "adam", equal.replicas(unused="zeros", hook=equal.Mean()), cut=threes, clip=0.3
    ),
    "hooked, mixed": equal.Row(
        equal.MIXED, "sgd", equal.replicas(unused="zeros", hook=equal.Mean(), bucket_bytes=10**9), cut=threes, clip=0.3
    ),
}
MORE_ROWS = {
    "normed, horovod": equal.Row(NORMED, "plain", with_norms_over_ranks(horovod(fusion_bytes=300))),
    "normed": equal.Row(NORMED, "steady", with_norms_over_ranks(equal.replicas(unused="zeros", bucket_bytes=300))),
    "horovod": equal.Row(equal.DENSE, "decayed", horovod()),
    "horovod, adam": equal.Row(equal.DENSE, "adam", horovod(fusion_bytes=300)),
    "horovod, float32": equal.Row(equal.DENSE, "decayed", horovod(fusion_bytes=300), torch.float32),
    "horovod, clipped": equal.Row(equal.DENSE, "decayed", horovod(True, fusion_bytes=300), clip=0.05),
    "horovod, twice, clipped": equal.Row(
        equal.DENSE, "sgd", horovod(True, backward_passes_per_step=2), cut=halves, clip=0.05
    ),
}


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    equal.assert_rows_equal_one_process(ranks(world_size), ROWS)


@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norms_and_horovod_equal_one_process(ranks, world_size):
    equal.assert_rows_equal_one_process(ranks(world_size), MORE_ROWS)


@pytest.mark.on_ranks(2)
def test_half_precision_gradients_do_not_overflow_while_they_are_summed():
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 60_000.0, dtype=torch.float16)  # largest number: 65,504
    data_parallel.average_per_parameter(parameters[:1])
    data_parallel.average_flat(parameters[1:])
    assert [parameter.grad.tolist() for parameter in parameters] == [[60_000.0] * 3] * 2
