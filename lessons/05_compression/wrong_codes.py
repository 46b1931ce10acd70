"""Wrong versions of packing, rounding, signs and thin factors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.compression import pack_bits, unpack_bits


def _packed(codes: Tensor, shifts: list[int]) -> Tensor:
    """Put codes into bytes, code i of a byte shifted by shifts[i]."""
    rows = codes.view(-1, len(shifts))
    packed = torch.zeros(len(rows), dtype=torch.uint8)
    for place, shift in enumerate(shifts):
        packed |= rows[:, place] << shift
    return packed


def _filled(codes: Tensor, per_byte: int) -> Tensor:
    return torch.cat([codes, codes.new_zeros(-codes.numel() % per_byte)])


def pack_highest_first(codes: Tensor, bits: int) -> Tensor:
    """Begin with the highest bits of a byte."""
    return _packed(_filled(codes, 8 // bits), list(range(8 - bits, -1, -bits)))


def pack_a_byte_each(codes: Tensor, bits: int) -> Tensor:
    """Leave each code its byte."""
    return codes.clone()


def pack_without_tail(codes: Tensor, bits: int) -> Tensor:
    """Cut off what fills no whole byte."""
    per_byte = 8 // bits
    whole = codes[: codes.numel() // per_byte * per_byte]
    return _packed(whole, list(range(0, 8, bits)))


def pack_by_place(codes: Tensor, bits: int) -> Tensor:
    """Shift by the place instead of by its bits."""
    return _packed(_filled(codes, 8 // bits), list(range(8 // bits)))


def pack_padded_in_front(codes: Tensor, bits: int) -> Tensor:
    """Fill up at the wrong end."""
    per_byte = 8 // bits
    full = torch.cat([codes.new_zeros(-codes.numel() % per_byte), codes])
    return _packed(full, list(range(0, 8, bits)))


def pack_in_place(codes: Tensor, bits: int) -> Tensor:
    """Use the caller's codes as room to work in."""
    rows = _filled(codes, 8 // bits).view(-1, 8 // bits)
    packed = _packed(rows.flatten(), list(range(0, 8, bits)))
    codes.zero_()
    return packed


def _encode(gradient: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, smallest value and step."""
    low = gradient.min()
    step = (gradient.max() - low) / (2**bits - 1)
    codes = ((gradient - low) / step).round() if step > 0 else torch.zeros_like(gradient)
    return codes.to(torch.uint8), low, step


def _exchange(codes: Tensor, low: Tensor, step: Tensor, bits: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return every rank's codes, smallest value and step."""
    size = codes.numel()
    payload = torch.cat([torch.stack([low, step]).view(torch.uint8), pack_bits(codes, bits)])
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    dist.all_gather(payloads, payload)
    numbers = [theirs[:8].view(torch.float32) for theirs in payloads]
    return [
        (unpack_bits(theirs[8:], bits, size), low, step) for theirs, (low, step) in zip(payloads, numbers, strict=True)
    ]


def _mean(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) / dist.get_world_size()


def quantize_cut_off(gradient: Tensor, bits: int) -> Tensor:
    """Cut off instead of rounding."""
    low = gradient.min()
    step = (gradient.max() - low) / (2**bits - 1)
    codes = (gradient - low) / step if step > 0 else torch.zeros_like(gradient)
    coded = _exchange(codes.to(torch.uint8), low, step, bits)
    return _mean([low + step * codes for codes, low, step in coded])


def quantize_zero_step(gradient: Tensor, bits: int) -> Tensor:
    """Divide by a step of zero."""
    low = gradient.min()
    step = (gradient.max() - low) / (2**bits - 1)
    exact = (gradient - low) / step
    coded = _exchange(exact.round().nan_to_num().to(torch.uint8), low, step, bits)
    return _mean([low + step * codes + 0 * exact for codes, low, step in coded])


def quantize_int8(gradient: Tensor, bits: int) -> Tensor:
    """Read codes of 0 to 255 as signed bytes."""
    coded = _exchange(*_encode(gradient, bits), bits)
    return _mean([low + step * codes.to(torch.int8) for codes, low, step in coded])


def quantize_wrong_sign(gradient: Tensor, bits: int) -> Tensor:
    """Subtract the smallest value a second time."""
    coded = _exchange(*_encode(gradient, bits), bits)
    return _mean([step * codes - low for codes, low, step in coded])


def quantize_sums_codes(gradient: Tensor, bits: int) -> Tensor:
    """Sum codes that mean different values."""
    codes, low, step = _encode(gradient, bits)
    total = codes.float()
    dist.all_reduce(total)
    return low + step * total / dist.get_world_size()


def quantize_own_step(gradient: Tensor, bits: int) -> Tensor:
    """Decode everybody's codes with this rank's own numbers."""
    own_codes, low, step = _encode(gradient, bits)
    return _mean([low + step * codes for codes, _, _ in _exchange(own_codes, low, step, bits)])


def quantize_unpacked(gradient: Tensor, bits: int) -> Tensor:
    """Send a byte a code."""
    coded = _exchange(*_encode(gradient, bits), 8)
    return _mean([low + step * codes for codes, low, step in coded])


def _signs(gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return every rank's bits and magnitude."""
    payload = torch.cat(
        [gradient.abs().mean().view(1).view(torch.uint8), pack_bits((gradient >= 0).to(torch.uint8), 1)]
    )
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    dist.all_gather(payloads, payload)
    return [(unpack_bits(theirs[4:], 1, gradient.numel()), theirs[:4].view(torch.float32)) for theirs in payloads]


def signs_of_bits(gradient: Tensor) -> Tensor:
    """Take a bit of 0 for 0."""
    return _mean([magnitude * ones for ones, magnitude in _signs(gradient)])


def signs_own_magnitude(gradient: Tensor) -> Tensor:
    """Use this rank's magnitude for all."""
    return _mean([gradient.abs().mean() * (2 * ones.float() - 1) for ones, _ in _signs(gradient)])


def signs_majority(gradient: Tensor) -> Tensor:
    """Let the ranks vote."""
    everyone = _signs(gradient)
    votes = torch.stack([2 * ones.float() - 1 for ones, _ in everyone]).sum(0)
    return torch.where(votes >= 0, 1.0, -1.0) * _mean([magnitude for _, magnitude in everyone])


def signs_unpacked(gradient: Tensor) -> Tensor:
    """Send a whole number a sign."""
    total = gradient.abs().mean() * torch.where(gradient >= 0, 1.0, -1.0) / dist.get_world_size()
    dist.all_reduce(total)
    return total


def signs_sum(gradient: Tensor) -> Tensor:
    """Forget to divide."""
    return torch.stack([magnitude * (2 * ones.float() - 1) for ones, magnitude in _signs(gradient)]).sum(0)


def _all_mean(tensor: Tensor) -> Tensor:
    tensor = (tensor / dist.get_world_size()).contiguous()
    dist.all_reduce(tensor)
    return tensor


def low_rank_alone(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Never communicate."""
    p = torch.linalg.qr(gradient @ q).Q
    q = gradient.T @ p
    return p @ q.T, q


def low_rank_first_factor_only(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Communicate the first factor only."""
    p = torch.linalg.qr(_all_mean(gradient @ q)).Q
    q = gradient.T @ p
    return p @ q.T, q


def low_rank_both_orthogonal(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Make both factors orthonormal."""
    p = torch.linalg.qr(_all_mean(gradient @ q)).Q
    q = torch.linalg.qr(_all_mean(gradient.T @ p)).Q
    return p @ q.T, q


def low_rank_not_orthogonal(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Leave the first factor as it comes."""
    p = _all_mean(gradient @ q)
    q = _all_mean(gradient.T @ p)
    return p @ q.T, q


def low_rank_too_early(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Make the first factor orthonormal before it is averaged."""
    p = _all_mean(torch.linalg.qr(gradient @ q).Q)
    q = _all_mean(gradient.T @ p)
    return p @ q.T, q


def low_rank_cold(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Hand back the factor that came in."""
    p = torch.linalg.qr(_all_mean(gradient @ q)).Q
    return p @ _all_mean(gradient.T @ p).T, q


def low_rank_of_everything(gradient: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Average the matrix, then factor it."""
    mean = _all_mean(gradient)
    p = torch.linalg.qr(mean @ q).Q
    q = mean.T @ p
    return p @ q.T, q
