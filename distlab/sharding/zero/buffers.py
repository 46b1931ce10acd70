"""Buffers that gradients travel in, lent for as long as they do."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = tuple[torch.dtype, torch.device]


class Buffers:
    """Buffers that gradients travel in, used again and again: as many as are under way at once, and no more.

    Attributes:
        made: all of them, lent or not.
    """

    def __init__(self) -> None:
        self._sizes: dict[Kind, int] = {}
        self._spare: dict[Kind, list[Tensor]] = {}
        self.made: list[Tensor] = []

    def add(self, kind: Kind, size: int) -> None:
        """Announce how many elements a bucket of this dtype and device will need; call it before anything is lent."""
        self._sizes[kind] = max(self._sizes.get(kind, 0), size)
        self._spare.setdefault(kind, [])

    def lend(self, kind: Kind) -> Tensor:
        """Return a buffer; what it holds is of no use."""
        if self._spare[kind]:
            return self._spare[kind].pop()
        self.made.append(torch.empty(self._sizes[kind], dtype=kind[0], device=kind[1]))
        return self.made[-1]

    def take_back(self, buffer: Tensor) -> None:
        """Take a buffer that is not needed any more."""
        self._spare[buffer.dtype, buffer.device].append(buffer)

    def free(self) -> None:
        """Free the memory of all buffers that are not lent."""
        for spare in self._spare.values():
            self.made = [buffer for buffer in self.made if not any(buffer is one for one in spare)]
            spare.clear()


class Lent(NamedTuple):
    """Where all buckets of a model get their buffers.

    Attributes:
        gradients: for gradients that travel, until they are summed.
        landings: for other ranks' parts, until they are added up.
    """

    gradients: Buffers
    landings: Buffers
