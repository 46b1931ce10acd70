"""What half precision costs: the hook's calls and its one rounding, and the bytes of master weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import recorded
from distlab.precision import Float32Reduce, MasterWeights
from distlab.rng import generator

SIZE = 12


def gradients(rank):
    return torch.randn(SIZE, generator=generator(0, rank, "gradients")).bfloat16()


def reduce_bucket():
    flat = FlatBuffer([torch.zeros(SIZE, dtype=torch.bfloat16)])
    flat.buffer.copy_(gradients(dist.get_rank()))
    hook, bucket = Float32Reduce(), GradientBucket(0, flat.buffer, flat.views)
    with recorded() as seen:
        hook.start(bucket, None).wait()
    calls = [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]
    return flat.buffer, calls


def test_the_hook_rounds_a_mean_once_at_the_bytes_of_a_half_precision_sum(ranks):
    total = gradients(0).float() + gradients(1).float() + gradients(2).float()
    for found, calls in ranks(3).run(reduce_bucket):
        assert torch.equal(found, (total / 3).bfloat16())
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
