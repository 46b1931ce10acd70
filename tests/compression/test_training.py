"""Compressed training through DataParallel: all of it sent equals one process, less keeps replicas equal."""

import pytest
import torch
import torch.distributed as dist
from equal import (
    DENSE,
    Row,
    Way,
    assert_rows_equal_one_process,
    calls_of,
    net,
    own_samples,
    replicas,
    same_everywhere,
    thirteen,
    train,
)
from torch import nn

from distlab.blocks.data import rank_slice
from distlab.comm import recorded
from distlab.compression import PlainTopK, PowerSGD, RandomK, TopK, make_hook
from distlab.data_parallel import DataParallel, broadcast_parameters
from distlab.plan.compression import Compression, exchanges

COMPRESSIONS = {
    "top_k": Compression("top_k", ratio=0.1),
    "random_k": Compression("random_k", ratio=0.1),
    "quantize": Compression("quantize", bits=3),
    "by chance": Compression("quantize", bits=3, stochastic=True, error_feedback=False),
    "sign": Compression("sign"),
    "powersgd": Compression("powersgd", rank=1),
}
BUCKETS = {"bucket_bytes": 600, "first_bucket_bytes": 200}


def plainly(model, make):
    broadcast_parameters(model)
    plain = PlainTopK([one for one in model.parameters() if one.requires_grad], 1.0)
    return Way(model, make(model.parameters()), plain.average)


WHOLE = {
    "top_k": replicas(hook=TopK(1.0)),
    "random_k": replicas(hook=RandomK(1.0, 7)),
    "random_k, no feedback": replicas(hook=RandomK(1.0, error_feedback=False)),
    "powersgd": replicas(hook=PowerSGD(9, min_saving=1e-3)),
    "plain": plainly,
}
ROWS = {f"{name}, {updates}": Row(DENSE, updates, way) for name, way in WHOLE.items() for updates in ("sgd", "adam")}


@pytest.mark.equality("compression")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sending_everything_equals_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


def by(hook, optimizer="sgd"):
    return Row(DENSE, optimizer, replicas(hook=hook))


@pytest.mark.equality("compression")
@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.on_ranks
def test_compressed_replicas_stay_equal_repeat_and_go_on_bit_for_bit(world_size):
    for name, compression in COMPRESSIONS.items():
        whole = train(by(make_hook(compression))).state()
        hook, resumed = make_hook(compression), make_hook(compression)
        half = train(by(hook), range(5))
        resumed.load_state_dict(hook.state_dict())
        again = train(by(resumed), range(5, 10), (half.state(), half.optimizer.state_dict())).state()
        assert all(map(same_everywhere, whole.values())), f"{name}: replicas differ"
        assert all(torch.equal(whole[key], again[key]) for key in whole), f"{name}: resumed differs from uninterrupted"


class Watched:
    """A hook that notes the shapes of each bucket that passes."""

    def __init__(self, hook):
        self.hook, self.seen = hook, []

    def start(self, bucket, group):
        self.seen.append([tuple(gradient.shape) for gradient in bucket.gradients])
        return self.hook.start(bucket, group)


@pytest.mark.on_ranks(2)
def test_each_bucket_costs_what_the_plan_says():
    for name, compression in COMPRESSIONS.items():
        hook, replica = Watched(make_hook(compression)), net(0, rare=False)
        made = DataParallel(replica, hook=hook, **BUCKETS)
        for step in range(2):
            hook.seen.clear()
            replica.zero_grad()
            inputs, targets, _ = own_samples(*thirteen(step))
            with recorded() as sent:
                nn.functional.mse_loss(replica(inputs), targets).backward()
                made.synchronize()
        predicted = [call for shapes in hook.seen for call in exchanges(compression, shapes, 8)]
        calls = [(call.op, call.num_bytes) for call in sent.records.calls(dist.get_rank())]
        flag = ("all_reduce", 4)  # DataParallel's own, once a step: whether a rank has something to tell
        assert len(hook.seen) >= 2, name
        assert sorted(calls) == sorted([*predicted, flag]), name


@pytest.mark.on_ranks(2)
def test_training_learns_with_every_compressor():
    for name, compression in COMPRESSIONS.items():
        losses = train(by(make_hook(compression), "plain"), range(50)).losses  # late gradients and momentum add up
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), (name, losses[:5], losses[-5:])


@pytest.mark.on_ranks(3)
def test_plain_top_k_loses_nothing_and_sends_what_it_says():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = net(0, rare=False)
    parameters = [one for one in model.parameters() if one.requires_grad]
    watched = model.entry.weight
    plain, moved, seen = PlainTopK(parameters, 0.1), 0, 0
    for step in range(5):
        inputs, targets = (part[slice(*rank_slice(13, rank, world_size))] for part in thirteen(step))
        model.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        seen = seen + watched.grad
        sent = calls_of(plain.average)
        moved = moved + watched.grad
        torch.optim.SGD(parameters, lr=0.1).step()
    owed = plain.memories[watched].clone()
    kept = [max(1, round(0.1 * p.numel())) for p in parameters]
    assert same_everywhere(moved)
    assert [num_bytes for _, num_bytes in sent] == [8 * k for k in kept for _ in ("places", "values")]
    assert owed.abs().max() > 0
    for total in (owed, seen):
        dist.all_reduce(total)
    torch.testing.assert_close(moved + owed / world_size, seen / world_size)
