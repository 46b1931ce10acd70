"""Measured memory: what a rank really holds, by kind and over time, in the simulator's own words.

    with track_memory(model, optimizer) as memory:
        train_one_step()
    memory.peak_bytes, memory.at_peak, memory.over_time()

On a CPU the allocator keeps no record, so we do: `storages.Ledger` enters every storage that an operator touches, and
notes when it is freed. On a GPU the same ledger says what each storage is for, and torch's allocator gives the sum. How
the kind of a storage becomes known (`hooks`):

- parameters: the module's own, and its buffers; gradients: what backward hands to a parameter;
- optimizer: the state of any optimizer that steps; master weights: what it updates and the module does not own;
- activations: what autograd saves for backward; logits: the module's output, and what is saved after it (the loss's);
- buffers: what `buffers=` or `mark` says (buckets, gathered units); temporary: all else, and so what recompute
  computes again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distlab.comm.device import peak_bytes, reset_peak
from distlab.measure.memory.hooks import MemoryLimitError, Tracker
from distlab.measure.memory.storages import HOST, Ledger
from distlab.sharding import ShardedOptimizer
from simulator.memory.memory import KINDS

__all__ = ["KINDS", "MeasuredMemory", "MemoryLimitError", "storage_bytes", "track_memory"]

Ints = NDArray[np.int64]


class MeasuredMemory:
    """Bytes on this rank's device: each storage once, without views and other ranks' memory.

    Not seen on a CPU: what C++ kernels hold for themselves while they run, and what another thread allocates and frees
    before this one touches it.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device
        self._allocator_bytes = 0

    @property
    def now_bytes(self) -> int:
        """Bytes held now."""
        self._ledger.catch_up()
        return self._ledger.now_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once; on a GPU as its allocator counts."""
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind of KINDS when the most was held. What only a GPU's allocator knows is temporary."""
        _, rows = self.over_time()
        found = rows[rows.sum(axis=1).argmax()].tolist() if len(rows) else [0] * len(KINDS)
        by_kind = dict(zip(KINDS, found, strict=True))
        by_kind["temporary"] += max(0, self._allocator_peak() - sum(found))
        return by_kind

    @property
    def host_bytes(self) -> int:
        """The most that was held in storages marked as the host's (offloaded)."""
        _, rows = self._ledger.history()
        return int(rows[:, -1].max()) if len(rows) else 0

    def over_time(self) -> tuple[Ints, Ints]:
        """Return moments, in nanoseconds since the block or `restart()` began, and the bytes of each kind from then on.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        times, rows = self._ledger.history()
        return times - times[:1], rows[:, : len(KINDS)]

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Say what a tensor's storage is for, for all its life: a kind of KINDS, or "host" (not part of the sum).

        Raises:
            ValueError: the kind does not exist.
        """
        if kind not in (*KINDS, HOST):
            raise ValueError(f"no memory kind {kind!r}; choose one of {', '.join((*KINDS, HOST))}")
        self._ledger.set_kind(tensor, kind, marked=True)

    def restart(self) -> None:
        """Forget peak and history, and go on from what is held now: before the step that is to be looked at."""
        self._ledger.restart()
        reset_peak(self._device)
        self._allocator_bytes = 0

    def close(self) -> None:
        """Read the allocator for the last time."""
        self._allocator_bytes = self._allocator_peak()

    def _allocator_peak(self) -> int:
        return self._allocator_bytes or peak_bytes(self._device)


@contextmanager
def track_memory(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | ShardedOptimizer | None = None,
    *,
    limit_bytes: int | None = None,
    buffers: Iterable[Tensor] | Callable[[], Iterable[Tensor]] = (),
) -> Iterator[MeasuredMemory]:
    """Measure a rank's memory inside a `with` block.

    Counted are the module, the optimizer's state, `buffers`, and whatever operators touch inside the block, on this
    thread and in backward. Operators run slower inside; times are those of the slower run.

    Args:
        module: whose parameters, gradients and activations are meant; a wrapper with a `module` will do.
        optimizer: whose state exists already; optimizers that step inside are found without it. A ShardedOptimizer's
            buckets are known through it: what it keeps counts as gradients, what it lends and what arrives as buffers.
        limit_bytes: refuse to hold more; makes a small rank on which to try large models.
        buffers: tensors to communicate with (buckets, gathered units), or what returns those that there are by now: it
            is asked before each step of an optimizer. Units of FullyShard, and their gradients, are known without it.

    Raises:
        MemoryLimitError: where the operator ran that asked for too much; the text says what is held.
    """
    module = module if isinstance(module, nn.Module) else module.module
    first = next(chain(module.parameters(), module.buffers()), torch.empty(0))
    ledger = Ledger(first.device.type)
    measured = MeasuredMemory(ledger, first.device)
    measured.restart()
    tracker = Tracker(ledger, module, limit_bytes, buffers if callable(buffers) else lambda: buffers)
    tracker.sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
    tracker.know_module()
    if optimizer is not None:
        tracker.know_optimizer(optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer)
    tracker.check(0, "the module itself")
    try:
        with tracker.hooks(), tracker:
            yield measured
    finally:
        ledger.catch_up()
        measured.close()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind tensors, each once: a view counts as the whole storage."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
