"""Measured memory: what a rank really holds, by kind and over time, in the simulator's own words.

    with track_memory(model, optimizer) as memory:
        train_one_step()
    memory.peak_bytes, memory.at_peak, memory.over_time()

A storage is the memory behind one or more tensors; views share it. On a CPU the allocator keeps no record, so we do:
`MeasuredMemory` enters every storage that an operator touches, and notes when it is freed. On a GPU this says what each
storage is for, and torch's allocator gives the sum. What a storage is for often shows only later: the result of a
matrix product becomes a gradient when backward hands it to a parameter. So its kind, once known, holds for its whole
life. How the kind becomes known (`Tracker`):

- parameters: the module's own, and its buffers; gradients: what backward hands to a parameter;
- optimizer: the state of any optimizer that steps; master weights: what it updates and the module does not own;
- activations: what autograd saves for backward; logits: the module's output, and what is saved after it (the loss's);
- buffers: a ShardedOptimizer's buckets, FullyShard's units; temporary: all else, and so what recompute computes again
  in backward.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.comm.device import peak_bytes, reset_peak
from distlab.measure.count.module import tensors_in
from distlab.sharding import FullyShard, ShardedOptimizer
from simulator.memory.memory import KINDS as KINDS
from simulator.units import format_bytes

Ints = NDArray[np.int64]

CERTAINTY = ("temporary", "activations", "logits", "buffers", "gradients", "optimizer", "master weights", "parameters")
# A storage that is two things counts as the later of these: a bucket whose views are gradients is gradients.


class MeasuredMemory:
    """Bytes on this rank's device: each storage once, without views and other ranks' memory.

    What is offloaded to the host counts on a CPU, whose memory is the host's, and not on a GPU.

    Not seen on a CPU: what C++ kernels hold for themselves while they run, and what a different thread allocates and
    frees before this one touches it.

    Attributes:
        held_bytes: of all storages, when an operator ran last.
    """

    def __init__(self, device: torch.device) -> None:
        self.held_bytes = 0
        self._device, self._allocator_bytes = device, 0
        self._count = count()
        self._numbers: dict[int, int] = {}  # of storages alive: address to number
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by number: its bytes as last seen
        self._kind: dict[int, str] = {}  # by number, of all in the history
        self._gone: deque[tuple[int, int]] = deque()  # numbers and times; filled on any thread, emptied on ours
        self._events = (array("q"), array("q"), array("q"))  # time, number, change of bytes

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
        by_kind["temporary"] += max(0, (self._allocator_bytes or peak_bytes(self._device)) - sum(found))
        return by_kind

    def over_time(self) -> tuple[Ints, Ints]:
        """Return moments, in nanoseconds since the block or `restart()` began, and the bytes of each kind from then on.

        Shapes: times [T], bytes [T, len(KINDS)]
        """
        self.look(())
        times, numbers, changes = (np.array(column, np.int64) for column in self._events)
        rows = np.zeros((len(times), len(KINDS)), np.int64)
        rows[np.arange(len(times)), [KINDS.index(self._kind[number]) for number in numbers.tolist()]] = changes
        return np.maximum.accumulate(times) - times[:1], rows.cumsum(axis=0)

    def restart(self) -> None:
        """Forget peak and history, and go on from what is held now: before the step that is to be looked at."""
        self.look(())
        self._events = (array("q"), array("q"), array("q"))
        self._kind = {number: self._kind[number] for number in self._alive}
        self.held_bytes, now = 0, time.monotonic_ns()
        for number, (_, num_bytes) in self._alive.items():
            self._note(number, num_bytes, now)
        reset_peak(self._device)
        self._allocator_bytes = 0

    def close(self) -> None:
        """Look, and read the allocator, for the last time."""
        self.look(())
        self._allocator_bytes = peak_bytes(self._device)

    def look(self, tensors: Iterable[Tensor]) -> int:
        """Note what was freed or resized in place, and new storages; return the bytes that came."""
        while self._gone:
            number, when = self._gone.popleft()
            self._note(number, -self._alive.pop(number)[1], when)
        came = 0
        for number, (there, num_bytes) in self._alive.items():
            storage = there()
            if storage is not None and (change := storage.nbytes() - num_bytes):
                self._alive[number] = there, num_bytes + change
                self._note(number, change, time.monotonic_ns())
                came += max(0, change)
        before = self.held_bytes
        for tensor in tensors:
            self._number(tensor)
        return came + self.held_bytes - before

    def guess(self, tensor: Tensor | None, kind: str) -> None:
        """Take a tensor's storage for a kind; the more certain one of two stays."""
        number = None if tensor is None else self._number(tensor)
        if number is not None and CERTAINTY.index(kind) >= CERTAINTY.index(self._kind[number]):
            self._kind[number] = kind

    def _number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, which is entered if it is new; None: it does not count."""
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if (known := self._numbers.get(storage._cdata)) is not None:
            return known
        address, number, num_bytes = storage._cdata, next(self._count), storage.nbytes()
        self._numbers[address], self._kind[number] = number, "temporary"
        self._alive[number] = weakref.ref(storage, partial(self._freed, address, number)), num_bytes
        self._note(number, num_bytes, time.monotonic_ns())
        return number

    def _freed(self, address: int, number: int, _: object) -> None:
        # Runs wherever the last reference is dropped, on any thread and in the middle of anything: it only leaves word.
        if self._numbers.get(address) == number:
            del self._numbers[address]  # the address may be used again at once
        self._gone.append((number, time.monotonic_ns()))

    def _note(self, number: int, change: int, when: int) -> None:
        for column, value in zip(self._events, (when, number, change), strict=True):
            column.append(value)
        self.held_bytes += change


@contextmanager
def track_memory(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | ShardedOptimizer | None = None,
    *,
    limit_bytes: int | None = None,
) -> Iterator[MeasuredMemory]:
    """Measure a rank's memory inside a `with` block.

    Counted are the module, the optimizer's state, and whatever operators touch inside the block, on this thread and in
    backward. Operators run slower inside; times are those of the slower run.

    Args:
        module: whose parameters, gradients and activations are meant; a wrapper with a `module` will do.
        optimizer: whose state exists already; optimizers that step inside are found without it. A ShardedOptimizer's
            buckets are known through it: what it keeps counts as gradients, what it lends and what arrives as buffers.
        limit_bytes: refuse to hold more; makes a small rank on which to try large models.

    Raises:
        MemoryLimitError: where the operator ran that asked for too much; the text says what is held.
    """
    module = module if isinstance(module, nn.Module) else module.module
    first = next(chain(module.parameters(), module.buffers()), torch.empty(0))
    memory = MeasuredMemory(first.device)
    memory.restart()
    tracker = Tracker(memory, module, limit_bytes)
    tracker.sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
    tracker.know_module()
    if optimizer is not None:
        tracker.know_optimizer(optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer)
    tracker.check(0, "the module itself")
    try:
        with tracker.hooks(), tracker:
            yield memory
    finally:
        memory.close()


_ROWS = Path(__file__).with_name("advice.txt").read_text(encoding="utf-8").splitlines()
ADVICE = dict(row.split(": ", 1) for row in _ROWS)  # by kind of memory, the cheapest first


class MemoryLimitError(RuntimeError):
    """A rank wants more memory than it was given."""


class Tracker(TorchDispatchMode):
    """Shows every operator's tensors to the memory, and finds out what they are for."""

    def __init__(self, memory: MeasuredMemory, module: nn.Module, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.module, self.units = module, module.units if isinstance(module, FullyShard) else ()
        self.limit_bytes = limit_bytes
        self.optimizer: torch.optim.Optimizer | None = None  # that steps now
        self.sharded: ShardedOptimizer | None = None
        self.loss_runs = False  # the module has returned: what is saved now, the loss saves

    def know(self, kind: str, *tensors: Tensor | None) -> None:
        """Take the storages of tensors for a kind."""
        for tensor in tensors:
            self.memory.guess(tensor, kind)

    def know_module(self) -> None:
        """Enter parameters, the module's buffers, gradients, and what it communicates with."""
        self.know("parameters", *self.module.parameters(), *self.module.buffers())
        self.know("gradients", *(parameter.grad for parameter in self.module.parameters()))
        self.know_travelling()
        self.know("buffers", *(unit.buffer for unit in self.units))

    def know_travelling(self) -> None:
        """Enter gradients that travel between ranks, which come and go in backward: buckets, and what arrives."""
        for unit in self.units:
            self.know("buffers", *unit.gradient_tensors)
        if self.sharded is not None:
            self.know("buffers", *self.sharded.gradient_tensors)
            # Under stage 1 a shard is a part of the bucket, which holds all gradients.
            self.know("gradients", *(bucket.shard for bucket in self.sharded.buckets))

    def know_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the kind of each tensor of an optimizer: master weights, gradients, state."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.know("master weights", *parameters)  # a parameter of the module stays one
        self.know("gradients", *(parameter.grad for parameter in parameters))
        self.know("optimizer", *tensors_in(list(optimizer.state.values())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        came = self.memory.look(tensors_in((args, kwargs or {}, result)))
        if _in_backward():
            self.know_travelling()
        if self.limit_bytes is not None and came:
            self.check(came, func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func))
        return result

    def check(self, came: int, what: str) -> None:
        """Refuse to hold more than the limit.

        Raises:
            MemoryLimitError: it is more.
        """
        if self.limit_bytes is None or self.memory.held_bytes <= self.limit_bytes:
            return
        self.know_module()
        if self.optimizer is not None:
            self.know_optimizer(self.optimizer)
            what = f"{what} of {type(self.optimizer).__name__}'s step"
        elif _in_backward():
            what = f"{what} in backward"
        raise MemoryLimitError(_explain(self.memory, came, what, self.limit_bytes))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Listen to the module, to autograd and to optimizers."""
        handles = [
            self.module.register_forward_pre_hook(lambda *_: setattr(self, "loss_runs", False)),
            self.module.register_forward_hook(self._leave_module),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            *(
                parameter.register_post_accumulate_grad_hook(lambda one: self.memory.guess(one.grad, "gradients"))
                for parameter in self.module.parameters()
                if parameter.requires_grad and parameter.is_leaf
            ),
        ]
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        if not _in_backward():  # else a forward that is run again: temporary, and what it reads is what it was
            self.memory.guess(tensor, "logits" if self.loss_runs else "activations")
        return tensor

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.loss_runs = self.loss_runs or torch.is_grad_enabled()
        self.know("logits", *tensors_in(output))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.know_module()
        self.know_optimizer(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.know_optimizer(optimizer)
        self.optimizer = None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _explain(memory: MeasuredMemory, came: int, what: str, limit_bytes: int) -> str:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    _, rows = memory.over_time()
    held = {kind: size for kind, size in zip(KINDS, rows[-1].tolist(), strict=True) if size}
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in held.items())
    large = [kind for kind in ADVICE if held.get(kind, 0) >= memory.held_bytes / 5]
    advice = ", or ".join(ADVICE[kind] for kind in large[:2])
    return (
        f"rank {rank}: wants {format_bytes(came)} for {what} and holds {format_bytes(memory.held_bytes - came)} of "
        f"{format_bytes(limit_bytes)}; with it: {parts}; {advice}"
    )
