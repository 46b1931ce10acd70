"""HorovodOptimizer: the other classic design, in which the *optimizer* averages gradients and the model knows nothing.

`DataParallel` stands between a model and its backward pass. Here the optimizer is wrapped. Hooks on its parameters fill
fusion buffers while backward produces the gradients. A full buffer goes on the wire, and `step()` waits for all buffers
before it updates. A training loop keeps its shape:

    broadcast_parameters(model)
    optimizer = HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()

What the place of the wrapper decides:

- Only what the optimizer updates is averaged; two optimizers of one model are two wrappers.
- A program that needs the averaged gradients before the update must ask for them: clipping goes between
  `synchronize()` and `step()`. Clipping each rank's own gradients before the average is a fault that no error reports.
- A parameter that no rank used counts as zeros and is updated, by momentum and weight decay; one process leaves it
  alone. `DataParallel` tells the two apart.

Symbols: n ranks, G bytes of the gradients.

Source: Sergeev and Del Balso 2018, Horovod, sections 3 and 4 (tensor fusion). There ranks may produce gradients in any
order: a coordinator tells all ranks what every rank has ready, and that is fused. Here buffers and their order are
fixed, which needs no coordinator, and sums the same numbers in the same order in every run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.data_parallel.steps import FlatBucket, in_buckets, trainable
from distlab.gradients.flat_gradients import GradientSlots, SendInBackward
from distlab.replicate import parameter_facts


class FusionBuffer(GradientSlots):
    """Gradients that are copied into one buffer, averaged by one call, and copied out."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.bucket = FlatBucket(parameters)

    def pack(self, slot: int) -> None:
        """Copy nothing yet: `FlatBucket.start` copies all gradients together; a missing one counts as zeros."""


class HorovodOptimizer:
    """Average gradients over a group, then step.

    It has the optimizer's `step`, `zero_grad`, `param_groups`, `state_dict` and `load_state_dict`; the optimizer itself
    is `.optimizer`: give that to a learning-rate scheduler.

    Args:
        optimizer: whose parameters' gradients are averaged before each step.
        named_parameters: the model's, for messages; they must name all that the optimizer updates.
        group: the replicas; None is all ranks. They must hold equal parameters: see `broadcast_parameters`.
        fusion_bytes: capacity of a fusion buffer.
        backward_passes_per_step: gradients add up on the rank for so many passes, and are sent in the last. They are
            summed as torch sums them: divide the loss for a mean.

    Cost: one all-reduce per buffer, about G / fusion_bytes, together of G bytes; every gradient is copied in and out.
        At construction agreement (80 bytes).
    Error: as one process up to the order of additions, where every parameter is used by some rank; repeats bit for bit.

    Raises:
        ValueError: an argument is out of range, the optimizer has a parameter without a name, or ranks hold different
            models, values or options.
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
        for name, value in [("fusion_bytes", fusion_bytes), ("backward_passes_per_step", backward_passes_per_step)]:
            if value < 1:
                raise ValueError(f"{name} is {value}; pass at least 1")
        self.optimizer = optimizer
        self.group = group
        self.backward_passes_per_step = backward_passes_per_step
        self._rank = dist.get_rank(group)
        self._names = _names_of(optimizer, named_parameters)
        parameters = trainable(self._names)
        if not parameters:
            raise ValueError("no parameter of the optimizer requires a gradient; there is nothing to average")
        self._buffers = [FusionBuffer(members) for members in in_buckets(parameters, fusion_bytes)]
        facts = parameter_facts((name, parameter) for parameter, name in self._names.items())
        options = [facts, fusion_bytes, backward_passes_per_step]
        agree(options, group, what="parameters, fusion_bytes and passes per step")
        values = {name: _digest(parameter) for parameter, name in self._names.items()}
        agree(values, group, what="the parameters' values (call broadcast_parameters(module) first); their digests")
        self._num_passes = dict.fromkeys(parameters, 0)  # backward passes since the last average
        self._averaged = False
        self._skipping = False
        self._sending = SendInBackward(self._buffers, lambda buffer: buffer.bucket.start(group), self._on_gradient)

    def _on_gradient(self, buffer: FusionBuffer, slot: int) -> bool:
        """Count a backward pass of a parameter; return whether it was the last of the step."""
        parameter, passes = buffer.parameters[slot], self.backward_passes_per_step
        if self._num_passes[parameter] == passes:
            raise RuntimeError(
                f"rank {self._rank}: {self._names[parameter]} got gradient {passes + 1} before step(), expected "
                f"{passes}: call step() after each {passes}, or pass a larger backward_passes_per_step"
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"rank {self._rank}: {self._names[parameter]} has a sparse gradient, fusion buffers hold dense ones; "
                "build the layer with sparse=False"
            )
        self._averaged = False
        self._num_passes[parameter] += 1
        return self._num_passes[parameter] == passes

    def synchronize(self) -> None:
        """Average all gradients now; `step()` does it by itself.

        Every rank must call it as often, also one that had no batch: its gradients count as zeros.

        Raises:
            RuntimeError: on every rank, the optimizer got parameters that this wrapper does not average.
        """
        self._check_parameters()
        for buffer in self._buffers:
            buffer.take_rest()
        self._sending.start_full()
        for buffer in self._buffers:
            buffer.bucket.finish()
            buffer.reset()
        self._sending.reset()
        self._num_passes = dict.fromkeys(self._num_passes, 0)
        self._averaged = True

    def _check_parameters(self) -> None:
        for parameter in trainable(_parameters_of(self.optimizer)):
            if parameter not in self._num_passes:
                name = self._names.get(parameter, f"a parameter of shape {list(parameter.shape)}")
                raise RuntimeError(
                    f"rank {self._rank}: {name} was added or thawed after HorovodOptimizer was built and is not "
                    "averaged; close() this one and build another"
                )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` in this block not synchronize again: `synchronize()` must come first, else `step()` raises.

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: None = None) -> None:
        """Average what is not averaged yet, then update.

        After `synchronize()` nothing is averaged twice, with or without `skip_synchronize()`; Horovod's own averages
        again without it, which gives the same numbers for twice the bytes.

        Raises:
            ValueError: a closure was passed.
            RuntimeError: in skip_synchronize() without synchronize().
        """
        if closure is not None:
            raise ValueError(
                f"rank {self._rank}: step() takes no closure, since gradients that it computes would not be averaged; "
                "use DataParallel and call its synchronize() in the closure"
            )
        if self._skipping and not self._averaged:
            raise RuntimeError(
                f"rank {self._rank}: step() in skip_synchronize(), but gradients were not averaged since the last "
                "backward, so replicas would part; call synchronize() first"
            )
        if not self._averaged:
            self.synchronize()
        self.optimizer.step()
        self._averaged = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, after `step()` or before `backward()`.

        Raises:
            RuntimeError: between backward and step(): gradients are on the wire, or would be lost. To leave out an
                update call synchronize() first, on every rank.
        """
        waiting = [self._names[parameter] for parameter, passes in self._num_passes.items() if passes]
        if waiting:
            raise RuntimeError(
                f"rank {self._rank}: zero_grad() between backward() and step() would lose the gradients of "
                f"{len(waiting)} parameters, {waiting[0]} first, some of them on the wire; call zero_grad() after "
                "step(), or synchronize() before it to leave out an update"
            )
        self.optimizer.zero_grad(set_to_none)

    @property
    def num_bytes(self) -> int:
        """Bytes that a step's all-reduces carry."""
        return sum(buffer.bucket.flat.num_bytes for buffer in self._buffers)

    @property
    def num_buffers(self) -> int:
        """All-reduces in a step."""
        return len(self._buffers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups: change a learning rate here or there."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; the wrapper has none of its own between steps."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the optimizer's state."""
        self.optimizer.load_state_dict(dict(state_dict))

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        self._sending.close()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[nn.Parameter, str]:
    """Return the optimizer's parameters and their names, in the model's order."""
    named = list(named_parameters)
    counts = Counter(name for name, _ in named)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"named_parameters has {', '.join(twice)} more than once; names must tell parameters apart")
    known = {parameter: name for name, parameter in reversed(named)}  # a tied parameter keeps its first name
    mine = _parameters_of(optimizer)
    nameless = [list(parameter.shape) for parameter in mine if parameter not in known]
    if nameless:
        raise ValueError(
            f"{len(nameless)} parameters of the optimizer are not in named_parameters, the first of shape "
            f"{nameless[0]}; pass the named_parameters() of the model that the optimizer updates"
        )
    members = set(mine)
    return {parameter: known[parameter] for _, parameter in named if parameter in members}


def _digest(parameter: nn.Parameter) -> str:
    """Return a few letters that differ when values differ."""
    data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:12]
