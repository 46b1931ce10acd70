"""How values are combined: torch's own arithmetic, always in the order of ranks, so that all ranks get equal bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.comm.shared_memory.dense import unseen

_Combine = Callable[..., torch.Tensor]


class ReduceOperation(NamedTuple):
    """A ReduceOp.

    Attributes:
        name: its plain name, such as "sum".
        combine: the function of two values.
        divides: whether the result is divided by the number of ranks.
    """

    name: str
    combine: _Combine
    divides: bool = False

    def of(self, values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine one value of each rank into `out`, which may be none of them."""
        combine = self.combine
        if len(values) == 1:
            out.copy_(values[0])
        else:
            combine(values[0], values[1], out=out)
        for value in values[2:]:
            combine(out, value, out=out)
        if self.divides:  # whole numbers lose what is behind the point, as in C++
            has_point = out.is_floating_point() or out.is_complex()
            out.div_(len(values), rounding_mode=None if has_point else "trunc")


_TABLE = {
    "SUM": ReduceOperation("sum", torch.add),
    "AVG": ReduceOperation("avg", torch.add, divides=True),
    "PRODUCT": ReduceOperation("product", torch.mul),
    "MIN": ReduceOperation("min", torch.minimum),
    "MAX": ReduceOperation("max", torch.maximum),
    "BAND": ReduceOperation("band", torch.bitwise_and),
    "BOR": ReduceOperation("bor", torch.bitwise_or),
    "BXOR": ReduceOperation("bxor", torch.bitwise_xor),
}
_BY_OP = {int(getattr(dist.ReduceOp, name)): reduction for name, reduction in _TABLE.items()}


def reduction_of(op: Any, dtype: torch.dtype, who: str) -> ReduceOperation:
    """Return how to combine values of a dtype.

    Raises:
        ValueError: the operation is unknown, or has no meaning for the dtype.
    """
    found = _BY_OP.get(int(op))
    if found is None:
        raise ValueError(f"{who}: got {op}; pass ReduceOp.{', '.join(_TABLE)}")
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    if found.name in ("band", "bor", "bxor") and not is_whole:
        raise ValueError(f"{who}: ReduceOp.{found.name.upper()} is for whole numbers and bool, got {dtype}")
    if found.name in ("min", "max") and dtype.is_complex:
        raise ValueError(f"{who}: ReduceOp.{found.name.upper()} needs an order, and {dtype} has none")
    if reason := _why_not(found, dtype):
        raise ValueError(
            f"{who}: torch has no ReduceOp.{found.name.upper()} of {dtype} on the CPU ({reason}); convert the tensor "
            "first"
        )
    return found


@functools.cache
def _why_not(reduction: ReduceOperation, dtype: torch.dtype) -> str:
    """Return why torch's arithmetic refuses values of a dtype, or ""."""
    with unseen():
        try:
            one, other, out = (torch.zeros(1, device="cpu").to(dtype) for _ in range(3))
            reduction.of([one, other], out)
        except RuntimeError as error:  # torch's NotImplementedError is one
            return str(error).splitlines()[0]
    return ""
