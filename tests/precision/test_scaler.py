"""Half precision: ranks skip together, sums have one rounding, masters keep small updates, autocast as one process."""

import math
import re
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, same_everywhere
from refused import message
from torch import nn

from distlab.blocks.clip import clip_gradients_
from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.data_parallel import average_flat, broadcast_parameters
from distlab.precision import Float32Reduce, LossScaler, MasterWeights, all_reduce_in_float32, as_dtype, autocast
from distlab.rng import generator

SAMPLES = 12  # world sizes 1 to 4 divide it
OVERFLOWS = {2: 1, 5: 0}  # step: the sample whose gradient overflows, so that one rank alone sees it


def make_model(dtype=torch.float32, rank=0):
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator(0, rank, name))
    return model.to(dtype)


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def half(size=1):
    return nn.Parameter(torch.ones(size, dtype=torch.float16))


def masters(size=1):
    return MasterWeights([half(size)], make_sgd)


def batch(step):
    draw = generator(1, step, "batch")
    inputs, targets = torch.randn(SAMPLES, 7, generator=draw), torch.randn(SAMPLES, 3, generator=draw)
    if step in OVERFLOWS:
        targets[OVERFLOWS[step]] = float("nan") if step == 5 else 1e38
    return inputs, targets


def train_scaled(dtype=torch.float32, alone=False):
    """Ten updates of master weights under a scaler: final masters, norms, and what each step decided."""
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    model = make_model(dtype, rank)
    if not alone:
        broadcast_parameters(model)
    masters, scaler = MasterWeights(model.parameters(), make_sgd), LossScaler(2.0**10, interval=3)
    done, factors, norms = [], [], []
    for step in range(10):
        inputs, targets = (part[rank::world_size] for part in batch(step))
        masters.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets)).backward()
        masters.accumulate()
        if not alone:
            average_flat(masters.parameters)
        if scaler.unscale_(masters.parameters):
            norms.append(float(clip_gradients_(masters.parameters, 0.5)))
        done.append(scaler.step(masters, masters.parameters))
        scaler.update()
        factors.append(scaler.value)
    return [p.detach().clone() for p in masters.parameters], norms, (factors, done, scaler.num_skipped)


def apart(some, others):
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


@pytest.mark.equality("precision")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_ranks_skip_together_and_equal_one_process(world_size):
    finals, norms, decided = train_scaled()
    alone, alone_norms, alone_decided = train_scaled(alone=True)
    factors = [1024, 1024, 512, 512, 512, 256, 256, 256, 512, 512]  # back at 2 and 5, up after three good
    assert decided == alone_decided == (factors, [step not in OVERFLOWS for step in range(10)], len(OVERFLOWS))
    assert norms == pytest.approx(alone_norms, rel=1e-4)
    assert apart(finals, alone) <= 1e-5
    assert all(map(same_everywhere, finals)), "replicas differ"


@pytest.mark.equality("precision")
@pytest.mark.on_ranks(2)
def test_half_precision_trains_near_float32_and_repeats_bit_for_bit():
    exact, _, decided = train_scaled(alone=True)
    for dtype, tolerance in ((torch.float16, 0.01), (torch.bfloat16, 0.05)):
        first, second = train_scaled(dtype), train_scaled(dtype)
        assert first[2][1] == decided[1]
        assert apart(first[0], second[0]) == 0.0
        assert apart(first[0], exact) < tolerance


@pytest.mark.on_ranks(3)
def test_an_overflow_on_one_rank_skips_on_all_though_no_gradient_was_averaged():
    """As with sharded gradients: each rank looks at its own, and no other rank can see the infinity."""
    for value in (float("inf"), float("nan"), -float("inf"), 8.0):
        fine = value == 8.0
        shard, scaler = nn.Parameter(torch.ones(5)), LossScaler(8.0)
        optimizer = torch.optim.SGD([shard], lr=1.0)
        shard.grad = torch.full((5,), value if dist.get_rank() == 1 else 8.0)
        assert calls_of(lambda scaler=scaler, args=(optimizer, [shard]): scaler.step(*args)) == [("all_reduce", 4)]
        scaler.update()
        assert (scaler.value, shard.tolist()) == ((8.0, [0.0] * 5) if fine else (4.0, [1.0] * 5))
    shard = nn.Parameter(torch.ones(1))
    shard.grad = torch.full((1,), float("inf")) if dist.get_rank() == 0 else None
    assert not LossScaler().unscale_([shard] if dist.get_rank() < 2 else []), "ranks without gradients join in"


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit():
    def go_on(model, masters, scaler, steps):
        for step in steps:
            inputs, targets = batch(step)
            masters.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(inputs.half()).float(), targets)).backward()
            scaler.step(masters, masters.parameters)
            scaler.update()

    def build():
        model = make_model(torch.float16)
        return model, MasterWeights(model.parameters(), make_sgd), LossScaler(2.0**10, interval=3)

    whole, first, second = build(), build(), build()
    go_on(*whole, range(9))
    go_on(*first, range(4))
    for new, old in zip(second[1:], first[1:], strict=True):
        new.load_state_dict(old.state_dict())
    go_on(*second, range(4, 9))
    assert second[2].state_dict() == whole[2].state_dict()
    assert all(map(torch.equal, second[1].parameters, whole[1].parameters))
    assert all(map(torch.equal, second[0].parameters(), whole[0].parameters()))


def test_scaling_brings_small_gradients_back_exactly():
    x = torch.full((1,), 2.0**-20, dtype=torch.float16)  # times 2**-8 is below float16's smallest number
    for factor, expected in ((1.0, 0.0), (2.0**12, 2.0**-28)):
        weight, scaler = half(), LossScaler(factor)
        masters = MasterWeights([weight], make_sgd)
        scaler.scale((weight * x).float().sum() * 2.0**-8).backward()
        masters.accumulate()
        assert scaler.unscale_(masters.parameters)
        assert masters.parameters[0].grad.item() == expected


def test_growth_stops_at_the_largest_factor_and_shrinking_says_what_is_wrong():
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    scaler = LossScaler(2.0**99, interval=1)
    for _ in range(3):
        scaler.step(make_sgd([weight]), [weight])
        scaler.update()
    assert scaler.value == 2.0**100
    weight.grad.fill_(float("nan"))
    scaler = LossScaler(2.0**-19)
    assert not scaler.step(make_sgd([weight]), [weight])
    scaler.update()
    assert not scaler.step(make_sgd([weight]), [weight])
    with pytest.raises(RuntimeError, match="not finite even with the loss scaled"):
        scaler.update()


def two_optimizers(ours, overflowed, unscaled, num_steps=3):
    """Return two weights and the factor after each step; in step 1 some gradients overflow, some are unscaled early."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([one], lr=1.0, momentum=0.5) for one in weights]
    scaler = LossScaler(2.0**10, interval=2) if ours else torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2)
    said = []
    for step in range(num_steps):
        losses = [one.sum() * (math.inf if step == 1 and at in overflowed else 1.0) for at, one in enumerate(weights)]
        for loss, optimizer in zip(scaler.scale(losses), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for at in unscaled:
            scaler.unscale_([weights[at]] if ours else optimizers[at])
            weights[at].grad *= 0.5
        for one, optimizer in zip(weights, optimizers, strict=True):
            scaler.step(optimizer, [one]) if ours else scaler.step(optimizer)
        scaler.update()
        said.append([*(one.item() for one in weights), scaler.value if ours else scaler.get_scale()])
    return said


def test_two_optimizers_of_one_scaler_step_and_skip_alone_as_under_torchs():
    some = ((), (0,), (1,), (0, 1))
    for overflowed, unscaled in product(some, (*some, (1, 0))):
        assert two_optimizers(True, overflowed, unscaled) == two_optimizers(False, overflowed, unscaled)
    table, scaler = nn.Embedding(5, 2, sparse=True), LossScaler(8.0)
    pair = {"both": (table(torch.tensor([1, 1, 2])).sum(), table(torch.tensor([2])).sum())}
    sum(scaler.scale(pair)["both"]).backward()
    assert scaler.unscale_(table.parameters())
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [2, 2], [0, 0], [0, 0]]


def uses(*names):
    """Use a scaler with a weight and its optimizer."""
    scaler, weight = LossScaler(), nn.Parameter(torch.zeros(1))
    weight.grad, optimizer = torch.ones(1), make_sgd([weight])
    calls = {"unscale": lambda: scaler.unscale_([weight]), "step": lambda: scaler.step(optimizer, [weight])}
    calls |= {"step of nothing": lambda: scaler.step(optimizer, []), "update": scaler.update}
    for name in names:
        calls[name]()


BAD = [
    (lambda: LossScaler().unscale_([half()]), "ValueError: .*MasterWeights"),
    (lambda: LossScaler().update(), "RuntimeError: .*before it"),
    (lambda: uses("unscale", "unscale"), "RuntimeError: .*unscaled before"),
    (lambda: uses("step", "unscale"), "RuntimeError: .*unscaled before"),
    (lambda: uses("step", "step"), r"RuntimeError: this optimizer has stepped since the last update\(\)"),
    (lambda: uses("step of nothing"), "ValueError: the optimizer updates 1 parameters more than were given"),
    (lambda: uses("unscale", "step", "update", "step", "update"), "no error"),
    (lambda: LossScaler().scale([torch.ones(1), {2}]), "ValueError: scale got a set; pass a tensor, or lists"),
    *((partial(LossScaler, **bad), "pass an initial") for bad in ({"initial": 0.0}, {"growth": 0.5}, {"interval": 0})),
    (lambda: LossScaler(backoff=1.0), "pass an initial"),
    (lambda: as_dtype("int8"), "not a floating type"),
    (lambda: autocast("float64"), "choose float16"),
    (lambda: MasterWeights([], make_sgd), "nothing to keep"),
    (lambda: masters().load_state_dict(masters(2).state_dict()), "load their own"),
    (lambda: all_reduce_in_float32(torch.zeros(2), op="max"), "pass sum or mean"),
    (lambda: all_reduce_in_float32(torch.zeros(2, 2).t()), "contiguous"),
]


def test_refusals():
    for call, words in BAD:
        assert re.search(words, message(call)), words


def values(rank, size, dtype):
    return torch.randn(size, generator=generator(3, rank, "values")).to(dtype)


@pytest.mark.equality("precision")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_sums_are_rounded_once_and_are_the_same_bits_on_every_rank(world_size):
    for dtype, op, size in product((torch.bfloat16, torch.float16), ("sum", "mean"), (1, 2, 7, 1000)):
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


@pytest.mark.on_ranks(3)
def test_the_hook_averages_in_float32_with_one_rounding():
    parts = [torch.randn(12, generator=generator(0, rank, "gradients")).bfloat16() for rank in range(3)]
    mine = parts[dist.get_rank()].clone()
    calls = calls_of(lambda: Float32Reduce().start(GradientBucket(0, mine, (mine,)), None).wait())
    assert torch.equal(mine, (sum(part.float() for part in parts) / 3).bfloat16())
    assert calls == [("all_to_all", 2 * 12), ("all_gather", 2 * 12 // 3)], "the bytes of a sum in half precision"
    assert isinstance(Float32Reduce(), GradientHook)


@pytest.mark.equality("precision")
@pytest.mark.parametrize("make", [make_sgd, partial(torch.optim.AdamW, lr=1e-3)])
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
    masters = MasterWeights([half], make_sgd)
    (master,) = masters.parameters
    for gradient in (256.0, 1.0, 1.0):
        half.grad = torch.full_like(half, gradient)
        masters.accumulate()
    assert master.grad.tolist() == [258.0] * 12
    assert (master.nbytes, master.grad.nbytes) == (4 * 12, 4 * 12)
    masters.step()
    masters.zero_grad()
    assert master.grad is None
