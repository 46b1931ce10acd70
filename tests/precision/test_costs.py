"""What half precision costs: the hook's calls and its one rounding, and the bytes of master weights."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of
from torch import nn

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import recorded
from distlab.precision import Float32Reduce, MasterWeights
from distlab.rng import generator

SIZE = 12


def gradients(rank):
    return torch.randn(SIZE, generator=generator(0, rank, "gradients")).bfloat16()


@pytest.mark.on_ranks(3)
def test_the_hook_rounds_a_mean_once_at_the_bytes_of_a_half_precision_sum():
    flat = FlatBuffer([torch.zeros(SIZE, dtype=torch.bfloat16)])
    flat.buffer.copy_(gradients(dist.get_rank()))
    calls = calls_of(lambda: Float32Reduce().start(GradientBucket(0, flat.buffer, flat.views), None).wait())
    total = sum(gradients(rank).float() for rank in range(3))
    assert torch.equal(flat.buffer, (total / 3).bfloat16())
    assert calls == [("all_to_all", 2 * SIZE), ("all_gather", 2 * SIZE // 3)]


@pytest.mark.on_ranks(2)
def test_master_weights_keep_four_bytes_a_parameter_and_four_for_its_gradient():
    half = nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))
    with recorded() as seen:
        masters = MasterWeights([half], lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        half.grad = torch.ones_like(half)
        masters.step()
    (master,) = masters.parameters
    kept = master.nbytes, master.grad.nbytes
    masters.zero_grad()
    assert kept == (4 * SIZE, 4 * SIZE)
    assert master.grad is None
    assert len(seen.records) == 0
