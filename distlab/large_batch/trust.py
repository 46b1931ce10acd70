"""LARS and LAMB on one tensor, as the papers write them: every layer takes a step in proportion to its own length.

SGD moves a tensor w by lr * g. In a deep network |g| / |w| differs between layers by orders of magnitude, so the
learning rate that one layer needs makes a different one explode; with small batches a low rate hides that, with large
ones there are too few steps to go slowly. LARS and LAMB set the length of each tensor's step by the *trust ratio*: the
length of the weight over the length of the update. Only the direction of the update remains.

    LARS: ratio = coefficient |w| / (|g| + decay |w|);  buffer = momentum buffer + lr ratio (g + decay w);  w -= buffer
    LAMB: u = m / (sqrt(v) + eps) + decay w  (Adam's direction, with decay);  ratio = |w| / |u|;  w -= lr ratio u

Read `trust_ratio` first, then `lars_update` and `lamb_update`. They are plain and slow, and the judges of the
optimizers in `lars` and `lamb`, which do the same for many tensors at once.

Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks" (LARS), algorithm 1. You et al.
2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (LAMB), algorithm 2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

ADAPT = ("matrices", "all", "none")


@dataclass(frozen=True)
class Trust:
    """How the trust ratio is taken, where the papers leave room and implementations differ.

    Attributes:
        adapt: whose step is set by a ratio. "matrices": tensors of two dimensions or more; biases and the weights of
            norms are neither adapted nor decayed, as Google's ALBERT does with LAMB. "all": every tensor. "none": no
            tensor; LARS is then SGD and LAMB is AdamW.
        coefficient: multiplies the ratio; the LARS paper's eta (0.001 there), 1 for LAMB.
        max_ratio: upper limit of the ratio, or None. The LAMB paper has none; several implementations clip at 10.
        max_weight_norm: upper limit of the weight's norm in the ratio, or None: the paper's phi(z) = min(z, limit).
            It does not limit the ratio: implementations often confuse the two, and clip at 10 the wrong one.
        ratio_eps: added to the denominator of the ratio; the papers have none.
    """

    adapt: str = "matrices"
    coefficient: float = 1.0
    max_ratio: float | None = None
    max_weight_norm: float | None = None
    ratio_eps: float = 0.0

    def __post_init__(self) -> None:
        if self.adapt not in ADAPT:
            raise ValueError(f"Trust: adapt is {self.adapt!r}; pass one of {', '.join(ADAPT)}")
        check_number("Trust: coefficient", self.coefficient, above_zero=True)
        check_number("Trust: ratio_eps", self.ratio_eps)
        for name in ("max_ratio", "max_weight_norm"):
            if (limit := getattr(self, name)) is not None:
                check_number(f"Trust: {name}", limit, above_zero=True)

    def adapts(self, tensor: Tensor) -> bool:
        """Whether this tensor's step is set by a trust ratio."""
        return self.adapt == "all" or (self.adapt == "matrices" and tensor.dim() >= 2)

    def decays(self, tensor: Tensor) -> bool:
        """Whether weight decay applies to this tensor."""
        return self.adapt != "matrices" or tensor.dim() >= 2

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for a parameter group: what a checkpoint holds must load without our classes."""
        return asdict(self)


class Moments(NamedTuple):
    """Adam's memory of one tensor: the running means of the gradient and of its square, and the updates so far."""

    mean: Tensor
    square: Tensor
    step: int


def trust_ratio(weight_norm: float, update_norm: float, trust: Trust | None = None) -> float:
    """Return by how much to stretch an update, so that its length is in proportion to the weight's.

    It is 1 where either norm is zero: a weight that starts at zero could otherwise never leave, and 0 / 0 is NaN. The
    papers do not say. A norm that is NaN stays NaN: a broken gradient shall be seen.
    """
    trust = trust or Trust()
    if weight_norm == 0.0 or update_norm == 0.0:
        return 1.0
    if trust.max_weight_norm is not None:
        weight_norm = min(trust.max_weight_norm, weight_norm) if not math.isnan(weight_norm) else weight_norm
    ratio = trust.coefficient * weight_norm / (update_norm + trust.ratio_eps)
    if trust.max_ratio is not None and ratio > trust.max_ratio:
        return trust.max_ratio
    return ratio


def lars_update(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    coefficient: float = 0.001,
) -> tuple[Tensor, Tensor]:
    """Return the weight and the momentum buffer after one update of the LARS paper.

    The learning rate is *inside* the buffer: a rate that falls reaches the weight only as old steps fade.

    Shapes: weight, gradient, buffer [...] -> weight [...], buffer [...]
    Cost: no communication; new tensors, the old ones are not changed.

    Source: You et al. 2017, algorithm 1. Zero norms: see `trust_ratio`.
    """
    denominator = gradient.norm() + weight_decay * weight.norm()  # decay counts here too, or it outgrows the gradient
    ratio = trust_ratio(float(weight.norm()), float(denominator), Trust(coefficient=coefficient))
    buffer = momentum * buffer + lr * ratio * (gradient + weight_decay * weight)
    return weight - buffer, buffer


def lamb_update(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Moments]:
    """Return the weight and the moments after one update of the LAMB paper.

    Shapes: weight, gradient, both moments [...] -> weight [...], both moments [...]
    Cost: no communication; new tensors, the old ones are not changed.

    Source: You et al. 2020, algorithm 2, with its bias correction and phi(z) = z. Zero norms: see `trust_ratio`.
    """
    beta1, beta2 = betas
    step = moments.step + 1
    mean = beta1 * moments.mean + (1 - beta1) * gradient
    square = beta2 * moments.square + (1 - beta2) * gradient**2
    corrected_mean, corrected_square = mean / (1 - beta1**step), square / (1 - beta2**step)
    update = corrected_mean / (corrected_square.sqrt() + eps) + weight_decay * weight
    ratio = trust_ratio(float(weight.norm()), float(update.norm()))
    return weight - lr * ratio * update, Moments(mean, square, step)


def check_number(what: str, value: Any, *, above_zero: bool = False, below: float | None = None) -> None:
    """Refuse what is not a finite number of at least 0.

    Raises:
        ValueError: says what was got and what to pass.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above_zero and value == 0) or (below is not None and value >= below):
        least = "above 0" if above_zero else "of at least 0"
        limit = "" if below is None else f" and below {below:g}"
        raise ValueError(f"{what} is {value!r}; pass a finite number {least}{limit}")
