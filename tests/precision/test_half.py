"""Half precision over ranks: sums with one rounding, masters that keep small updates, autocast as one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.gradient_hook import GradientHook
from distlab.comm import recorded
from distlab.data_parallel import DataParallel
from distlab.precision import Float32Reduce, MasterWeights, all_reduce_in_float32, autocast
from distlab.rng import generator

DTYPES = (torch.bfloat16, torch.float16)


def values(rank, size, dtype):
    return torch.randn(size, generator=generator(3, rank, "values")).to(dtype)


def summed(sizes, dtype, op):
    rank, results = dist.get_rank(), []
    for size in sizes:
        tensor = values(rank, size, dtype).view(-1, 1)
        with recorded() as traffic:
            assert all_reduce_in_float32(tensor, op=op) is tensor
        results.append((tensor.view(-1), [(r.op, r.num_bytes) for r in traffic.records]))
    return results


@pytest.mark.equality("precision")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sums_are_rounded_once_and_are_the_same_bits_on_every_rank(ranks, world_size):
    sizes = [1, 2, 7, 1000]
    for dtype in DTYPES:
        for op in ("sum", "mean"):
            results = ranks(world_size).run(summed, sizes, dtype, op)
            for index, size in enumerate(sizes):
                total = torch.stack([values(r, size, dtype).float() for r in range(world_size)])
                exact = values(0, size, dtype).float()
                for other in total[1:]:
                    exact = exact + other
                expected = (exact / (world_size if op == "mean" else 1)).to(dtype)
                for result in results:
                    assert torch.equal(result[index][0], expected)
                share = -(-size // world_size) * 2
                calls = results[0][index][1]
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


@pytest.mark.on_ranks(2)
def test_a_mean_that_fits_does_not_overflow_and_longer_types_take_one_plain_call():
    large = torch.full((3,), 60_000.0, dtype=torch.float16)
    exact = torch.full((3,), float(dist.get_rank()), dtype=torch.float64)
    with recorded() as traffic:
        all_reduce_in_float32(exact, op="mean")
    assert all_reduce_in_float32(large, op="mean").tolist() == [60_000.0] * 3
    assert exact.tolist() == [0.5] * 3
    assert [r.op for r in traffic.records] == ["all_reduce"]


def test_refusals():
    with pytest.raises(ValueError, match="pass sum or mean"):
        all_reduce_in_float32(torch.zeros(2), op="max")
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce_in_float32(torch.zeros(2, 2).t())


def small_model():
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 2))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator(0, 0, name))
    return model


def train_bfloat16(hook_name):
    rank = dist.get_rank()
    model = small_model().to(torch.bfloat16)
    replicas = DataParallel(model, bucket_bytes=100, first_bucket_bytes=50, hook=Float32Reduce() if hook_name else None)
    masters = MasterWeights(model.parameters(), lambda p: torch.optim.Adam(p, lr=1e-2))
    local = [p.detach().clone() for p in model.parameters()]
    for step in range(5):
        inputs = torch.randn(4, 6, generator=generator(2, rank, f"step {step}")).to(torch.bfloat16)
        masters.zero_grad()
        model(inputs).float().square().mean().backward()
        replicas.synchronize()
        if step == 0:
            local = [p.grad.clone() for p in model.parameters()]
        masters.step()
    return local, [p.detach().clone() for p in masters.parameters]


def test_the_hook_averages_buckets_of_data_parallel_in_float32(ranks):
    assert isinstance(Float32Reduce(), GradientHook)
    results = ranks(3).run(train_bfloat16, "float32")
    for gradients, finals in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(finals, results[0][1], strict=True))
    again = ranks(3).run(train_bfloat16, "float32")
    assert all(torch.equal(a, b) for a, b in zip(again[0][1], results[0][1], strict=True))


@pytest.mark.equality("precision")
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=1.0), lambda p: torch.optim.AdamW(p, lr=1e-3)])
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


def test_accumulation_adds_in_float32():
    half = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = MasterWeights([half], lambda p: torch.optim.SGD(p, lr=1.0))
    for gradient in (256.0, 1.0, 1.0):
        half.grad = torch.full_like(half, gradient)
        masters.accumulate()
    assert masters.parameters[0].grad.item() == 258.0
    other = MasterWeights([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], lambda p: torch.optim.SGD(p, lr=1.0))
    with pytest.raises(ValueError, match="load their own"):
        other.load_state_dict(masters.state_dict())


@pytest.mark.equality("precision")
def test_autocast_over_ranks_equals_one_process(ranks):
    def train(dtype, world_size=1, rank=0):
        model = small_model()
        replicas = DataParallel(model) if dist.is_initialized() else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            inputs = torch.randn(12, 6, generator=generator(2, 0, f"step {step}"))[rank::world_size]
            optimizer.zero_grad()
            with autocast(dtype):
                outputs = model(inputs)
                assert outputs.dtype == (torch.float32 if dtype == "float32" else getattr(torch, dtype))
            outputs.float().square().mean().backward()
            if replicas:
                replicas.synchronize()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    kinds = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}  # half: each part of the batch is rounded by itself
    alone = {dtype: train(dtype) for dtype in kinds}
    results = ranks(3).run(lambda: {dtype: train(dtype, 3, dist.get_rank()) for dtype in kinds})
    for dtype, tolerance in kinds.items():
        for result in results:
            assert max((a - b).abs().max() for a, b in zip(result[dtype], alone[dtype], strict=True)) <= tolerance
            assert all(torch.equal(a, b) for a, b in zip(result[dtype], results[0][dtype], strict=True))
