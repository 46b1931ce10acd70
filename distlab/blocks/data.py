"""Real text as bytes, cut into batches that any rank can find by step number alone.

The order of the samples is a function of (seed, epoch), and the batch is a function of the step. A rank takes its slice
of the batch that one process would take whole. So nothing has to be sent. The data position of a checkpoint is one
number, and training on 4 ranks sees exactly the samples that training on 1 sees.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distlab.plan import split_evenly
from distlab.rng import derive_seed


def python_documentation() -> bytes:
    """Return the reference pages behind `help()`: several hundred kB of English that every Python carries."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: str | Path, context: int = 1) -> bytes:
    """Read a UTF-8 text file as training data.

    Args:
        path: the file.
        context: tokens of one sample; the file must hold at least one sample and its target, context + 1 bytes.

    Raises:
        ValueError: one line that says what is wrong with the file and what to pass instead.
    """
    wrong, data = "", b""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            data = Path(path).read_bytes()
            data.decode()
        else:  # reading a pipe or a device may never end
            wrong = "is not a regular file"
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 (byte {error.start})"
    except (OSError, ValueError) as error:
        wrong = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if b"\0" in data:
        wrong = f"is binary (a NUL byte at {data.index(0)})"
    elif not wrong and len(data) < context + 1:
        wrong = f"has {len(data)} bytes, and a context of {context} needs at least {context + 1}"
    if wrong:
        raise ValueError(f"data file {str(path)!r} {wrong}; pass the path of a text in UTF-8")
    return data


class SampleOrder:
    """The order in which a run takes its samples: a new shuffle each epoch, a function of (seed, epoch) alone.

    Samples are counted from the beginning of the run: a position is one number, over all epochs.
    """

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self.num_samples, self.seed = num_samples, seed
        self._kept: tuple[int, np.ndarray] | None = None

    def epoch(self, epoch: int) -> np.ndarray:
        """Return an epoch's order; that of the last one asked for is kept."""
        if self._kept is None or self._kept[0] != epoch:
            shuffle = np.random.default_rng(derive_seed(self.seed, 0, f"order of epoch {epoch}"))
            self._kept = epoch, shuffle.permutation(self.num_samples)
        return self._kept[1]

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the samples of positions start to stop - 1, which may lie in several epochs.

        Shapes: -> [stop - start], int64
        """
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            epoch, index = divmod(start, self.num_samples)
            parts.append(self.epoch(epoch)[index : index + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts)


class ByteCorpus:
    """Samples of `context` bytes from a text, in a new shuffled order each epoch.

    A sample is a window of the text; its target is the window one byte on. An epoch visits every window once.

    Args:
        data: the text.
        context: bytes in a sample.

    Raises:
        ValueError: the text is shorter than one sample and its target.
    """

    def __init__(self, data: bytes, context: int) -> None:
        if context < 1:
            raise ValueError(f"context is {context}; pass at least 1")
        if len(data) < context + 1:
            raise ValueError(f"{len(data)} bytes of text; a context of {context} needs at least {context + 1}")
        self.context = context
        self.num_samples = (len(data) - 1) // context
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._order = SampleOrder(self.num_samples)

    def batch(
        self, step: int, batch_size: int, seed: int = 0, *, rank: int = 0, world_size: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return one rank's slice of the global batch of a step.

        The slices of all ranks, one after the other, are the batch of one process. Where world_size does not divide
        batch_size the first ranks have one sample more: see `distlab.data_parallel.loss_weight`.

        Shapes: inputs [batch_size/world_size, context], targets the same, int64

        Raises:
            ValueError: a number is out of range, or there are fewer samples than ranks.
        """
        start, stop = rank_slice(batch_size, rank, world_size)
        if step < 0:
            raise ValueError(f"step is {step}; pass 0 or more")
        if self._order.seed != seed:
            self._order = SampleOrder(self.num_samples, seed)
        windows = self._order.samples(step * batch_size + start, step * batch_size + stop)
        chunk = self._bytes[(torch.from_numpy(windows) * self.context)[:, None] + torch.arange(self.context + 1)].long()
        return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def rank_slice(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's samples in the global batch; sizes differ by at most one.

    Raises:
        ValueError: the rank is not in the world, or some rank would have no sample.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks")
    if batch_size < world_size:
        text = f"a batch of {batch_size} leaves some of {world_size} ranks without a sample; use a larger batch"
        raise ValueError(text)
    return split_evenly(batch_size, world_size)[rank]


class Digits(NamedTuple):
    """Handwritten digits of 8 x 8 pixels, row after row; `.unflatten(1, (1, 8, 8))` makes them images.

    Attributes:
        train_inputs: [1437, 64], float32 in [0, 1].
        train_targets: [1437], int64, 0 to 9.
        test_inputs: [360, 64]
        test_targets: [360]
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def digits(seed: int = 0) -> Digits:
    """Return handwritten digits, cut into a training and a test set by a seed; nothing is downloaded.

    The same seed gives the same split on every rank and in every run. A fifth of the samples is for the test.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI, CC BY 4.0), 1,797 test samples.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as table:  # a row: 64 pixels, then the label
        pixels, labels = np.split(table["digits"].astype(np.int64), [64], axis=1)
    order = np.random.default_rng(derive_seed(seed, 0, "split of the digits")).permutation(len(labels))
    inputs = torch.from_numpy(pixels[order] / 16).float()  # 0 to 16 dark dots of a 4 x 4 field are a pixel
    targets = torch.from_numpy(labels[order, 0])
    num_test = len(labels) // 5 + 1
    return Digits(inputs[num_test:], targets[num_test:], inputs[:num_test], targets[:num_test])
