"""Codes of any width come back as they went, in as many bytes as they need."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from distlab.compression import pack_bits, unpack_bits


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


def test_what_cannot_be_packed_is_refused():
    codes = torch.zeros(4, dtype=torch.uint8)
    for call, words in [
        *((lambda bits=bits: pack_bits(codes, bits), f"bits is {bits}") for bits in (0, 9, 2.0, True)),
        (lambda: pack_bits(codes.long(), 2), "codes has dtype int64"),
        (lambda: pack_bits(codes.view(2, 2), 2), r"shape \[2, 2\]"),
        (lambda: unpack_bits(codes[:2], 2, 9), "2 bytes do not hold 9 codes of 2 bits; pass 3 bytes"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
