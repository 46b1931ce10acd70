"""Codes of 1 to 7 bits laid end to end: three bits per element cost three bits on the wire, not eight.

Eight codes, a byte each, are one 64-bit word; eight codes of `bits` bits are `bits` bytes. Packing closes the gaps in
three rounds, each on all words at once: pairs of bytes, pairs of pairs, then the two halves. For 3 bits, from low to
high:

    a....... b....... c....... d.......      bytes: 3 bits used, 5 free
    ab.............. cd..............        16-bit lanes: 6 used
    abcd............................         32-bit lanes: 12 used

so a word of eight codes costs fifteen integer operations, whatever the bits. Unpacking walks back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.plan.compression import checked, packed_bytes

CODES_PER_WORD = 8
# (width of a lane that is merged with its neighbour, mask of every second such lane), narrow to wide
_ROUNDS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Lay codes end to end, the first in the lowest bits of the first byte.

    Shapes: codes [E] uint8, each below 2**bits -> [ceil(E bits / 8)] uint8; the rest of the last byte is zero

    Raises:
        ValueError: bits outside 1 to 8, or codes that are not a flat tensor of uint8.
    """
    checked("bits", bits)
    _check_bytes("codes", codes)
    size = codes.numel()
    if bits == 8:
        return codes.clone()
    words = _as_words(codes, CODES_PER_WORD)
    for lane, (width, mask) in enumerate(_ROUNDS):
        odd = words >> width
        odd &= mask
        odd <<= bits << lane  # next to its even neighbour, which uses that many bits
        words &= mask
        words |= odd
    return _low_bytes(words, bits)[: packed_bytes(size, bits)]


def unpack_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return `size` codes that `pack_bits` laid end to end.

    Shapes: packed [ceil(E bits / 8)] uint8 -> [E] uint8

    Raises:
        ValueError: bits outside 1 to 8, or a number of bytes that does not hold `size` codes.
    """
    checked("bits", bits)
    _check_bytes("packed", packed)
    if packed.numel() != packed_bytes(size, bits):
        raise ValueError(
            f"{packed.numel()} bytes do not hold {size} codes of {bits} bits; pass {packed_bytes(size, bits)} bytes"
        )
    if bits == 8:
        return packed.clone()
    words = _as_words(packed, bits)
    for lane, (width, mask) in reversed(list(enumerate(_ROUNDS))):
        used = bits << lane
        odd = words >> used
        words &= _lanes(mask, used)
        odd &= _lanes(mask, used)
        odd <<= width
        words |= odd
    return words.view(torch.uint8)[:size]


def _lanes(mask: int, used: int) -> int:
    """Keep the low `used` bits of each of the mask's lanes."""
    lowest_bits = mask & ~(mask << 1)  # a one at the foot of each lane
    return lowest_bits * ((1 << used) - 1)


def _as_words(data: Tensor, bytes_per_word: int) -> Tensor:
    """Copy each `bytes_per_word` bytes to the low bytes of a 64-bit word of their own; the last may get fewer."""
    num_words = -(-data.numel() // bytes_per_word)
    words = torch.zeros(num_words, dtype=torch.int64, device=data.device)
    rows = words.view(torch.uint8).view(num_words, 8)
    whole = data.numel() // bytes_per_word
    rows[:whole, :bytes_per_word] = data[: whole * bytes_per_word].view(whole, bytes_per_word)
    if whole < num_words:
        rest = data[whole * bytes_per_word :]
        rows[whole, : rest.numel()] = rest
    return words


def _low_bytes(words: Tensor, num_bytes: int) -> Tensor:
    """Return the low bytes of every word, end to end."""
    return words.view(torch.uint8).view(-1, 8)[:, :num_bytes].contiguous().view(-1)


def _check_bytes(name: str, data: Tensor) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(
            f"{name} has dtype {str(data.dtype).removeprefix('torch.')} and shape {list(data.shape)}; "
            "expected uint8 and one dimension"
        )
