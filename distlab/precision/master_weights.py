"""Master weights: float32 copies that small updates can be added to.

bfloat16 has 8 bits of precision: 1 + 0.003 is 1, so an update of 0.3 % of a weight is lost, each step anew. The
optimizer updates a float32 copy, and the model computes with the copy rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from distlab.precision.half import HALF


class MasterWeights:
    """float32 copies of half-precision parameters, and an optimizer that updates the copies.

    After backward and averaging: `accumulate()`, then clip and step on `parameters`. With several micro-batches,
    `accumulate()` after each backward adds their gradients in float32; then average the masters' gradients, once, in
    place of the module's.

    Args:
        parameters: of the module. float32 ones are updated themselves; frozen ones are left alone.
        make_optimizer: builds any optimizer over a list of parameters.

    Attributes:
        parameters: what the optimizer updates: float32, in the order given, a tied parameter once.
        optimizer: the one that was made.

    Cost: 4 bytes per parameter, and 4 for its gradient until `zero_grad()`; nothing is sent.
    Error: as float32 training, with parameters rounded for each forward.

    Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.1.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        once = {id(p): p for p in parameters if p.requires_grad}
        self._pairs = [(p, nn.Parameter(p.detach().float()) if p.dtype in HALF else p) for p in once.values()]
        if not self._pairs:
            raise ValueError("no parameter requires a gradient; there is nothing to keep master weights of")
        self.parameters = [master for _, master in self._pairs]
        self.optimizer = make_optimizer(self.parameters)

    def accumulate(self) -> None:
        """Add the module's gradients to the masters' in float32, and let the half-precision ones go."""
        for parameter, master in self._pairs:
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters with all gradients, those not yet accumulated too, and round them into the module."""
        self.accumulate()
        self.optimizer.step()
        self.copy_to_module()

    @torch.no_grad()
    def copy_to_module(self) -> None:
        """Copy the master weights into the module's parameters, rounded to their dtype."""
        for parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Forget all gradients, the module's and the masters'."""
        for parameter, master in self._pairs:
            parameter.grad = master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the masters and the optimizer's state: half-precision parameters alone cannot resume a run."""
        return {"parameters": [p.detach() for p in self.parameters], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, and round it into the module.

        Raises:
            ValueError: the masters were of a different model; nothing is changed.
        """
        mine, given = ([list(p.shape) for p in tensors] for tensors in (self.parameters, state_dict["parameters"]))
        if mine != given:
            raise ValueError(f"master weights of shapes {given} given to parameters of shapes {mine}; load their own")
        for master, value in zip(self.parameters, state_dict["parameters"], strict=True):
            master.copy_(value)
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.copy_to_module()
