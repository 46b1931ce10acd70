"""LAMB: Adam's direction with decoupled weight decay, in steps whose length is in proportion to the layer's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlab.large_batch.tensors import Group, LayerwiseOptimizer, add_scaled, norms, ratios, trust_of
from distlab.large_batch.trust import Trust, check_number


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments.

    A parameter group may set any of the arguments, and any field of `Trust` by its name (`adapt="none"`).

    Bias correction comes *before* the norms are taken. Where the update is adapted, a factor common to both means
    cancels. But the square's factor does not cancel with eps, and neither factor cancels where weight decay is added.
    Where the update is not adapted nothing cancels. Some public versions correct, some do not, some correct after the
    ratio.

    A NaN or inf in a gradient reaches its own tensor and no other; `DataParallel` refuses it by name before.

    Args:
        params: parameters or groups of them.
        lr: learning rate: a step of an adapted tensor is `lr` times as long as the tensor.
        betas: how much of the running means of the gradient and of its square stays.
        eps: added to the root of the running square.
        weight_decay: decoupled: part of the update, and so of the ratio.
        bias_correction: correct the running means for their start at zero; False as in Google's ALBERT.
        trust: how the ratio is taken.

    Cost: two buffers of the parameters' size; one wait for the device per update, to read all norms. No communication.

    Error: none in float64 against `lamb_update`.

    Source: You et al. 2020, algorithm 2; the paper adapts every tensor, this leaves out vectors unless told.

    Raises:
        ValueError: an argument is out of range, a parameter is not real, a gradient is sparse.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        trust: Trust | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction} | (trust or Trust()).as_dict())

    def _check(self, group: Group) -> None:
        trust_of(group)
        check_number("LAMB: lr", group["lr"])
        check_number("LAMB: eps", group["eps"], above_zero=True)
        check_number("LAMB: weight_decay", group["weight_decay"])
        if len(group["betas"]) != 2:
            raise ValueError(f"LAMB: betas are {group['betas']!r}; pass two numbers, such as (0.9, 0.999)")
        for beta in group["betas"]:
            check_number("LAMB: one of betas", beta, below=1.0)

    def _update(self, parameters: list[Tensor], group: Group) -> None:
        trust, decay, lr = trust_of(group), float(group["weight_decay"]), float(group["lr"])
        means, squares, steps = self._moments(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        # (m / c1) / (sqrt(v / c2) + eps)  =  (sqrt(c2) / c1)  m / (sqrt(v) + sqrt(c2) eps): no corrected copies needed
        correct = group["bias_correction"]
        roots = [math.sqrt(1 - beta2**step) if correct else 1.0 for step in steps]
        factors = [root / (1 - beta1**step) if correct else 1.0 for root, step in zip(roots, steps, strict=True)]
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, [root * group["eps"] for root in roots])
        updates = list(torch._foreach_mul(parameters, [decay if trust.decays(p) else 0.0 for p in parameters]))
        torch._foreach_addcdiv_(updates, means, denominators, factors)

        scales = [1.0] * len(parameters)
        adapted = [index for index, parameter in enumerate(parameters) if trust.adapts(parameter)]
        if adapted:
            weight_norms, update_norms = norms([parameters[i] for i in adapted], [updates[i] for i in adapted])
            for index, ratio in zip(adapted, ratios(weight_norms, update_norms, trust), strict=True):
                scales[index] = ratio
        add_scaled(parameters, updates, [-lr * scale for scale in scales])

    def _moments(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return each tensor's running means, and how many updates it has had, this update included."""
        means, squares, steps = [], [], []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
        return means, squares, steps
