"""Muon: steps that are equally long in every direction, by products of whole matrices.

A matrix of momentum has few large singular values and many small ones: SGD and Adam step along a few directions alone.
Muon sets all singular values to about 1, U S V' -> U V', so that rare directions move too. `newton_schulz` does it with
products alone, which a GPU is fast at: each iteration puts a polynomial a s + b s^3 + c s^5 in the place of each
singular value s. Five bring all from 0.005 to 1 between 0.68 and 1.16, and that is enough.

LARS and LAMB need one number of a whole tensor, Muon the whole tensor. On shards both ask the same question: who sees
it? See `distlab.sharding.whole`.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025 (2502.16982), for
    "match_rms_adamw"; the formula is torch.optim.Muon's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from distlab.large_batch.tensors import Group, LayerwiseOptimizer
from distlab.large_batch.trust import check_number

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CHOICES = {"adjust_lr_fn": (None, "original", "match_rms_adamw"), "compute": ("bfloat16", "float32", "float64")}


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    compute: str = "bfloat16",
) -> Tensor:
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
    a, b, c = coefficients
    x = matrix.to(getattr(torch, compute), copy=True)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))  # no singular value is above the norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def step_length(shape: torch.Size, adjust_lr_fn: str | None = None) -> float:
    """Return by how much a matrix's learning rate is multiplied: "original" (None) makes a tall one's steps longer.

    With "match_rms_adamw" an element moves as far as AdamW's do, so that the rates of AdamW can be kept.
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(shape)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def muon_update(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    *,
    lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Return the weight and the momentum buffer after one update of Muon, with Nesterov's look ahead.

    Shapes: weight, gradient, buffer [M, N] -> weight [M, N], buffer [M, N]
    Cost: no communication; new tensors, the old ones are not changed.

    Source: torch.optim.Muon.
    """
    buffer = torch.lerp(buffer, gradient, 1 - momentum)
    direction = newton_schulz(torch.lerp(gradient, buffer, momentum)).to(weight.dtype)
    return weight * (1 - lr * weight_decay) - lr * step_length(weight.shape) * direction, buffer


class Muon(LayerwiseOptimizer):
    """Muon for matrices, and AdamW for what is no hidden layer's matrix, in one optimizer.

        Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=0.02)

    Embeddings, heads, norms and biases belong to a group with use_muon=False. A parameter group may set any argument.
    All are torch.optim.Muon's, and three more: `betas` of AdamW, `use_muon`, and `compute`, the type of the products:
    "bfloat16", "float32" or "float64". `eps` of an AdamW group is AdamW's. A NaN in a gradient reaches its own tensor
    and no other.

    Cost: one buffer of the parameters' size (AdamW: two); ns_steps (4 m^2 n + 2 m^3) operations a matrix. No
        communication.
    Error: none against torch.optim.Muon and torch.optim.AdamW.

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
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        use_muon: bool = True,
        compute: str = "bfloat16",
    ) -> None:
        defaults: Group = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults | {"betas": betas, "use_muon": use_muon, "compute": compute})

    def _check(self, group: Group) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_number(f"Muon: {name}", group[name], above_zero=name == "eps")
        for number in (group["momentum"], *group["betas"]):
            check_number("Muon: momentum, or one of betas,", number, below=1.0)
        if len(group["ns_coefficients"]) != 3 or group["ns_steps"] not in range(100):
            text = f"ns_steps is {group['ns_steps']!r} and ns_coefficients are {group['ns_coefficients']!r}"
            raise ValueError(f"Muon: {text}; pass 0 to 99 steps and three coefficients")
        for name, known in CHOICES.items():
            if group[name] not in known:
                raise ValueError(f"Muon: {name} is {group[name]!r}; pass one of {', '.join(map(str, known))}")
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
            options = {"lr": lr, "weight_decay": decay, "eps": group["eps"], "amsgrad": False, "maximize": False}
            beta1, beta2 = group["betas"]
            adamw(parameters, gradients, means, squares, [], steps, beta1=beta1, beta2=beta2, **options)
            return
        options = {"coefficients": group["ns_coefficients"], "eps": group["eps"], "compute": group["compute"]}
        for parameter, gradient, buffer in zip(parameters, gradients, *kept, strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            update = newton_schulz(update, group["ns_steps"], **options)
            length = lr * step_length(parameter.shape, group["adjust_lr_fn"])
            parameter.mul_(1 - lr * decay).add_(update, alpha=-length)
