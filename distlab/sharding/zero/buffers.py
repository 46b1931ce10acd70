"""Buffers that gradients travel in, lent for as long as they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = tuple[torch.dtype, torch.device]


class Buffers:
    """Buffers that gradients travel in, used again and again: as many as are under way at once, and no more.

    Args:
        sizes: elements of the largest bucket of each dtype and device.
    """

    def __init__(self, sizes: Mapping[Kind, int]) -> None:
        self._sizes = sizes
        self._spare: dict[Kind, list[Tensor]] = {kind: [] for kind in sizes}
        self.made: list[Tensor] = []

    def lend(self, kind: Kind) -> Tensor:
        """Return a buffer; what it holds is of no use."""
        if self._spare[kind]:
            return self._spare[kind].pop()
        self.made.append(torch.empty(self._sizes[kind], dtype=kind[0], device=kind[1]))
        return self.made[-1]

    def take_back(self, buffer: Tensor) -> None:
        """Take a buffer that is not needed any more."""
        self._spare[buffer.dtype, buffer.device].append(buffer)

    def let_go(self) -> None:
        """Give the memory of all buffers that are not lent back to the system."""
        for spare in self._spare.values():
            self.made = [buffer for buffer in self.made if not any(buffer is one for one in spare)]
            spare.clear()
