"""Numbers of 8 bits: a type with few digits, and a scale that puts a tensor's largest magnitude at the type's largest.

float8_e4m3fn keeps 4 bits of precision up to 448, float8_e5m2 keeps 3 up to 57,344: below a 16th or a 2^14th of these
numbers they lose precision, and soon all. So a tensor is multiplied by a scale before it is cast. One scale for a
tensor wants its largest magnitude, which ranks that hold parts must agree on. One for each 32 neighbours (MX) is found
where they are, and costs a quarter of a bit a number.

Source: Micikevicius et al. 2022 (FP8 formats, 2209.05433); OCP Microscaling Formats (MX) 1.0, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.blocks.clip import NotFiniteError
from distlab.comm.agree import group_device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 32


def to_eight(tensor: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Multiply by a scale and round to 8 bits; what is past the type's largest becomes that; infinities are NaN.

    Shapes: tensor [...], scale [] or [..., blocks]; as the tensor
    """
    most, tensor = torch.finfo(dtype).max, tensor.float()
    return torch.where(tensor.isfinite(), _by_block(tensor, scale).clamp(-most, most), torch.nan).to(dtype)


def from_eight(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what 8-bit values stand for.

    Shapes: as `to_eight`
    """
    return _by_block(values.float(), 1 / scale).to(dtype)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that brings a largest magnitude to the type's; 1 where it is 0.

    Shapes: any -> the same
    """
    return torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0).clamp(max=2.0**126)


def largest_of(tensor: Tensor) -> Tensor:
    """Return the largest magnitude, 0 of no elements, NaN where one is.

    Shapes: any -> []
    """
    return tensor.detach().abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)


def block_scales(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scale for each 32 neighbours in the last dim: a power of two, so that it costs rounding nothing.

    Shapes: [..., K] -> [..., ceil(K / 32)]
    """
    short = -tensor.shape[-1] % BLOCK
    blocks = torch.nn.functional.pad(tensor.detach().float(), (0, short)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(torch.tensor(torch.finfo(dtype).max)).exponent - torch.frexp(largest).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 126)), 1.0)


def agree_on_largest(found: Tensor, group: ProcessGroup | None, names: Sequence[str] | None = None) -> Tensor:
    """Return the largest of all ranks' magnitudes, elementwise.

    Shapes: [k] float32; the same

    Cost: an all-reduce of 4 bytes each.

    Raises:
        NotFiniteError: one is NaN or infinite on some rank; raised on every rank.
    """
    told = torch.where(found.isfinite(), found, torch.inf).to(group_device(group))  # a maximum may pass over NaN
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    bad = told.isinf().nonzero().flatten().tolist()
    if bad:
        what = ", ".join(names[at] if names else f"tensor {at}" for at in bad[:3])
        raise NotFiniteError(
            f"rank {dist.get_rank(group)}: NaN or infinite on some rank: {what}; a scale for 8 bits wants a largest "
            "magnitude. Go back to a checkpoint, or skip the step that made it so"
        )
    return told.to(found.device)


def _by_block(tensor: Tensor, scale: Tensor) -> Tensor:
    if scale.ndim == 0:
        return tensor * scale
    return tensor * scale.repeat_interleave(BLOCK, -1)[..., : tensor.shape[-1]]
