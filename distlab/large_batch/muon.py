"""Muon: steps that are equally long in every direction, by products of whole matrices.

A matrix of momentum has few large singular values and many small ones: SGD and Adam step along a few directions alone.
Muon sets all singular values to about 1, U S V' -> U V', so that rare directions move too. `newton_schulz` does it with
products alone, which a GPU is fast at: each iteration puts a polynomial a s + b s^3 + c s^5 in the place of each
singular value s. LARS and LAMB need one number of a whole tensor, Muon the whole tensor: see `distlab.sharding.whole`.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; torch.optim.Muon's formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from distlab.large_batch.tensors import Group, LayerwiseOptimizer
from distlab.large_batch.trust import check_number

A, B, C = 3.4445, -4.7750, 2.0315
COMPUTE = ("bfloat16", "float32", "float64")


def newton_schulz(matrix: Tensor, steps: int = 5, *, compute: str = "bfloat16") -> Tensor:
    """Return a matrix with the singular vectors of this one, and singular values of about 1; zeros stay zeros.

    Shapes: matrix [M, N] -> [M, N], in the type of the products, `compute`
    Cost: steps (4 m^2 n + 2 m^3) operations, m <= n the sides. No communication.
    Error: singular values from 0.005 to 1 of the norm become 0.68 to 1.16 in 5 steps, in exact products.

    Raises:
        ValueError: the tensor is no matrix.
    """
    if matrix.dim() != 2:
        raise ValueError(
            f"Muon: a tensor of shape {list(matrix.shape)} is no matrix; put its parameter in a group with "
            "use_muon=False, which AdamW updates"
        )
    x = matrix.to(getattr(torch, compute), copy=True)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=1e-7))  # no singular value is above the norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


class Muon(LayerwiseOptimizer):
    """Muon for matrices, with Nesterov's look ahead, and AdamW for what is no hidden layer's matrix.

        Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=0.02)

    Embeddings, heads, norms and biases belong to a group with use_muon=False. A group may set any argument; `compute`
    is the type of the products. A NaN in a gradient reaches its own tensor and no other.

    Cost: one buffer of the parameters' size (AdamW: two); ns_steps (4 m^2 n + 2 m^3) operations a matrix. No
        communication.
    Error: none against torch.optim.Muon and torch.optim.AdamW, with their other options as torch has them.

    Raises:
        ValueError: an argument is out of range, a parameter is not real or no matrix, a gradient is sparse.

    Source: torch.optim.Muon; the groups are those of Jordan's MuonWithAuxAdam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        use_muon: bool = True,
        compute: str = "bfloat16",
    ) -> None:
        defaults: Group = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps}
        super().__init__(params, defaults | {"use_muon": use_muon, "compute": compute})

    def _check(self, group: Group) -> None:
        check_number("Muon: lr", group["lr"])
        check_number("Muon: weight_decay", group["weight_decay"])
        check_number("Muon: momentum", group["momentum"], below=1.0)
        if group["ns_steps"] not in range(100) or group["compute"] not in COMPUTE:
            text = f"ns_steps is {group['ns_steps']!r} and compute is {group['compute']!r}"
            raise ValueError(f"Muon: {text}; pass 0 to 99 steps and one of {', '.join(COMPUTE)}")
        for parameter in group["params"] if group["use_muon"] else ():
            if parameter.dim() != 2:
                newton_schulz(parameter)  # says what to do

    def _update(self, parameters: list[Tensor], group: Group) -> None:
        lr, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        keys = ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq", "step")
        for parameter in parameters:
            for key in keys if not self.state[parameter] else ():
                self.state[parameter][key] = torch.tensor(0.0) if key == "step" else torch.zeros_like(parameter)
        kept = [[self.state[parameter][key] for parameter in parameters] for key in keys]
        if not group["use_muon"]:
            means, squares, steps = kept
            options: Group = {"lr": lr, "weight_decay": decay, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
            adamw(parameters, gradients, means, squares, [], steps, amsgrad=False, maximize=False, **options)
            return
        for parameter, gradient, buffer in zip(parameters, gradients, *kept, strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            update = newton_schulz(gradient.lerp(buffer, momentum), group["ns_steps"], compute=group["compute"])
            rows, columns = parameter.shape
            parameter.mul_(1 - lr * decay).add_(update, alpha=-lr * math.sqrt(max(1, rows / columns)))
