"""Numbers of 8 bits: what a scale keeps, products of rounded operands, and a scale on which ranks agree."""

import math

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, same_everywhere
from refused import message
from torch import nn

from distlab.blocks.eight_bits import (
    BLOCK,
    E4M3,
    E5M2,
    agree_on_largest,
    block_scales,
    from_eight,
    largest_of,
    scale_of,
    to_eight,
)
from distlab.blocks.models import GPT, GPTConfig
from distlab.precision import DelayedScale, EightBitLinear, agree_on_scales, autocast, to_eight_bits
from distlab.sharding import ByTensor


def cast(tensor, dtype, scale):
    return from_eight(to_eight(tensor, dtype, scale), scale, tensor.dtype)


WIDE = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]


@pytest.mark.parametrize(("dtype", "step"), [(E4M3, 1 / 16), (E5M2, 1 / 8)])
def test_numbers_come_back_within_the_types_precision(dtype, step):
    for scale in (scale_of(largest_of(WIDE), dtype), block_scales(WIDE, dtype)):
        back = cast(WIDE, dtype, scale)
        held = WIDE.abs() * (scale if scale.ndim == 0 else scale.repeat_interleave(BLOCK, 1)[:, :100])
        normal = held >= torch.finfo(dtype).smallest_normal
        off = (back - WIDE).abs() / WIDE.abs()
        past = held > torch.finfo(dtype).max  # with powers of two the largest may pass over the type's, by 1/8 at most
        assert off[normal & ~past].max() <= step
        assert not past.any() or off[past].max() <= 1 / 8
    one, blocks = (cast(WIDE, dtype, s) for s in (scale_of(largest_of(WIDE), dtype), block_scales(WIDE, dtype)))
    small = slice(0, 2)  # rows a million times smaller than the last one
    assert (blocks - WIDE)[small].norm() < (one - WIDE)[small].norm()


def test_what_a_type_has_comes_back_exactly_and_zeros_stay():
    grid = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    grid = grid[grid.isfinite()]
    assert torch.equal(cast(grid, E4M3, torch.tensor(1.0)), grid)
    blocks = torch.cat([grid, torch.zeros(70)])  # 3 blocks of zeros, the last one short
    assert torch.equal(cast(blocks, E4M3, block_scales(blocks, E4M3))[-70:], torch.zeros(70))
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = torch.cat([blocks, torch.tensor([bad])])
        assert all(cast(spoilt, E4M3, one)[-1].isnan() for one in (torch.tensor(1.0), block_scales(spoilt, E4M3)))
    assert block_scales(blocks, E4M3).log2().remainder(1).eq(0).all()
    for empty in (torch.zeros(3, 4), torch.zeros(0, 4)):
        assert cast(empty, E4M3, scale_of(largest_of(empty), E4M3)).eq(0).all()
    assert cast(torch.tensor([1e9]), E4M3, torch.tensor(1.0)).item() == 448


@pytest.mark.parametrize("scaling", ["tensor", "block", "delayed"])
def test_a_layer_multiplies_rounded_operands_forward_and_back(scaling):
    torch.manual_seed(0)
    plain = nn.Linear(40, 24)
    layer = EightBitLinear(plain, scaling)
    x = torch.randn(2, 9, 40, requires_grad=True)
    wanted_gradient = torch.randn(2, 9, 24)
    layer(x).backward(wanted_gradient)

    def rounded(tensor, dtype):
        return cast(
            tensor, dtype, block_scales(tensor, dtype) if scaling == "block" else scale_of(largest_of(tensor), dtype)
        )

    flat, g, w = x.detach().reshape(18, 40), wanted_gradient.reshape(18, 24), plain.weight.detach()
    torch.testing.assert_close(layer(x).detach().reshape(18, 24), rounded(flat, E4M3) @ rounded(w, E4M3).T + plain.bias)
    if scaling == "block":
        to_x = rounded(g, E5M2) @ rounded(w.T.contiguous(), E4M3).T
        to_w = rounded(g.T.contiguous(), E5M2) @ rounded(flat.T.contiguous(), E4M3).T
    else:
        to_x, to_w = rounded(g, E5M2) @ rounded(w, E4M3), rounded(g, E5M2).T @ rounded(flat, E4M3)
    torch.testing.assert_close(x.grad.reshape(18, 40), to_x)
    torch.testing.assert_close(plain.weight.grad, to_w)
    assert 0 < (x.grad.reshape(18, 40) - g @ w).norm() / (g @ w).norm() < 0.1
    plain.weight.grad = None
    with autocast("bfloat16"):
        made = layer(x)
    made.backward(wanted_gradient.to(torch.bfloat16))
    assert made.dtype == torch.bfloat16
    assert (plain.weight.grad - to_w).norm() / to_w.norm() < 0.05


def test_a_delayed_scale_is_of_earlier_steps_and_what_grows_saturates():
    scale = DelayedScale(length=2)
    found = [float(448 / scale(torch.tensor([-value, 0.5]), E4M3)) for value in (2, 1, 8, 1, 1, math.inf, 1)]
    assert found == pytest.approx([2.0, 2.0, 2.0, 8.0, 8.0, 1.0, 1.0])
    layer = EightBitLinear(nn.Linear(4, 2), "delayed")
    layer(torch.ones(1, 4))
    assert torch.equal(layer.rounded(0, 10 * torch.ones(1, 4)), torch.ones(1, 4))


def test_a_model_is_converted_but_for_its_head():
    model = to_eight_bits(GPT(GPTConfig(context=8, num_layers=2, hidden_size=16, num_heads=2)), "block")
    kinds = {name: type(one) for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    assert kinds.pop("output") is nn.Linear
    assert len(kinds) == 8
    assert set(kinds.values()) == {EightBitLinear}
    assert "tensor, delayed, block" in message(to_eight_bits, model, "row")
    twice = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    assert [type(one) for one in to_eight_bits(twice)] == [EightBitLinear] * 2


@pytest.mark.on_ranks(3)
def test_ranks_agree_on_scales_and_hear_of_nan():
    rank = dist.get_rank()
    layers = nn.Sequential(*(EightBitLinear(nn.Linear(4, 4), "delayed") for _ in range(2)))
    layers(torch.ones(2, 4) * (rank + 1)).sum().backward()
    told = calls_of(lambda: agree_on_scales(layers))
    assert told == [("all_reduce", 4 * 3 * 2)]
    histories = [one.history for one in layers.modules() if isinstance(one, DelayedScale)]
    assert histories[0][-1] == 3
    assert same_everywhere(torch.stack(histories))
    histories[1][-1] = math.inf if rank == 1 else rank
    assert "infinite on some rank: 0.scales.1;" in message(agree_on_scales, layers)
    assert same_everywhere(torch.stack(histories)), "also if the step is skipped"
    for bad in (math.nan, math.inf):
        text = message(agree_on_largest, torch.tensor([1.0, bad if rank == 1 else 2.0]), None, ["first", "second"])
        assert text.startswith(f"NotFiniteError: rank {rank}: NaN or infinite on some rank: second;"), text


class Rounded(nn.Module):
    """One process: each linear weight as 8 bits have it in forward; its gradient is that of the weight."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given):
        weights = {f"{n}.weight": m.weight for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        as_used = {}
        for name, one in weights.items():
            held = cast(one.detach(), E4M3, scale_of(largest_of(one), E4M3))
            as_used[name] = one + (held - one).detach()
        return torch.func.functional_call(self.model, as_used, given)


def build():
    return GPT(
        GPTConfig(vocab_size=31, context=6, num_layers=2, num_heads=2, hidden_size=10, tied=False),
        torch.Generator().manual_seed(0),
    )


def train(wrapped, parameters, clip=None):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(4):
        tokens = torch.randint(31, (2, 4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        GPT.loss(wrapped(tokens[0]), tokens[1]).backward()
        optimizer.step()


@pytest.mark.on_ranks(4)
def test_a_gather_in_eight_bits_trains_as_one_process_with_rounded_weights():
    alone, model = build(), build()
    train(Rounded(alone), alone.parameters())
    sharded = ByTensor(model, eight_bits=True)
    train(sharded, sharded.parameters())
    torch.testing.assert_close(sharded.full_state(), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    unit = sharded.units[1]
    exact = [one.clone() for one in unit.gather(exactly=True)]
    sent = calls_of(unit.gather)
    rows = [-(-len(one) // 4) * one[0].numel() for one in exact]
    num_bytes = sum(size if at in unit.in_eight else 4 * size for at, size in enumerate(rows))
    assert sent[0] == ("all_reduce", 4 * len(unit.in_eight))
    assert sent[1:] == [("all_gather", num_bytes)]
    assert all(same_everywhere(one.contiguous()) for one in unit.gather())
    assert [
        at for at, (a, b) in enumerate(zip(exact, unit.gather(), strict=True)) if not torch.equal(a, b)
    ] == unit.in_eight
    with torch.no_grad():
        if dist.get_rank() == 2:
            unit.parts[unit.in_eight[0]].fill_(torch.nan)
    assert "NaN or infinite on some rank: blocks.0" in message(unit.gather)
