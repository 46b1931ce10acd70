"""Every rung of the ladder trains like one process, repeats bit for bit, and keeps its replicas equal."""

import pytest
import torch
import torch.distributed as dist
from equal import BATCH_SIZE, OPTIMIZERS, alone, averaging, awkward_model, corpus, difference, finals

from distlab.blocks.models import GPT
from distlab.data_parallel import (
    DataParallel,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    loss_weight,
    train_step,
)

WAYS = ["per_parameter", "flat", "bucketed", "overlapped", "data_parallel"]


def synchronizer(way, model):
    if way == "data_parallel":
        return DataParallel(model, bucket_bytes=20_000, first_bucket_bytes=3_000).synchronize
    broadcast_parameters(model)
    return averaging(way, model, 20_000)


def train(ways, dtype, optimizer_name):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = {}
    for way in ways:
        model = awkward_model(rank, dtype)
        synchronize, optimizer = synchronizer(way, model), OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(10):
            batch = corpus().batch(step, BATCH_SIZE, seed=1, rank=rank, world_size=world_size)
            weight = loss_weight(len(batch[0]), BATCH_SIZE, world_size)
            train_step(model, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=synchronize, weight=weight)
        found[way] = finals(model)
    return found


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_in_float64_equal_one_process(ranks, world_size):
    results = ranks(world_size).run(train, WAYS, torch.float64, "sgd")
    for way in WAYS:
        assert difference(results[0][way], alone("sgd")) <= 1e-10, way
        assert all(difference(result[way], results[0][way]) == 0.0 for result in results), f"{way}: replicas differ"


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_ten_updates_in_float32_equal_one_process(ranks, world_size, record_property):
    results = ranks(world_size).run(train, WAYS, torch.float32, "sgd")
    for way in WAYS:
        assert difference(results[0][way], alone("sgd", torch.float32)) <= 1e-5, way
    adam = ranks(world_size).run(train, ["data_parallel"], torch.float32, "adam")
    drift = difference(adam[0]["data_parallel"], alone("adam", torch.float32))
    record_property("adam_drift", drift)  # reported, not bounded: Adam divides small differences by small numbers
    print(f"Adam in float32 drifts by {drift:.1e} in ten updates at {world_size} ranks")


@pytest.mark.equality("data_parallel")
def test_training_repeats_bit_for_bit(ranks):
    first = ranks(3).run(train, ["overlapped", "data_parallel"], torch.float32, "sgd")
    second = ranks(3).run(train, ["overlapped", "data_parallel"], torch.float32, "sgd")
    for one, other in zip(first, second, strict=True):
        assert all(difference(one[way], other[way]) == 0.0 for way in one)


@pytest.mark.on_ranks(2)
def test_half_precision_gradients_do_not_overflow_while_they_are_summed():
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 60_000.0, dtype=torch.float16)  # largest number: 65,504
    average_per_parameter(parameters[:1])
    average_flat(parameters[1:])
    assert [parameter.grad.tolist() for parameter in parameters] == [[60_000.0] * 3] * 2
