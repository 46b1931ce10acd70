"""Compressed training through DataParallel: all of it sent equals one process, less keeps replicas equal."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import recorded
from distlab.compression import RandomK, TopK, make_hook
from distlab.data_parallel import DataParallel
from distlab.plan.compression import Compression, exchanges
from distlab.rng import generator

COMPRESSIONS = {
    "top_k": Compression("top_k", ratio=0.1),
    "random_k": Compression("random_k", ratio=0.1),
    "quantize": Compression("quantize", bits=3),
    "by chance": Compression("quantize", bits=3, stochastic=True, error_feedback=False),
    "sign": Compression("sign"),
    "powersgd": Compression("powersgd", rank=1),
}
WHOLE = {"top_k": lambda: TopK(1.0), "random_k": lambda: RandomK(1.0), "random_k alone": lambda: RandomK(1.0, 7)}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),  # late gradients and momentum add up
}
BATCH_SIZE = 12
BUCKETS = {"bucket_bytes": 3000, "first_bucket_bytes": 500}


def model(rank=0):
    """Other weights on every rank, a tied one, and a frozen one."""
    source = generator(0, rank, "weights")
    layers = nn.Sequential(
        nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17), nn.Linear(17, 3)
    )
    layers[4].weight = layers[2].weight
    layers = layers.double()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_(std=0.3, generator=source)
    layers[0].bias.requires_grad_(False)
    return layers


def share(step):
    """This rank's part of the batch; everything where there is one process."""
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH_SIZE, 9, generator=source, dtype=torch.float64)
    targets = inputs[:, :3].sin()
    if not dist.is_initialized():
        return inputs, targets
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return inputs[rank::world_size], targets[rank::world_size]


def train(hook, optimizer_name, steps=range(10), state=None):
    replica = model(dist.get_rank() if dist.is_initialized() else 0)
    synchronize = DataParallel(replica, hook=hook, **BUCKETS).synchronize if hook is not None else lambda: None
    optimizer = OPTIMIZERS[optimizer_name](replica.parameters())
    if state is not None:
        replica.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    losses = []
    for step in steps:
        inputs, targets = share(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        synchronize()
        optimizer.step()
        losses.append(loss.item())
    return replica, optimizer, losses


def flat(replica):
    return torch.cat([parameter.detach().flatten() for parameter in replica.parameters()])


@pytest.mark.equality("compression")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_hook_that_sends_everything_equals_one_process(ranks, world_size):
    def run():
        cases = [(name, optimizer_name) for name in WHOLE for optimizer_name in ("sgd", "adam")]
        return {case: flat(train(WHOLE[case[0]](), case[1])[0]) for case in cases}

    results = ranks(world_size).run(run)
    for (name, optimizer_name), parameters in results[0].items():
        alone = flat(train(None, optimizer_name)[0])
        assert (parameters - alone).abs().max() <= 1e-10, (name, optimizer_name)
        assert all(torch.equal(result[name, optimizer_name], parameters) for result in results)


@pytest.mark.equality("compression")
@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_compressed_replicas_stay_equal_repeat_and_go_on_bit_for_bit(ranks, world_size):
    def run():
        found = {}
        for name, compression in COMPRESSIONS.items():
            first = flat(train(make_hook(compression), "sgd")[0])
            hook = make_hook(compression)
            replica, optimizer, _ = train(hook, "sgd", range(5))
            saved = hook.state_dict()
            hook = make_hook(compression)
            hook.load_state_dict(saved)
            state = (replica.state_dict(), optimizer.state_dict())
            found[name] = first, flat(train(hook, "sgd", range(5, 10), state)[0])
        return found

    results = ranks(world_size).run(run)
    for name in COMPRESSIONS:
        first = results[0][name][0]
        for result in results:
            assert torch.equal(result[name][0], first), f"{name}: replicas differ"
            assert torch.equal(result[name][1], first), f"{name}: resumed differs from uninterrupted"


class Watched:
    """A hook that notes the shapes of each bucket that passes."""

    def __init__(self, hook):
        self.hook, self.seen = hook, []

    def start(self, bucket, group):
        self.seen.append([tuple(gradient.shape) for gradient in bucket.gradients])
        return self.hook.start(bucket, group)


@pytest.mark.on_ranks(2)
def test_each_bucket_costs_what_the_plan_says():
    measured = {}
    for name, compression in COMPRESSIONS.items():
        hook, replica = Watched(make_hook(compression)), model()
        replicas = DataParallel(replica, hook=hook, **BUCKETS)
        for step in range(2):
            hook.seen.clear()
            replica.zero_grad()
            inputs, targets = share(step)
            with recorded() as sent:
                nn.functional.mse_loss(replica(inputs), targets).backward()
                replicas.synchronize()
        predicted = [call for shapes in hook.seen for call in exchanges(compression, shapes, 8)]
        calls = [(call.op, call.num_bytes) for call in sent.records.calls(dist.get_rank())]
        measured[name] = len(hook.seen), sorted(predicted), sorted(calls)
    for name, (num_buckets, predicted, calls) in measured.items():
        assert num_buckets >= 2, name
        flag = ("all_reduce", 4)  # DataParallel's own, once a step: whether a rank has something to tell
        assert calls == sorted([*predicted, flag]), name


def test_training_learns_with_every_compressor(ranks):
    def run():
        return {name: train(make_hook(c), "plain", range(50))[2] for name, c in COMPRESSIONS.items()}

    for name, losses in ranks(2).run(run)[0].items():
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), (name, losses[:5], losses[-5:])
