"""A loader at its plainest: a mapped file, one number, and a slice.

- A file of tokens is mapped into memory: the system reads a page when it is touched, and drops it when memory is short.
- The order of samples is a function of (seed, epoch). Which ones a step takes is a function of one number, the
  *position*: the samples that all ranks together have used up. A checkpoint holds it and nothing else.
- A rank takes its slice of the batch that one process would take whole.

Whoever resumes, on more ranks or fewer, goes on with the same batches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distlab.blocks.data import SampleOrder, rank_slice


class PlainLoader:
    """Batches of a file of 16-bit tokens, without end: `next(loader)`.

    Args:
        path: of the file.
        context: tokens of a sample; each is read with the one behind it, the last target.
        batch_size: samples of a step, over all ranks.
        rank: which slice of the batch.
        world_size: how many slices there are.

    Attributes:
        position: samples that all ranks together have used up; set it to go on there.
    """

    def __init__(self, path: str | Path, context: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._order = SampleOrder((len(self._tokens) - 1) // context)
        self._context, self._batch_size, self.position = context, batch_size, 0
        self._start, self._stop = rank_slice(batch_size, rank, world_size)

    def __next__(self) -> Tensor:
        """Return this rank's slice of the next batch.

        Shapes: -> [batch_size/world_size, context + 1], int64
        """
        samples = self._order.samples(self.position + self._start, self.position + self._stop)
        places = samples[:, None] * self._context + np.arange(self._context + 1)
        self.position += self._batch_size
        return torch.from_numpy(self._tokens[places].astype(np.int64))
