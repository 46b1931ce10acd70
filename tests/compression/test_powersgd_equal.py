"""PowerSGD gives the gradients of torch's hook at equal settings."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import PowerSGD
from distlab.rng import generator

SHAPES = ((24, 20), (24,), (24, 20), (24,), (9, 4, 3), (7,), (24, 20), (30, 6), (2, 3))


def gradient_bucket():
    flat = FlatBuffer([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES])
    return GradientBucket(0, flat.buffer, flat.views)


def fill(bucket, step):
    """Write this rank's gradients of a step: a part that all ranks and steps share, and the rank's own."""
    size = bucket.buffer.numel()
    common = torch.randn(size, generator=generator(0, 0, "common"), dtype=torch.float64)
    own = torch.randn(size, generator=generator(0, dist.get_rank(), f"own {step}"), dtype=torch.float64)
    bucket.buffer.copy_(common + 0.5 * own)


class TorchBucket(NamedTuple):
    """What torch's hook asks of a bucket of DDP, which needs no DDP."""

    bucket: GradientBucket

    def buffer(self):
        return self.bucket.buffer

    def gradients(self):
        return list(self.bucket.gradients)

    def index(self):
        return self.bucket.index

    def is_last(self):
        return True


class FromTorchsDraws(PowerSGD):
    """The hook with the numbers that torch's hook draws, in torch's order."""

    def _first_factors(self, index, memory):
        if not hasattr(self, "draws"):
            self.draws = np.random.RandomState(0)
        torch.manual_seed(self.draws.randint(1_000_000_000))
        drawn = [
            torch.randn(1, batch.columns, batch.rank, dtype=torch.float64).flatten()
            for batch in memory.layout.batches
            for _ in range(batch.num_matrices)
        ]
        return torch.cat(drawn)


def beside_torch(rank, feedback, warm):
    start_step = 2
    hook = FromTorchsDraws(rank, error_feedback=feedback, warm_start=warm, start_step=start_step)
    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start_step,
        use_error_feedback=feedback,
        warm_start=warm,
        random_seed=0,
    )
    ours, theirs, mean = (gradient_bucket() for _ in range(3))
    differences, compressed = [], []
    for step in range(7):
        fill(ours, step)
        fill(theirs, step)
        hook.start(ours, None).wait()
        theirs.buffer.copy_(powerSGD_hook(state, TorchBucket(theirs)).wait())
        differences.append((ours.buffer - theirs.buffer).abs().max().item())
        fill(mean, step)
        dist.all_reduce(mean.buffer)
        compressed.append((ours.buffer - mean.buffer / dist.get_world_size()).abs().max().item() > 1e-3)
    assert compressed == [False] * start_step + [True] * 5
    return max(differences)


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_gradients_are_those_of_torchs_hook(world_size):
    cases = [(1, True, True), (2, True, True), (3, True, True), (3, False, True), (2, True, False)]
    result = {case: beside_torch(*case) for case in cases}
    assert all(difference <= 1e-10 for difference in result.values()), result
