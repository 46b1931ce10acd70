"""HorovodOptimizer: the other classic design, in which the *optimizer* averages gradients and the model knows nothing.

Hooks on the optimizer's parameters fill fusion buffers during backward. A full buffer goes on the wire, and `step()`
waits for all buffers before it updates. A training loop stays that of one process: lesson 3 shows one.

Clipping goes between `synchronize()` and `step()`, which then averages nothing twice. A parameter that no rank used
counts as zeros and is updated, by momentum and weight decay; one process, and `DataParallel`, leave it alone.

Source: Sergeev and Del Balso 2018, Horovod, sections 3 and 4 (tensor fusion). There a coordinator tells all ranks what
every rank has ready, and that is fused. Here buffers and their order are fixed: the same sums in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.gradients.flat_gradients import GradientSlots, SendInBackward
from distlab.blocks.replicate import parameter_facts
from distlab.comm import agree
from distlab.data_parallel.steps import FlatBucket, in_buckets, trainable


class HorovodOptimizer:
    """Average gradients over a group, then step.

    Args:
        optimizer: its own `step` follows the average; give `.optimizer` to a schedule or a checkpoint.
        named_parameters: of the model; they must name all that the optimizer updates.
        group: the replicas; None is all ranks. They must hold equal parameters: see `broadcast_parameters`.
        fusion_bytes: capacity of a fusion buffer.
        backward_passes_per_step: gradients add up on the rank for so many passes, and are sent in the last.

    Cost: one all-reduce per buffer, together of the gradients' bytes; every gradient is copied in and out. At
        construction agreement (40 bytes).
    Error: as one process up to the order of additions, where every parameter is used by some rank; repeats bit for bit.

    Raises:
        ValueError: ranks hold different models, values or options; or none has a trained parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        group: ProcessGroup | None = None,
        fusion_bytes: int = 25_000_000,
        backward_passes_per_step: int = 1,
    ) -> None:
        self.optimizer, self._passes, self._averaged = optimizer, backward_passes_per_step, False
        mine = self._trained()
        names = {one: name for name, one in named_parameters if one in mine}  # in the model's order
        bits = (one.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for one in names)
        values = [hashlib.sha256(held).hexdigest()[:12] for held in bits]
        facts = [parameter_facts((name, one) for one, name in names.items()), len(mine), fusion_bytes, self._passes]
        agree([values, facts], group, what="the values (broadcast_parameters sends rank 0's), parameters or options")
        if len(names) != len(mine) or not names:
            raise ValueError(f"named_parameters names {len(names)} of the {len(mine)} that are trained; pass them all")
        self._names, self._made = names, dict.fromkeys(names, 0)  # backward passes since the last average
        self._buffers = {GradientSlots(held): FlatBucket(held) for held in in_buckets([*names], fusion_bytes)}
        self._sending = SendInBackward(
            [*self._buffers], lambda slots: self._buffers[slots].start(group), self._on_gradient
        )

    def _trained(self) -> set[nn.Parameter]:
        return {one for given in self.optimizer.param_groups for one in trainable(given["params"])}

    def _on_gradient(self, slots: GradientSlots, slot: int) -> bool:
        """Count a backward pass of a parameter; return whether it was the last of the step."""
        parameter = slots.parameters[slot]
        if self._made[parameter] == self._passes:
            which = f"rank {dist.get_rank()}: {self._names[parameter]} got gradient {self._passes + 1} before step()"
            fix = "call step() more often, or pass a larger backward_passes_per_step"
            raise RuntimeError(f"{which}, expected {self._passes}: {fix}")
        self._averaged = False
        self._made[parameter] += 1
        return self._made[parameter] == self._passes

    def synchronize(self) -> None:
        """Average all gradients now, on every rank; those of a rank that had no batch count as zeros."""
        if self._trained() != self._made.keys():
            raise RuntimeError(f"rank {dist.get_rank()}: parameters were added, frozen or thawed: build this one anew")
        for slots in self._buffers:
            slots.take_rest()
        self._sending.start_full()
        for slots, buffer in self._buffers.items():
            buffer.finish()
            slots.reset()
        self._sending.reset()
        self._made, self._averaged = dict.fromkeys(self._made, 0), True

    def step(self) -> None:
        """Average what is not averaged yet, then update."""
        if not self._averaged:
            self.synchronize()
        self.optimizer.step()
        self._averaged = False

    def zero_grad(self) -> None:
        """Forget the gradients; between backward and step() they are on the wire, and a RuntimeError says so."""
        if any(self._made.values()):
            why = "zero_grad() between backward() and step() would lose gradients; call it after step()"
            raise RuntimeError(f"rank {dist.get_rank()}: {why}, or after synchronize() to leave out an update")
        self.optimizer.zero_grad()
