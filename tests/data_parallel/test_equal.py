"""Every rung of the ladder trains like one process, repeats bit for bit, and keeps its replicas equal."""

import pytest
import torch
import torch.distributed as dist

from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import (
    Bucketed,
    DataParallel,
    Overlapped,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    loss_weight,
    train_step,
)
from distlab.models import GPT, GPTConfig
from distlab.rng import generator

WAYS = ["per_parameter", "flat", "bucketed", "overlapped", "data_parallel"]
BATCH_SIZE = 7  # no world size above 1 divides it
CONFIG = GPTConfig(vocab_size=257, context=12, num_layers=2, num_heads=2, hidden_size=24, tied=True)


def awkward_model(rank, dtype):
    """Odd vocabulary, tied weight, a frozen parameter, biases not zero, other weights on every rank."""
    model = GPT(CONFIG, generator(0, rank, "weights")).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, rank, name))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    return model


def synchronizer(way, model):
    if way == "data_parallel":
        return DataParallel(model, bucket_bytes=20_000, first_bucket_bytes=3_000).synchronize
    broadcast_parameters(model)
    if way == "per_parameter":
        return lambda: average_per_parameter(model.parameters())
    if way == "flat":
        return lambda: average_flat(model.parameters())
    return {"bucketed": Bucketed, "overlapped": Overlapped}[way](model, None, 20_000).synchronize


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def train(ways, dtype, optimizer_name):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    finals = {}
    for way in ways:
        model = awkward_model(rank, dtype)
        synchronize = synchronizer(way, model) if way != "alone" else None
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(10):
            inputs, targets = corpus.batch(step, BATCH_SIZE, seed=1, rank=rank, world_size=world_size)
            weight = loss_weight(len(inputs), BATCH_SIZE, world_size)
            train_step(
                model, optimizer, batch=(inputs, targets), loss_fn=GPT.loss, synchronize=synchronize, weight=weight
            )
        finals[way] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return finals


def difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def alone():
    cases = [(torch.float64, "sgd"), (torch.float32, "sgd"), (torch.float32, "adam")]
    return {case: train(["alone"], *case)["alone"] for case in cases}


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_in_float64_equal_one_process(ranks, alone, world_size):
    results = ranks(world_size).run(train, WAYS, torch.float64, "sgd")
    for way in WAYS:
        assert difference(results[0][way], alone[torch.float64, "sgd"]) <= 1e-10, way
        assert all(difference(result[way], results[0][way]) == 0.0 for result in results), f"{way}: replicas differ"


@pytest.mark.equality("data_parallel")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ten_updates_in_float32_equal_one_process(ranks, alone, world_size, record_property):
    results = ranks(world_size).run(train, WAYS, torch.float32, "sgd")
    for way in WAYS:
        assert difference(results[0][way], alone[torch.float32, "sgd"]) <= 1e-5, way
    adam = ranks(world_size).run(train, ["data_parallel"], torch.float32, "adam")
    drift = difference(adam[0]["data_parallel"], alone[torch.float32, "adam"])
    record_property("adam_drift", drift)  # reported, not bounded: Adam divides small differences by small numbers
    print(f"Adam in float32 drifts by {drift:.1e} in ten updates at {world_size} ranks")


@pytest.mark.equality("data_parallel")
def test_training_repeats_bit_for_bit(ranks):
    first = ranks(3).run(train, ["overlapped", "data_parallel"], torch.float32, "sgd")
    second = ranks(3).run(train, ["overlapped", "data_parallel"], torch.float32, "sgd")
    for one, other in zip(first, second, strict=True):
        assert all(difference(one[way], other[way]) == 0.0 for way in one)


def test_the_updates_are_not_trivial(alone):
    before = dict(awkward_model(0, torch.float64).named_parameters())
    after = alone[torch.float64, "sgd"]
    frozen = "blocks.0.feed_forward.widen.bias"
    assert torch.equal(before[frozen], after[frozen])
    assert all((before[name] - after[name]).abs().max() > 1e-6 for name in before if name != frozen)


def test_half_precision_gradients_do_not_overflow_while_they_are_summed(ranks):
    def average_large():
        parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.full((3,), 60_000.0, dtype=torch.float16)  # largest number: 65,504
        average_per_parameter(parameters[:1])
        average_flat(parameters[1:])
        return [parameter.grad.tolist() for parameter in parameters]

    assert ranks(2).run(average_large) == [[[60_000.0] * 3] * 2] * 2
