"""Quantization: errors within a step, right on average, and nothing special about constant blocks."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.compression import dequantize, quantize, sign
from distlab.compression.quantize import BLOCK, two_means

SIZES = st.sampled_from([1, 2, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
DTYPES = st.sampled_from([torch.float32, torch.float64])


def some(size, seed, dtype=torch.float32, scale=1.0, shift=0.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale + shift


def ranges(vector):
    return torch.cat([(block.max() - block.min()).expand(len(block)) for block in vector.split(BLOCK)])


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(1, 8),
    size=SIZES,
    dtype=DTYPES,
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e30]),
    shift=st.sampled_from([0.0, 1.0, -1000.0]),
    stochastic=st.booleans(),
)
def test_errors_are_within_a_step(bits, size, dtype, seed, scale, shift, stochastic):
    vector = some(size, seed, dtype, scale, shift)
    generator = torch.Generator().manual_seed(seed) if stochastic else None
    quantized = quantize(vector, bits, generator)
    assert quantized.packed.numel() == -(-size * bits // 8)
    assert quantized.lows.numel() == quantized.steps.numel() == -(-size // BLOCK)
    step = ranges(vector) / (2**bits - 1)
    rounding = 8 * torch.finfo(dtype).eps * vector.abs().max()
    error = (dequantize(quantized) - vector).abs()
    assert (error <= step * (1.0001 if stochastic else 0.5001) + rounding).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_constant_blocks_are_exact_and_the_ends_of_a_range_never_overflow_a_code(bits):
    """A code one too high wraps to zero, and the largest gradient becomes the smallest."""
    for value in (0.0, 1.5, -3e-38, 1e38):
        vector = torch.full((2 * BLOCK + 3,), value)
        assert torch.equal(dequantize(quantize(vector, bits)), vector)
        assert torch.equal(dequantize(quantize(vector, bits, torch.Generator())), vector)
    for seed in range(20):
        vector = some(8 * BLOCK, seed)
        largest = vector.argmax()
        for generator in (None, torch.Generator().manual_seed(seed)):
            decoded = dequantize(quantize(vector, bits, generator))[largest].item()
            assert decoded == pytest.approx(vector[largest].item(), rel=1e-4)


@pytest.mark.parametrize("bits", [1, 3])
def test_stochastic_rounding_is_right_on_average(bits):
    num_draws = 600
    vector = some(512, 1, torch.float64)  # two of it fill a block, so all blocks have one range
    drawn = dequantize(quantize(vector.repeat(num_draws), bits, torch.Generator().manual_seed(2)))
    mean = drawn.view(num_draws, -1).mean(dim=0)
    step = (vector.max() - vector.min()) / (2**bits - 1)
    assert (mean - vector).abs().max() < 4.5 * 0.5 * step / num_draws**0.5  # a draw deviates by half a step at most
    nearest = dequantize(quantize(vector, bits))
    assert (nearest - vector).abs().max() > 0.4 * step  # which to the nearest level it is not


@settings(max_examples=40, deadline=None)
@given(size=SIZES, dtype=DTYPES, seed=st.integers(0, 1000))
def test_sign_keeps_signs_and_mean_sizes(size, dtype, seed):
    vector = some(size, seed, dtype)
    decoded = dequantize(sign(vector))
    assert torch.equal(decoded >= 0, vector >= 0)
    for block, original in zip(decoded.split(BLOCK), vector.split(BLOCK), strict=True):
        assert torch.allclose(block.abs(), original.abs().mean().expand(len(block)), rtol=1e-5)
    assert torch.equal(dequantize(sign(torch.zeros(size, dtype=dtype))), torch.zeros(size, dtype=dtype))


@settings(max_examples=40, deadline=None)
@given(size=SIZES, dtype=DTYPES, seed=st.integers(0, 1000), power=st.sampled_from([1, 9]))
def test_two_means_leave_less_than_there_was(size, dtype, seed, power):
    vector = some(size, seed, dtype, shift=0.1).pow(power)
    decoded = dequantize(two_means(vector))
    for block, original in zip(decoded.split(BLOCK), vector.split(BLOCK), strict=True):
        assert len(set(block.tolist())) <= 2
        assert (block - original).norm() <= original.norm() * (1 + 1e-6)
        assert (block.mean() - original.mean()).abs() <= 1e-5 * original.abs().max()
    constant = torch.full((size,), -0.75, dtype=dtype)
    assert torch.equal(dequantize(two_means(constant)), constant)


def test_what_is_not_finite_shows_in_the_steps():
    for value in (float("nan"), float("inf"), float("-inf")):
        vector = some(3 * BLOCK, 0)
        vector[BLOCK + 5] = value
        for quantized in (quantize(vector, 4), sign(vector), two_means(vector)):
            assert quantized.steps.isfinite().tolist() == [True, False, True]


def test_bad_arguments_are_refused():
    ones = torch.ones(3)
    for vector, bits, words in [
        *((ones, bits, f"bits is {bits}") for bits in (0, 9, 1.5)),
        (ones.view(1, 3), 4, r"shape \[1, 3\] and dtype float32"),
        (ones.half(), 4, "dtype float16"),
    ]:
        with pytest.raises(ValueError, match=words):
            quantize(vector, bits)
