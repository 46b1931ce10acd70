"""Codes of any width come back as they went, in as many bytes as they need."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.compression import pack_bits, unpack_bits


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), size=st.integers(1, 70), seed=st.integers(0, 1000))
def test_round_trip_and_size(bits, size, seed):
    codes = torch.randint(2**bits, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-size * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, size), codes)


def test_bits_lie_end_to_end_from_the_lowest_and_can_be_sent_as_they_are():
    for bits in range(1, 9):
        codes = torch.randint(2**bits, (19,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
        number = sum(code << (place * bits) for place, code in enumerate(codes.tolist()))
        packed = pack_bits(codes, bits)
        assert bytes(packed.tolist()) == number.to_bytes(-(-19 * bits // 8), "little")
        assert packed.is_contiguous()


def test_the_highest_codes_do_not_touch_their_neighbours():
    for bits in range(1, 9):
        codes = torch.tensor([2**bits - 1, 0] * 13, dtype=torch.uint8)
        assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, 26), codes)


def test_what_cannot_be_packed_is_refused():
    codes = torch.zeros(4, dtype=torch.uint8)
    for bits in (0, 9, 2.0, True):
        with pytest.raises(ValueError, match=f"bits is {bits}"):
            pack_bits(codes, bits)
    with pytest.raises(ValueError, match="codes has dtype int64"):
        pack_bits(codes.long(), 2)
    with pytest.raises(ValueError, match=r"shape \[2, 2\]"):
        pack_bits(codes.view(2, 2), 2)
    with pytest.raises(ValueError, match="2 bytes do not hold 9 codes of 2 bits; pass 3 bytes"):
        unpack_bits(torch.zeros(2, dtype=torch.uint8), 2, 9)
