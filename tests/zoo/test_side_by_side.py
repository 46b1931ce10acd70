"""Techniques side by side on models of the zoo: tensor ranks times data ranks, scaled losses, compressed gradients."""

import pytest
import torch
import torch.distributed as dist
import zoo_techniques as zoo
from zoo_kinds import KINDS

from distlab.comm import run
from distlab.compression import RandomK, TopK
from distlab.data_parallel import DataParallel
from distlab.precision import LossScaler
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict
from distlab.tensor_parallel import full_state_dict as full_tensor_state
from distlab.tensor_parallel import parallelize_module

MODELS = ("nanoGPT", "Llama")
CLOSE = 1e-10


def train(kind, call, optimizer, zero, synchronize, number):
    for step in range(zoo.UPDATES):
        zero()
        kind.loss(call, *kind.batch(step, number, 2)).backward()
        synchronize()
        optimizer.step()


def tensor_and(technique, name):
    kind = KINDS[name]
    tensor, data, number = zoo.axes()
    example = kind.batch(9)[:1] if technique == "FullyShard" else None
    model = parallelize_module(kind.build(dist.get_rank()), kind.plan, tensor, example=example)
    if technique == "DataParallel":
        replicas, optimizer = DataParallel(model, data), zoo.adamw(model.parameters())
        train(kind, model, optimizer, optimizer.zero_grad, replicas.synchronize, number)
    elif technique == "ZeRO-2":
        optimizer = ShardedOptimizer(model, zoo.adamw, data, stage=2)
        train(kind, model, optimizer, optimizer.zero_grad, optimizer.synchronize, number)
    else:
        sharded = FullyShard(model, data)
        optimizer = zoo.adamw(sharded.parameters())
        train(kind, sharded, optimizer, sharded.zero_grad, sharded.synchronize, number)
        with sharded.summon() as whole:
            return {key: value.clone() for key, value in full_tensor_state(whole, tensor).items()}
    return {key: value.clone() for key, value in full_tensor_state(model, tensor).items()}


def each_pair():
    techniques = ("DataParallel", "ZeRO-2", "FullyShard")
    return {(technique, name): tensor_and(technique, name) for technique in techniques for name in MODELS}


def differences(got, expected):
    assert not set(expected) - set(got)
    return max(float((got[key] - value).abs().max()) for key, value in expected.items())


@pytest.fixture(scope="module")
def expected():
    return {name: zoo.one_process(KINDS[name]) for name in MODELS}


@pytest.mark.timeout(150)
def test_tensor_ranks_times_data_ranks_equal_one_process(expected):
    for each in run(each_pair, 4, timeout_s=120):
        for (technique, name), got in each.items():
            assert differences(got, expected[name]) < CLOSE, (technique, name)


def scaled(name, technique):
    """Train with a scaled loss; one step overflows on rank 1 alone, and is done again."""
    kind, rank = KINDS[name], dist.get_rank()
    model, scaler = kind.build(rank), LossScaler(2.0**10)
    if technique == "FullyShard":
        call = FullyShard(model)
        parameters, zero, synchronize = list(call.parameters()), call.zero_grad, call.synchronize
    else:
        call, parameters = model, list(model.parameters())
        replicas = DataParallel(model, check_finite=False)
        zero, synchronize = model.zero_grad, replicas.synchronize
    optimizer, skipped = zoo.adamw(parameters), False
    for step in (0, 1, 2, 2, 3, 4, 5):
        zero()
        overflows = step == 2 and not skipped and rank == 1
        loss = kind.loss(call, *kind.batch(step, rank, dist.get_world_size()))
        (scaler.scale(loss) * (float("inf") if overflows else 1.0)).backward()
        synchronize()
        skipped |= step == 2
        scaler.step(optimizer, parameters)
        scaler.update()
    state = full_state_dict(call) if technique == "FullyShard" else zoo.states(model)
    return {key: value.clone() for key, value in state.items()}, scaler.num_skipped


def each_scaled():
    return {(name, how): scaled(name, how) for name in MODELS for how in ("DataParallel", "FullyShard")}


def test_a_scaled_loss_with_an_overflow_on_one_rank_equals_one_process(expected):
    for each in run(each_scaled, 2, timeout_s=60):
        for (name, how), (state, num_skipped) in each.items():
            assert num_skipped == 1, (name, how)
            assert differences(state, expected[name]) < CLOSE, (name, how)


def compressed(name, hook):
    kind, rank = KINDS[name], dist.get_rank()
    model = kind.build(rank)
    replicas = DataParallel(model, bucket_bytes=2000, first_bucket_bytes=500, hook=hook)
    zoo.train(kind, model, zoo.adamw(model.parameters()), between=replicas.synchronize)
    return {key: value.clone() for key, value in zoo.states(model).items()}


def each_compressed():
    makers = {"all by size": lambda: TopK(1.0), "all by chance": lambda: RandomK(1.0), "a tenth": lambda: TopK(0.1)}
    return {(name, how): compressed(name, make()) for how, make in makers.items() for name in MODELS}


def test_hooks_that_send_all_equal_one_process_and_others_keep_replicas_alike(expected):
    one, other = run(each_compressed, 2, timeout_s=60)
    for (name, how), state in one.items():
        assert all(torch.equal(value, other[name, how][key]) for key, value in state.items()), (name, how)
        by = differences(state, expected[name])
        assert by < CLOSE if how.startswith("all") else by > CLOSE, (name, how)
