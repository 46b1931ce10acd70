"""LARS: SGD with momentum, in which every layer's step has a length in proportion to the layer's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlab.large_batch.tensors import Group, LayerwiseOptimizer, add_scaled, norms, ratios, trust_of
from distlab.large_batch.trust import Trust, check_number


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling.

    A parameter group may set any of the arguments, and any field of `Trust` by its name (`adapt="none"`).

    A NaN or inf in a gradient reaches its own tensor and no other; `DataParallel` refuses it by name before.

    Args:
        params: parameters or groups of them.
        lr: learning rate; typically far above SGD's, since each step is `lr * coefficient * |w|` long.
        momentum: how much of the last step goes on.
        weight_decay: pulls adapted tensors towards zero; part of the ratio's denominator.
        nesterov: look ahead along the buffer.
        lr_in_buffer: put the learning rate inside the momentum buffer, as the paper does; False applies it to the
            buffer, as torch's SGD and most implementations of LARS do. The same while the rate is constant.
        trust: how the ratio is taken.

    Cost: one buffer of the parameters' size; one wait for the device per update, to read all norms. No communication.

    Error: none in float64 against `lars_update`.

    Source: You et al. 2017, algorithm 1; the paper adapts every tensor, this leaves out vectors unless told.

    Raises:
        ValueError: an argument is out of range, a parameter is not real, a gradient is sparse.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        lr_in_buffer: bool = True,
        trust: Trust | None = None,
    ) -> None:
        trust = trust or Trust(coefficient=0.001)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults | {"lr_in_buffer": lr_in_buffer} | trust.as_dict())

    def _check(self, group: Group) -> None:
        trust_of(group)
        check_number("LARS: lr", group["lr"])
        check_number("LARS: momentum", group["momentum"], below=1.0)
        check_number("LARS: weight_decay", group["weight_decay"])
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("LARS: nesterov looks ahead along the momentum, which is 0; pass a momentum above 0")

    def _update(self, parameters: list[Tensor], group: Group) -> None:
        trust = trust_of(group)
        for adapted in (True, False):
            some = [parameter for parameter in parameters if trust.adapts(parameter) is adapted]
            if some:
                self._move(some, group, trust, adapted=adapted)

    def _move(self, parameters: list[Tensor], group: Group, trust: Trust, *, adapted: bool) -> None:
        """Update tensors. All of them are adapted, or none; so weight decay applies to all or none, too."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        decay = float(group["weight_decay"]) if trust.decays(parameters[0]) else 0.0
        lr, momentum = float(group["lr"]), float(group["momentum"])
        inside, outside = (lr, 1.0) if group["lr_in_buffer"] else (1.0, lr)
        scales = [inside] * len(parameters)
        if adapted:
            weight_norms, gradient_norms = norms(parameters, gradients)
            lengths = [g + decay * w for g, w in zip(gradient_norms, weight_norms, strict=True)]
            scales = [inside * ratio for ratio in ratios(weight_norms, lengths, trust)]
        buffers = self._buffers(parameters) if momentum else []
        if momentum:
            torch._foreach_mul_(buffers, momentum)
            add_scaled(buffers, gradients, scales)
            if decay:
                add_scaled(buffers, parameters, [scale * decay for scale in scales])
        if not momentum or group["nesterov"]:  # this gradient's own step, in addition to the buffer's
            if decay:
                torch._foreach_mul_(parameters, [1 - outside * scale * decay for scale in scales])
            add_scaled(parameters, gradients, [-outside * scale for scale in scales])
        if momentum:
            torch._foreach_add_(parameters, buffers, alpha=-outside * (momentum if group["nesterov"] else 1.0))

    def _buffers(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]
