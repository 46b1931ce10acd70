"""Half precision as torch has it: the types, their names in a plan, and autocast."""

from __future__ import annotations

import torch

from distlab.blocks.gradients.flat_gradients import HALF as HALF


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return torch's type of a name such as "bfloat16", as plans write it; a type is itself.

    Raises:
        ValueError: torch has no floating type of that name.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a floating type; choose float32, bfloat16, float16 or float64")
    return dtype


def autocast(dtype: str | torch.dtype, device_type: str = "cpu") -> torch.autocast:
    """Run what gains from it (matrix products, attention) in half precision and the rest in float32, in a `with` block.

    Put forward and loss inside; backward runs in the types that forward chose. Parameters stay float32 and so do their
    gradients, so ranks average and update as ever. float32 changes nothing.

    Raises:
        ValueError: the type is not float16, bfloat16 or float32.
    """
    dtype = as_dtype(dtype)
    if dtype not in (*HALF, torch.float32):
        raise ValueError(f"autocast to {dtype}; choose float16, bfloat16, or float32 (none)")
    enabled = dtype in HALF
    return torch.autocast(device_type, dtype=dtype if enabled else None, enabled=enabled)
