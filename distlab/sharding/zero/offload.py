"""Offload: keep the optimizer's state, and do the update, in the host's memory.

Adam keeps 8 bytes per parameter and reads them once per step. A GPU's memory is dear, the host's is cheap, and the bus
between them is slow. Per parameter and step, moving gradients there and parameters back costs 8 bytes; moving Adam's
state would cost 16. So the state never moves, and the update is made where the state is.

1. `OffloadedOptimizer`: the update of any optimizer, made on copies in the host's memory, of whole parameters or of
   pieces: `ShardedOptimizer(module, offloaded(AdamW, lr=1e-3))` offloads the optimizer alone.
2. `FullyShard(module, offload=True)` keeps the shards themselves there: its optimizer is offloaded as it is.

On a machine without a GPU device and host are the same memory: nothing is saved then, and all bits stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm.device import event, host_memory_for, is_gpu, wait_for_event

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory: pinned where it came from a GPU, which can then copy without the host's help.

    The tensor's bytes cross the bus.

    Shapes: any; the same

    Raises:
        RuntimeError: the host has no room for it; the text says how much was wanted.
    """
    try:
        host = host_memory_for(tensor)
    except RuntimeError as error:
        wanted = tensor.numel() * tensor.element_size()
        raise RuntimeError(
            f"offload: the host has no room for {wanted / 1e6:.1f} MB more ({str(error).splitlines()[0]}); "
            "shard over more ranks, or leave offload off"
        ) from None
    return host.copy_(tensor.detach())


class OffloadedOptimizer(torch.optim.Optimizer):
    """Make an optimizer's update in the host's memory.

    A step copies gradients to the host, updates the host's copy of the parameters, and copies those back. The host
    waits once in a step: for the gradients. Groups and their options (`param_groups`) are those of any optimizer, so
    schedules of the learning rate work; a group is not added later.

    Args:
        parameters: what to update; floating point, on any device.
        make_optimizer: makes the optimizer that does the work, of these parameters; it gets the host's copies of them.

    Attributes:
        inner: that optimizer; its state is in the host's memory.
        host_bytes: the host's copies of parameters and gradients, which the first step makes, and the state so far.

    Cost: in the host's memory a copy of the parameters, one of their gradients and the optimizer's state. Each step
        sends the gradients over the bus to the host, and the parameters back.
    Error: exact: the same update of the same numbers. A CPU and a GPU may round the update itself differently.

    Raises:
        ValueError: no parameters, shards, or `make_optimizer` made no optimizer of exactly these.

    Source: Ren et al. 2021, ZeRO-Offload (2101.06840), section 4; without the update of one step delayed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], make_optimizer: MakeOptimizer) -> None:
        mine = list(parameters)
        if not mine:
            raise ValueError("OffloadedOptimizer: no parameters; pass those that the optimizer shall update")
        if any(getattr(one, "is_shard", False) for one in mine):
            raise ValueError("OffloadedOptimizer: these are shards; build FullyShard(module, offload=True)")
        self.inner = make_optimizer(list(mine))
        if {id(one) for group in self.inner.param_groups for one in group["params"]} != {id(one) for one in mine}:
            raise ValueError(
                f"OffloadedOptimizer: make_optimizer was given {len(mine)} parameters and made an optimizer of others; "
                "build it of the parameters that it is called with"
            )
        self._copies: dict[Tensor, tuple[nn.Parameter, Tensor]] = {}  # in the host's memory: parameter and gradient
        self._returned: list[Any] = []  # events: the host's copies have been read by the last step
        groups = [{**group, "params": [*group["params"]]} for group in self.inner.param_groups]
        super().__init__(groups, dict(self.inner.defaults))
        self.state = self.inner.state

    @property
    def host_bytes(self) -> int:
        """Bytes held in the host's memory."""
        state = [value for kept in self.inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        copies = [tensor for pair in self._copies.values() for tensor in pair]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*copies, *state])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update: gradients to the host, the optimizer's step there, parameters back.

        Raises:
            ValueError: a closure was given: it would run on the device, between two halves of an update.
        """
        if closure is not None:
            raise ValueError("OffloadedOptimizer: step takes no closure; compute the loss before the step")
        self._move_to_host()
        for device, (host, room) in self._copies.items():
            host.grad = None if device.grad is None else room.copy_(device.grad, non_blocking=True)
        # The host must not read what has not arrived, nor write what the last step's copies may still read.
        for reached in (*self._returned, *self._events()):
            wait_for_event(reached)
        self.inner.step()
        for device, (host, _) in self._copies.items():
            if host.grad is not None:
                device.copy_(host, non_blocking=True)
        self._returned = self._events()

    def _move_to_host(self) -> None:
        """Let the optimizer that does the work hold copies of what the groups hold now, with the groups' options."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for one in group["params"]:
                if one not in self._copies:
                    host = nn.Parameter(to_host(one))
                    self._copies[one] = host, host_memory_for(one)
                    for key, value in self.state.pop(one, {}).items():  # Adagrad makes it when it is built
                        self.state[host][key] = to_host(value) if isinstance(value, Tensor) else value
            inner.update(_options(group), params=[self._copies[one][0] for one in group["params"]])

    def _events(self) -> list[Any]:
        return [event(place) for place in {device.device for device in self._copies if is_gpu(device)}]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer that does the work: in the form that it would have without offload."""
        self._move_to_host()
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back, also one that was saved without offload; the parameters are read from the device again."""
        self._move_to_host()
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(inner))
        self.reload()

    @torch.no_grad()
    def reload(self) -> None:
        """Copy the parameters to the host again: call it when something other than `step` has changed them."""
        for device, (host, _) in self._copies.items():
            host.copy_(device)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def offloaded(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    """Return what makes an offloaded optimizer: `offloaded(torch.optim.AdamW, lr=1e-3)` of a list of parameters."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return OffloadedOptimizer(parameters, lambda host: optimizer(host, **options))

    return make
