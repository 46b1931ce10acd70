"""Wrong versions of LARS and LAMB, most of them seen in public implementations."""

from __future__ import annotations

from torch import Tensor

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def lars_without_decay_in_the_ratio(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Take the ratio of the bare gradient."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    elif weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * weight.norm() / gradient.norm()
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_norm_of_the_sum(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Take the length of gradient and decay together."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    elif weight.norm() > 0 and (gradient + decay * weight).norm() > 0:
        ratio = coefficient * weight.norm() / (gradient + decay * weight).norm()
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_on_everything(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Adapt and decay biases too."""
    ratio = 1.0
    if weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * weight.norm() / (gradient.norm() + decay * weight.norm())
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_stuck_at_zero(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Let a weight of zeros have ratio 0."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    else:
        ratio = coefficient * weight.norm() / (gradient.norm() + decay * weight.norm() + 1e-12)
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_with_the_rate_outside(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Keep the rate out of the buffer, as SGD does."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    elif weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * weight.norm() / (gradient.norm() + decay * weight.norm())
    buffer = momentum * buffer + ratio * (gradient + decay * weight)
    return weight - lr * buffer, buffer


def lars_upside_down(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Take long steps where the weight is short."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    elif weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * (gradient.norm() + decay * weight.norm()) / weight.norm()
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_decays_biases(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Leave biases out of the ratio, but not of decay."""
    ratio = 1.0
    if weight.dim() > 1 and weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * weight.norm() / (gradient.norm() + decay * weight.norm())
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lars_in_place(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> Pair:
    """Write into what was given."""
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    elif weight.norm() > 0 and gradient.norm() + decay * weight.norm() > 0:
        ratio = coefficient * weight.norm() / (gradient.norm() + decay * weight.norm())
    buffer.mul_(momentum).add_(lr * ratio * (gradient + decay * weight))
    return weight - buffer, buffer


def _means(gradient: Tensor, mean: Tensor, square: Tensor) -> Pair:
    return 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2


def _ratio(weight: Tensor, update: Tensor) -> Tensor | float:
    return weight.norm() / update.norm() if weight.norm() > 0 and update.norm() > 0 else 1.0


def lamb_not_corrected(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Use the running means as they are."""
    mean, square = _means(gradient, mean, square)
    update = mean / (square.sqrt() + 1e-6) + decay * weight
    return weight - lr * _ratio(weight, update) * update, mean, square


def lamb_returns_corrected(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Hand the corrected means back, to be corrected again."""
    mean, square = _means(gradient, mean, square)
    mean, square = mean / (1 - 0.9**step), square / (1 - 0.999**step)
    update = mean / (square.sqrt() + 1e-6) + decay * weight
    return weight - lr * _ratio(weight, update) * update, mean, square


def lamb_ratio_before_correction(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Measure one update and make another."""
    mean, square = _means(gradient, mean, square)
    measured = mean / (square.sqrt() + 1e-6) + decay * weight
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    return weight - lr * _ratio(weight, measured) * update, mean, square


def lamb_decay_outside(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Decay beside the ratio, as AdamW would."""
    mean, square = _means(gradient, mean, square)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6)
    return weight - lr * _ratio(weight, update) * update - lr * decay * weight, mean, square


def lamb_clipped(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Clip the weight's norm at 10, as one implementation had it and others took over."""
    mean, square = _means(gradient, mean, square)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    norm = weight.norm().clamp(0, 10)
    ratio = norm / update.norm() if norm > 0 and update.norm() > 0 else 1.0
    return weight - lr * ratio * update, mean, square


def lamb_stuck_at_zero(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Let a weight of zeros have ratio 0."""
    mean, square = _means(gradient, mean, square)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    ratio = weight.norm() / update.norm() if update.norm() > 0 else 1.0
    return weight - lr * ratio * update, mean, square


def lamb_divides_by_zero(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Look at one norm only."""
    mean, square = _means(gradient, mean, square)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    ratio = weight.norm() / update.norm() if weight.norm() > 0 else 1.0
    return weight - lr * ratio * update, mean, square


def lamb_of_the_gradient(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> Triple:
    """Take LARS's ratio."""
    mean, square = _means(gradient, mean, square)
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    return weight - lr * _ratio(weight, gradient) * update, mean, square
