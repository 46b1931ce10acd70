"""A loader at its plainest: a mapped file, one number, and a slice.

- A file of tokens is mapped into memory: the system reads a page when it is touched, and drops it when memory is short.
- The order of samples is a function of (seed, epoch). Which ones a step takes is a function of one number, the
  *position*: the samples that all ranks together have used up. A checkpoint holds it and nothing else.
- A rank takes its slice of the batch that one process would take whole: also on more ranks or fewer after a resume.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distlab.blocks.data import SampleOrder, rank_slice


class PlainLoader:
    """Batches of a file of 16-bit tokens, without end: `next(loader)`; set its `position` to go on there.

    A sample is `context` tokens and the one behind them, the last target. `batch_size` counts those of all ranks.
    """

    def __init__(self, path: str | Path, context: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self._tokens, self._context = np.memmap(path, dtype=np.uint16, mode="r"), context
        self._order, self._batch_size = SampleOrder((len(self._tokens) - 1) // context), batch_size
        self._slice, self.position = slice(*rank_slice(batch_size, rank, world_size)), 0

    def __next__(self) -> Tensor:
        """Return this rank's slice of the next batch.

        Shapes: -> [batch_size/world_size, context + 1], int64
        """
        samples = self._order.samples(self.position, self.position + self._batch_size)[self._slice]
        self.position += self._batch_size
        places = samples[:, None] * self._context + np.arange(self._context + 1)
        return torch.from_numpy(self._tokens[places].astype(np.int64))
