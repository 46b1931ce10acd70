"""What tells the ledger what a storage is for: operators, the module, autograd and optimizers, all listened to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.measure.memory.storages import HOST, Ledger, tensors_in
from distlab.sharding import FullyShard, ShardedOptimizer
from simulator.units import format_bytes

ADVICE = {  # the cheapest first
    "optimizer": "shard the optimizer state (ZeRO-1 or more)",
    "master weights": "shard the optimizer state, master weights with it (ZeRO-1 or more)",
    "gradients": "shard the gradients (ZeRO-2 or more)",
    "parameters": "shard the parameters (ZeRO-3, FSDP)",
    "activations": "recompute activations, or use smaller micro-batches",
    "logits": "use smaller micro-batches",
    "buffers": "use smaller buckets or units",
    "temporary": "use smaller micro-batches",
    "errors": "use a compression without error feedback",
}


class MemoryLimitError(RuntimeError):
    """A rank wants more memory than it was given."""


class Tracker(TorchDispatchMode):
    """Shows every operator's tensors to the ledger, and finds out what they are for."""

    def __init__(
        self,
        ledger: Ledger,
        module: nn.Module,
        limit_bytes: int | None,
        buffers: Callable[[], Iterable[Tensor]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers = buffers
        self.ledger = ledger
        self.module = module
        self.limit_bytes = limit_bytes
        self.optimizer: torch.optim.Optimizer | None = None  # that steps now
        self.sharded: ShardedOptimizer | None = None
        self.loss_runs = False  # the module has returned: what is saved now, the loss saves

    def know_module(self) -> None:
        """Enter parameters, the module's buffers, gradients, and what it communicates with."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.ledger.set_kind(tensor, "parameters")
        for parameter in self.module.parameters():
            self.ledger.set_kind(parameter.grad, "gradients")
        units = self.module.units if isinstance(self.module, FullyShard) else []
        for tensor in chain(self.buffers(), (unit.buffer for unit in units)):
            self.ledger.set_kind(tensor, "buffers")
        self.know_travelling()
        for unit in units:
            if unit.options.offload:  # where the host's memory is the device's too, only this tells them apart
                self.ledger.set_kind(unit.shard, HOST, marked=True)
                self.ledger.set_kind(unit.shard.grad, HOST, marked=True)

    def know_travelling(self) -> None:
        """Enter gradients that travel between ranks, which come and go in backward: buckets, and what arrives."""
        if isinstance(self.module, FullyShard):
            for unit in self.module.units:
                for tensor in unit.gradient_tensors:
                    self.ledger.set_kind(tensor, "buffers")
        if self.sharded is not None:
            for tensor in self.sharded.gradient_tensors:
                self.ledger.set_kind(tensor, "buffers")
            for bucket in self.sharded.buckets:  # under stage 1 a part of the bucket, which holds all gradients
                self.ledger.set_kind(bucket.shard, "gradients")

    def know_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the kind of each tensor of an optimizer: master weights, gradients, state."""
        offloaded = False
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            self.ledger.set_kind(parameter, "master weights")  # a parameter of the module stays one
            self.ledger.set_kind(parameter.grad, "gradients")
            offloaded |= self.ledger.kind_of(parameter) == HOST
        for tensor in tensors_in(list(optimizer.state.values())):
            self.ledger.set_kind(tensor, HOST if offloaded else "optimizer", marked=offloaded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        came = self.ledger.look(tensors_in((args, kwargs or {}, result)))
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
        if self.limit_bytes is None or self.ledger.now_bytes <= self.limit_bytes:
            return
        self.know_module()
        if self.optimizer is not None:
            self.know_optimizer(self.optimizer)
            what = f"{what} of {type(self.optimizer).__name__}'s step"
        elif _in_backward():
            what = f"{what} in backward"
        raise MemoryLimitError(_explain(self.ledger, came, what, self.limit_bytes))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Listen to the module, to autograd and to optimizers."""
        with ExitStack() as stack:
            handles = [
                self.module.register_forward_pre_hook(self._enter_module),
                self.module.register_forward_hook(self._leave_module),
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
                *(
                    parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                    for parameter in self.module.parameters()
                    if parameter.requires_grad and parameter.is_leaf
                ),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        if _in_backward():  # a forward that is run again: temporary, and what it reads is what it was
            return tensor
        self.ledger.set_kind(tensor, "logits" if self.loss_runs else "activations")
        return tensor

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self.loss_runs = False

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.loss_runs = True
        for tensor in tensors_in(output):
            self.ledger.set_kind(tensor, "logits")

    def _gradient_ready(self, parameter: Tensor) -> None:
        self.ledger.set_kind(parameter.grad, "gradients")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.know_module()
        self.know_optimizer(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.know_optimizer(optimizer)
        self.optimizer = None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _explain(ledger: Ledger, came: int, what: str, limit_bytes: int) -> str:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    held = {kind: size for kind, size in ledger.by_kind().items() if size and kind != HOST}
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in held.items())
    large = [kind for kind in ADVICE if held.get(kind, 0) >= ledger.now_bytes / 5]
    advice = ", or ".join(ADVICE[kind] for kind in large[:2])
    return (
        f"rank {rank}: wants {format_bytes(came)} for {what} and holds {format_bytes(ledger.now_bytes - came)} of "
        f"{format_bytes(limit_bytes)}; with it: {parts}; {advice}"
    )
