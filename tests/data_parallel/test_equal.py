"""Every design of data parallelism trains like one process, repeats bit for bit, and keeps its replicas equal.

Rows of three kinds: a GPT up the ladder; accumulation, clipping and unequal shares together; and a layer that some
ranks use in a step, behind a batch norm over all ranks. tests/zoo has models of every kind.
"""

from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from equal import (
    BYTES,
    DENSE,
    MIXED,
    ROUTED,
    Mean,
    Row,
    Task,
    Way,
    assert_rows_equal_one_process,
    averaging,
    net,
    replicas,
    thirteen,
)
from torch import nn

from distlab.data_parallel import (
    HorovodOptimizer,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    convert_sync_batchnorm,
)

NORMED = Task(lambda rank: nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), net(rank)), thirteen)


def ladder(rung):
    def technique(model, make):
        broadcast_parameters(model)
        return Way(model, make(model.parameters()), averaging(rung, model, 20_000))

    return technique


def horovod(clipped=False, **options):
    def technique(model, make):
        broadcast_parameters(model)
        made = HorovodOptimizer(make(model.parameters()), model.named_parameters(), **options)
        return Way(model, made, made.synchronize if clipped else None)

    return technique


def with_norms_over_ranks(technique):
    """The layers that ranks use differ, and with them the order of bucket and norm: norms have a group of their own."""
    return lambda model, make: technique(convert_sync_batchnorm(model, dist.new_group()), make)


threes, halves = methodcaller("split", 3), methodcaller("chunk", 2)
OVERLAPPED, WIDE = ladder("overlapped"), replicas(bucket_bytes=20_000, first_bucket_bytes=3_000)
ROWS = {
    **{rung: Row(BYTES, "sgd", ladder(rung)) for rung in ("per_parameter", "flat", "bucketed", "overlapped")},
    "DataParallel": Row(BYTES, "sgd", WIDE),
    "overlapped, float32": Row(BYTES, "sgd", OVERLAPPED, torch.float32),
    "DataParallel, float32": Row(BYTES, "sgd", WIDE, torch.float32),
    "accumulated": Row(ROUTED, "sgd", replicas(unused="zeros"), cut=threes, clip=0.3),
    "accumulated, mixed": Row(MIXED, "sgd", replicas(unused="zeros"), cut=threes, clip=0.3),
    "tensors larger than a bucket": Row(ROUTED, "sgd", replicas(unused="zeros", bucket_bytes=1), cut=threes, clip=0.3),
    "accumulated, hooked": Row(ROUTED, "adam", replicas(unused="zeros", hook=Mean()), cut=threes, clip=0.3),
    "hooked, mixed": Row(MIXED, "sgd", replicas(unused="zeros", hook=Mean(), bucket_bytes=10**9), cut=threes, clip=0.3),
}
MORE_ROWS = {
    "normed, horovod": Row(NORMED, "plain", with_norms_over_ranks(horovod(fusion_bytes=300))),
    "normed": Row(NORMED, "steady", with_norms_over_ranks(replicas(unused="zeros", bucket_bytes=300))),
    "horovod": Row(DENSE, "decayed", horovod()),
    "horovod, adam": Row(DENSE, "adam", horovod(fusion_bytes=300)),
    "horovod, float32": Row(DENSE, "decayed", horovod(fusion_bytes=300), torch.float32),
    "horovod, clipped": Row(DENSE, "decayed", horovod(True, fusion_bytes=300), clip=0.05),
    "horovod, twice, clipped": Row(DENSE, "sgd", horovod(True, backward_passes_per_step=2), cut=halves, clip=0.05),
}


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


@pytest.mark.soak_where(world_size=(1, 2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norms_and_horovod_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), MORE_ROWS)


@pytest.mark.on_ranks(2)
def test_half_precision_gradients_do_not_overflow_while_they_are_summed():
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 60_000.0, dtype=torch.float16)  # largest number: 65,504
    average_per_parameter(parameters[:1])
    average_flat(parameters[1:])
    assert [parameter.grad.tolist() for parameter in parameters] == [[60_000.0] * 3] * 2
