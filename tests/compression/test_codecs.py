"""Codecs: quantized within a step and right on average, the largest or any elements, codes of any width in bits."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.compression import dequantize, pack_bits, quantize, random_indices, scatter, sign, top_k, unpack_bits
from distlab.compression.quantize import BLOCK, two_means

SIZES = st.sampled_from([1, 2, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
DTYPES = st.sampled_from([torch.float32, torch.float64])


def some(size, seed, dtype=torch.float32, scale=1.0, shift=0.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale + shift


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
    ranges = torch.cat([(block.max() - block.min()).expand(len(block)) for block in vector.split(BLOCK)])
    step = ranges / (2**bits - 1)
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


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=40), data=st.data())
def test_nothing_left_out_is_larger_than_anything_kept(values, data):
    vector = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(1, len(values)))
    indices, kept = top_k(vector, k)
    assert indices.tolist() == sorted(set(indices.tolist()))
    assert len(indices) == k
    assert torch.equal(vector[indices], kept)
    rest = scatter(indices, torch.zeros_like(kept), len(values)) + vector
    rest[indices] = 0
    assert rest.abs().max() <= kept.abs().min()
    assert torch.equal(scatter(indices, kept, len(values)) + rest, vector)


def test_a_long_vector_is_searched_as_exactly_as_a_short_one():
    """Also equal elements, a period that the sample of the search sees alone, and what is not finite."""
    periodic = torch.zeros(64 * 2000)
    periodic[::64], periodic[5] = 1.0, 2.0
    for vector in (some(100_000, 0), some(100_000, 0).pow(9), torch.ones(100_000), periodic):
        for k in (1, 10, 1000, 99_999):
            _, kept = top_k(vector, k)
            assert torch.equal(kept.abs().sort().values, vector.abs().sort().values[-k:])
    for value, place in product((float("nan"), float("inf")), (0, 64, 70, 99_999)):
        vector = some(100_000, 0)
        vector[place] = value
        assert place in top_k(vector, 100)[0].tolist()


def test_random_indices_are_different_sorted_repeat_and_all_are_as_likely():
    for size, k in [(1, 1), (10, 10), (10, 3), (100_000, 1000), (1000, 240)]:
        first, second = (random_indices(size, k, torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)
        assert first.tolist() == sorted(set(first.tolist()))
        assert (len(first), first[0] >= 0, first[-1] < size) == (k, True, True)
    for size, k in [(50, 5), (8, 4)]:  # both ways of drawing
        generator, counts, draws = torch.Generator().manual_seed(0), torch.zeros(size), 2000
        for _ in range(draws):
            counts[random_indices(size, k, generator)] += 1
        share = k / size
        assert (counts - draws * share).abs().max() < 4.5 * (draws * share * (1 - share)) ** 0.5


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_codes_lie_end_to_end_from_the_lowest_bit_and_come_back(bits, size, seed):
    codes = torch.randint(2**bits, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    number = sum(code << (place * bits) for place, code in enumerate(codes.tolist()))
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()) == number.to_bytes(-(-size * bits // 8), "little")
    assert packed.is_contiguous(), "it can be sent as it is"
    assert torch.equal(unpack_bits(packed, bits, size), codes)


ONES, CODES = torch.ones(3), torch.zeros(4, dtype=torch.uint8)
BAD = [
    *((partial(pack_bits, CODES, bits), f"bits is {bits}") for bits in (0, 9, 2.0, True)),
    (lambda: pack_bits(CODES.long(), 2), "codes has dtype int64"),
    (lambda: pack_bits(CODES.view(2, 2), 2), r"shape \[2, 2\]"),
    (lambda: unpack_bits(CODES[:2], 2, 9), "2 bytes do not hold 9 codes of 2 bits; pass 3 bytes"),
    *((partial(quantize, ONES, bits), f"bits is {bits}") for bits in (0, 9, 1.5)),
    (lambda: quantize(ONES.view(1, 3), 4), r"shape \[1, 3\] and dtype float32"),
    (lambda: quantize(ONES.half(), 4), "dtype float16"),
    *((partial(top_k, ONES, k), f"k is {k}; pass how many of 3") for k in (0, 4, 2.0, True)),
    (lambda: random_indices(4, 5, torch.Generator()), "k is 5"),
    (lambda: top_k(torch.ones(2, 2), 1), r"the vector has shape \[2, 2\]"),
]


def test_what_cannot_be_is_refused():
    for call, words in BAD:
        with pytest.raises(ValueError, match=words):
            call()
