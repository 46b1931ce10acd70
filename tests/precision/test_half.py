"""Half precision over ranks: sums with one rounding, masters that keep small updates, autocast as one process."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, same_everywhere
from torch import nn

from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.data_parallel import DataParallel
from distlab.precision import Float32Reduce, MasterWeights, all_reduce_in_float32, autocast
from distlab.rng import generator

DTYPES = (torch.bfloat16, torch.float16)


def values(rank, size, dtype):
    return torch.randn(size, generator=generator(3, rank, "values")).to(dtype)


@pytest.mark.equality("precision")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_sums_are_rounded_once_and_are_the_same_bits_on_every_rank(world_size):
    for dtype, op, size in product(DTYPES, ("sum", "mean"), (1, 2, 7, 1000)):
        tensor = values(dist.get_rank(), size, dtype).view(-1, 1)
        calls = calls_of(lambda tensor=tensor, op=op: all_reduce_in_float32(tensor, op=op))
        exact = sum(values(rank, size, dtype).float() for rank in range(world_size))
        assert torch.equal(tensor.view(-1), (exact / (world_size if op == "mean" else 1)).to(dtype))
        share = -(-size // world_size) * 2
        assert calls == [("all_to_all", share * world_size), ("all_gather", share)], calls


@pytest.mark.on_ranks(4)
def test_a_sum_in_bfloat16_loses_what_one_in_float32_keeps():
    plain = torch.ones(64, dtype=torch.bfloat16)
    plain[dist.get_rank() :: 4] = 256.0  # on each rank other elements, so no order of adding spares all
    kept = plain.clone()
    dist.all_reduce(plain)
    kept = all_reduce_in_float32(kept)
    assert (kept == 260.0).all(), "259, rounded once to bfloat16's next number"
    assert (plain < 260.0).any(), "256 + 1 is 256 in bfloat16"
    large = torch.full((3,), 60_000.0, dtype=torch.float16)
    assert all_reduce_in_float32(large, op="mean").tolist() == [60_000.0] * 3, "a mean that fits does not overflow"
    exact = torch.full((3,), float(dist.get_rank()), dtype=torch.float64)
    assert calls_of(lambda: all_reduce_in_float32(exact, op="mean")) == [("all_reduce", 8 * 3)]
    assert exact.tolist() == [1.5] * 3


def small_model():
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 2))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator(0, 0, name))
    return model


def train_bfloat16():
    """Return the gradients of the first step, and the masters at the end."""
    rank, model = dist.get_rank(), small_model().to(torch.bfloat16)
    replicas = DataParallel(model, bucket_bytes=100, first_bucket_bytes=50, hook=Float32Reduce())
    masters, first = MasterWeights(model.parameters(), lambda p: torch.optim.Adam(p, lr=1e-2)), []
    for step in range(5):
        inputs = torch.randn(4, 6, generator=generator(2, rank, f"step {step}")).to(torch.bfloat16)
        masters.zero_grad()
        model(inputs).float().square().mean().backward()
        replicas.synchronize()
        first = first or [p.grad.clone() for p in model.parameters()]
        masters.step()
    return first + [p.detach().clone() for p in masters.parameters]


@pytest.mark.on_ranks(3)
def test_the_hook_averages_buckets_of_data_parallel_in_float32_with_one_rounding():
    parts = [torch.randn(12, generator=generator(0, rank, "gradients")).bfloat16() for rank in range(3)]
    mine = parts[dist.get_rank()].clone()
    calls = calls_of(lambda: Float32Reduce().start(GradientBucket(0, mine, (mine,)), None).wait())
    assert torch.equal(mine, (sum(part.float() for part in parts) / 3).bfloat16())
    assert calls == [("all_to_all", 2 * 12), ("all_gather", 2 * 12 // 3)], "the bytes of a sum in half precision"
    assert isinstance(Float32Reduce(), GradientHook)
    one, other = train_bfloat16(), train_bfloat16()
    assert all(map(same_everywhere, one))
    assert all(map(torch.equal, one, other))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.equality("precision")
@pytest.mark.parametrize("make", [sgd, lambda p: torch.optim.AdamW(p, lr=1e-3)])
def test_master_weights_equal_float32_updates_and_keep_what_half_precision_loses(make):
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    long = nn.Parameter(torch.ones(3))
    exact = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    masters, alone = MasterWeights([half, frozen, half, long], make), make(exact)
    assert masters.parameters[1] is long
    assert [p.dtype for p in masters.parameters] == [torch.float32] * 2
    for _ in range(10):
        masters.zero_grad()
        half.grad, long.grad = torch.full_like(half, 2.0**-10), torch.full_like(long, 2.0**-10)
        exact[0].grad, exact[1].grad = torch.full((4,), 2.0**-10), torch.full((3,), 2.0**-10)
        masters.step()
        alone.step()
        assert half.grad is None, "the half-precision gradient is let go"
    assert all(torch.equal(a, b) for a, b in zip(masters.parameters, exact, strict=True))
    assert torch.equal(half, exact[0].to(torch.bfloat16))
    assert (half < 1).all(), "ten updates of 0.001 add up"
    lost = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(10):
        lost -= 2.0**-10
    assert (lost == 1).all(), "in bfloat16 each of them is lost"


def test_master_weights_keep_four_bytes_a_parameter_and_four_for_its_gradient_and_add_in_float32():
    half = nn.Parameter(torch.ones(12, dtype=torch.bfloat16))
    masters = MasterWeights([half], sgd)
    (master,) = masters.parameters
    for gradient in (256.0, 1.0, 1.0):
        half.grad = torch.full_like(half, gradient)
        masters.accumulate()
    assert master.grad.tolist() == [258.0] * 12
    assert (master.nbytes, master.grad.nbytes) == (4 * 12, 4 * 12)
    masters.step()
    masters.zero_grad()
    assert master.grad is None


def train_under(dtype, replicated):
    model = small_model()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if replicated else (0, 1)
    synchronize = DataParallel(model).synchronize if replicated else lambda: None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        inputs = torch.randn(12, 6, generator=generator(2, 0, f"step {step}"))[rank::world_size]
        optimizer.zero_grad()
        with autocast(dtype):
            outputs = model(inputs)
        assert outputs.dtype == getattr(torch, dtype)
        outputs.float().square().mean().backward()
        synchronize()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.equality("precision")
@pytest.mark.on_ranks(3)
def test_autocast_over_ranks_equals_one_process():
    kinds = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}  # half: each part of the batch is rounded by itself
    for dtype, tolerance in kinds.items():
        found, alone = train_under(dtype, replicated=True), train_under(dtype, replicated=False)
        assert max((a - b).abs().max() for a, b in zip(found, alone, strict=True)) <= tolerance
        assert all(map(same_everywhere, found))
