"""What sharding promises: states fall as the formula says, and a model that does not fit trains where its shards do."""

import math

import pytest
import torch

from distlab.data_parallel import DataParallel
from distlab.measure import KINDS, MemoryLimitError, track_memory
from distlab.sharding import FullyShard, ShardedOptimizer

LAYERS, FLOAT = 6, 4
STATES = ("parameters", "gradients", "optimizer")


def stack(width=64, layers=LAYERS):
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def shard(stage, module):
    """Return what to call, what finishes gradients, and what updates."""
    if stage == 0:
        return module, DataParallel(module, bucket_bytes=16_384, first_bucket_bytes=16_384), adam(module.parameters())
    if stage == 3:
        model = FullyShard(module)
        return model, model, adam(model.parameters())
    optimizer = ShardedOptimizer(module, adam, stage=stage, bucket_bytes=16_384)
    return module, optimizer, optimizer


def measure(stage, width=64):
    """Train two steps; return the peak of each kind of state, and of all states together."""
    model, gradients, optimizer = shard(stage, stack(width))
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
def test_states_fall_as_the_formula_says_and_uneven_layers_are_padded_once_a_unit(ranks, world_size):
    results = ranks(world_size).run(lambda: [*(measure(stage) for stage in range(4)), measure(3, 13)])
    for rank, found in enumerate(results):
        for stage in range(4):
            require_formula(found[stage], stage, world_size)
        require_formula(found[4], 3, world_size, 13, rank)


WIDTH, DEPTH = 96, 12  # 442 kB of parameters


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


def built_in_shards():
    """Build shapes alone; then draw one unit's values after the other, of which each rank keeps its part."""
    with torch.device("meta"):
        module = stack(WIDTH, DEPTH)
    model, draw = FullyShard(module), torch.Generator().manual_seed(0)
    for unit in model.units:
        unit.fill([torch.randn(shape, generator=draw) / (3 * WIDTH) ** 0.5 for shape in unit.layout.shapes])
    return model


def test_a_model_larger_than_the_limit_is_built_and_trained_in_shards(ranks):
    """Its parameters alone exceed what one rank may hold; four ranks hold a quarter each, and a unit."""
    parameters = FLOAT * DEPTH * WIDTH * WIDTH

    def train():
        limit = parameters - 1
        with pytest.raises(MemoryLimitError), track_memory(torch.nn.Linear(1, 1), limit_bytes=limit):
            stack(WIDTH, DEPTH)
        with track_memory(torch.nn.Linear(1, 1), limit_bytes=limit):
            model = built_in_shards()
        return steps(model, model, torch.optim.SGD(model.parameters(), lr=1e-3), limit)

    for losses, peak in ranks(4).run(train):
        assert peak < parameters
        assert losses[0] > losses[1] > losses[2]
