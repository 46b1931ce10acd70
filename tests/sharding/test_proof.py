"""What sharding promises: states fall as the formula says, and a model that does not fit trains where its shards do."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.data_parallel import DataParallel
from distlab.measure import KINDS, MemoryLimitError, track_memory
from distlab.sharding import FullyShard, ShardedOptimizer, build_sharded, offloaded

LAYERS, FLOAT = 6, 4
STATES = ("parameters", "gradients", "optimizer")


def stack(width=64, layers=LAYERS):
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def shard(stage, module, check_finite=True):
    """Return what to call, what finishes gradients, and what updates."""
    if stage == 0:
        replicas = DataParallel(module, bucket_bytes=16_384, first_bucket_bytes=16_384, check_finite=check_finite)
        return module, replicas, adam(module.parameters())
    if stage == 3:
        model = FullyShard(module)
        return model, model, adam(model.parameters())
    optimizer = ShardedOptimizer(module, adam, stage=stage, bucket_bytes=16_384, check_finite=check_finite)
    return module, optimizer, optimizer


def measure(stage, width=64, check_finite=True):
    """Train two steps; return the peak of each kind of state, and of all states together."""
    model, gradients, optimizer = shard(stage, stack(width), check_finite)
    inputs = torch.ones(2, width)
    with track_memory(model) as memory:
        for _ in range(2):
            model(inputs).square().sum().backward()
            gradients.synchronize()
            optimizer.step()
            gradients.zero_grad()
    gradients.close()
    _, rows = memory.over_time()
    columns = [KINDS.index(kind) for kind in STATES]
    return [*rows[:, columns].max(axis=0).tolist(), int(rows[:, columns].sum(axis=1).max())]


def formula(stage, num_ranks, width=64, rank=0):
    """Bytes of parameters, gradients and Adam's two moments that a rank holds: ZeRO's table; moments have no padding.

    Source: Rajbhandari et al. 2020, section 5 and figure 1, with 4 + 4 + 8 bytes a parameter.
    """
    whole = LAYERS * width * width * FLOAT
    share = math.ceil(width * width / num_ranks)
    part, own = LAYERS * share * FLOAT, LAYERS * min(share, width * width - rank * share) * FLOAT
    parameters = part if stage == 3 else whole
    gradients = part if stage >= 2 else whole
    moments = 2 * (own if stage >= 1 else whole)
    return [parameters, gradients, moments, parameters + gradients + moments]


def require_formula(found, stage, num_ranks, width=64, rank=0):
    """Beside the formula there are Adam's counts (4 bytes a tensor), and DataParallel's flag (a cache line a rank)."""
    expected = formula(stage, num_ranks, width, rank)
    flag = 64 * num_ranks if stage == 0 else 0
    assert found[0] == expected[0]
    assert found[1] == expected[1] + flag
    counts = found[2] - expected[2]
    assert counts % FLOAT == 0
    assert 0 < counts <= LAYERS * FLOAT
    assert found[3] == expected[3] + flag + counts


@pytest.mark.soak_where(world_size=(1, 2))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_states_fall_as_the_formula_says(ranks, world_size):
    results = ranks(world_size).run(lambda: [measure(stage) for stage in range(4)])
    for found in results:
        for stage in range(4):
            require_formula(found[stage], stage, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_layers_are_padded_once_a_unit(ranks, world_size):
    for rank, found in enumerate(ranks(world_size).run(measure, 3, 13)):
        require_formula(found, 3, world_size, 13, rank)


def simulated(num_ranks):
    """Rank 0 of many, alone: every collective call returns at once, and its numbers mean nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    found = [measure(stage, check_finite=False) for stage in range(4)]
    uneven = measure(3, 13, check_finite=False)
    dist.destroy_process_group()
    return found, uneven


@pytest.mark.soak
def test_states_fall_as_the_formula_says_with_up_to_64_simulated_ranks():
    done = subprocess.run(
        [sys.executable, __file__, "8", "64"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    for num_ranks, (found, uneven) in json.loads(done.stdout.splitlines()[-1]).items():
        for stage in range(4):
            require_formula(found[stage], stage, int(num_ranks))
        require_formula(uneven, 3, int(num_ranks), 13)
    at_64 = json.loads(done.stdout.splitlines()[-1])["64"][0]
    print({stage: states[3] / at_64[0][3] for stage, states in enumerate(at_64)})


WIDTH, DEPTH = 96, 12  # 442 kB of parameters: 1.77 MB of states, of which Adam's are half
LIMIT = 1_500_000


def steps(model, gradients, optimizer, limit):
    inputs = torch.full((2, WIDTH), 0.5)
    losses = []
    with track_memory(model, limit_bytes=limit) as memory:
        for _ in range(3):
            loss = (model(inputs) - 1).square().sum()
            loss.backward()
            gradients.synchronize()
            optimizer.step()
            gradients.zero_grad()
            losses.append(loss.item())
    return losses, memory.peak_bytes


def too_large():
    """Under the same limit: data parallelism, ZeRO-3 of a module built whole, and one built in shards."""
    module = stack(WIDTH, DEPTH)
    replicas = DataParallel(module)
    with pytest.raises(MemoryLimitError) as caught:
        steps(module, replicas, adam(module.parameters()), LIMIT)
    replicas.close()
    model = FullyShard(stack(WIDTH, DEPTH))
    sharded = steps(model, model, adam(model.parameters()), LIMIT)
    with track_memory(torch.nn.Linear(1, 1), limit_bytes=LIMIT):
        model = build_sharded(lambda: stack(WIDTH, DEPTH), seed=0)
    built = steps(model, model, adam(model.parameters()), LIMIT)
    return str(caught.value), sharded, built


def test_a_model_whose_adam_states_exceed_the_limit_fails_replicated_and_trains_sharded(ranks):
    states = 16 * DEPTH * WIDTH * WIDTH
    assert states > LIMIT > states / 2
    results = ranks(2).run(too_large)
    for rank, (text, sharded, built) in enumerate(results):
        assert f"rank {rank}: wants" in text
        assert "optimizer" in text
        assert "shard the optimizer state (ZeRO" in text
        for losses, peak in (sharded, built):
            assert peak <= LIMIT
            assert losses[0] > losses[1] > losses[2]
    assert results[0][1] == results[1][1]


def test_a_model_larger_than_the_limit_is_built_and_trained_in_shards(ranks):
    """Its parameters alone exceed what one rank may hold; four ranks hold a quarter each, and a layer."""
    parameters = FLOAT * DEPTH * WIDTH * WIDTH

    def train():
        limit = parameters - 1
        with pytest.raises(MemoryLimitError), track_memory(torch.nn.Linear(1, 1), limit_bytes=limit):
            stack(WIDTH, DEPTH)
        with track_memory(torch.nn.Linear(1, 1), limit_bytes=limit):
            model = build_sharded(lambda: stack(WIDTH, DEPTH), seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return steps(model, model, optimizer, limit)

    for losses, peak in ranks(4).run(train):
        assert peak < parameters
        assert losses[0] > losses[1] > losses[2]


@pytest.mark.soak_where(world_size=(1, 2))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_offloaded_update_gives_the_same_bits_in_shards_and_pieces(ranks, world_size):
    """On a machine without a GPU device and host are one memory; the way through the host must not change a bit."""

    def final(make, **options):
        torch.manual_seed(0)
        module = stack(13, 3)
        if "stage" in options:
            gradients = optimizer = ShardedOptimizer(module, make, **options)
            model = module
        else:
            model = gradients = FullyShard(module, **options)
            optimizer = make(list(model.parameters()))
        for step in range(4):
            inputs = torch.full((2, 13), 0.5 + step + dist.get_rank())
            model(inputs).square().sum().backward()
            gradients.synchronize()
            gradients.clip_gradients_(1.0)
            optimizer.step()
            gradients.zero_grad()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        gradients.close()
        return weights

    def compare():
        host = offloaded(torch.optim.Adam, lr=1e-3)
        pairs = [
            (final(adam), final(adam, offload=True)),
            (final(adam, stage=1), final(host, stage=1)),
            (final(adam, stage=2), final(host, stage=2)),
        ]
        return [all(map(torch.equal, *pair)) for pair in pairs]

    assert ranks(world_size).run(compare) == [[True] * 3] * world_size


if __name__ == "__main__":
    print(json.dumps({number: simulated(int(number)) for number in sys.argv[1:]}))
