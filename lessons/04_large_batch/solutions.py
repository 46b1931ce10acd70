"""Reference solutions of lesson 4: a rate that grows with the batch, accumulation, LARS, LAMB, warmup that survives.

The library's own versions, for many tensors at once and with every option, are in `distlab.large_batch`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def learning_rate(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Return the rate of an update: scaled linearly with the batch, and warmed up.

    Args:
        step: number of the update, from 0.
        base_lr: rate that was good for base_batch samples.
        batch: samples in the batch now.
        base_batch: samples in the batch then.
        num_warmup: updates until the full rate: update 0 has 1/num_warmup of it, update num_warmup - 1 all of it, and
            so have all later ones. 0 means no warmup.
    """
    peak = base_lr * batch / base_batch
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    return peak


def accumulate(
    model: nn.Module, microbatches: list[tuple[Tensor, Tensor]], loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Leave in each gradient that of the mean loss over all samples of all micro-batches of all ranks.

    Every rank has the same number of samples, in micro-batches whose sizes may differ.

    Args:
        model: the same on every rank, its gradients None.
        microbatches: this rank's inputs and targets, to be run one after the other.
        loss_fn: mean loss of a micro-batch's outputs and targets.
    """
    num_samples = sum(len(inputs) for inputs, _ in microbatches)
    for inputs, targets in microbatches:
        loss = loss_fn(model(inputs), targets) * (len(inputs) / num_samples)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def lars_step(
    weight: Tensor, gradient: Tensor, buffer: Tensor, *, lr: float, momentum: float, decay: float, coefficient: float
) -> tuple[Tensor, Tensor]:
    """Return the weight and the momentum buffer after one update of LARS; change none of the arguments.

    The ratio is coefficient * |weight| / (|gradient| + decay * |weight|), and 1 where either side of / is zero.
    The buffer becomes momentum * buffer + lr * ratio * (gradient + decay * weight), and is taken from the weight.
    A tensor of one dimension (a bias, the weight of a norm) has ratio 1 and no decay.
    """
    ratio = 1.0
    if weight.dim() == 1:
        decay = 0.0
    else:
        weight_norm = weight.norm()
        update_norm = gradient.norm() + decay * weight_norm
        if weight_norm > 0 and update_norm > 0:
            ratio = coefficient * weight_norm / update_norm
    buffer = momentum * buffer + lr * ratio * (gradient + decay * weight)
    return weight - buffer, buffer


def lamb_step(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight and Adam's two running means after one update of LAMB; change none of the arguments.

    mean becomes 0.9 mean + 0.1 gradient, square 0.999 square + 0.001 gradient^2. Corrected for their start at zero:
    mean / (1 - 0.9^step) and square / (1 - 0.999^step), where step counts from 1. The update is corrected mean /
    (sqrt(corrected square) + 1e-6) + decay * weight. It is stretched by the ratio |weight| / |update|, which is 1
    where one of the two is zero, and by lr, and taken from the weight. What is returned as mean and square is not
    corrected.
    """
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-6) + decay * weight
    weight_norm, update_norm = weight.norm(), update.norm()
    ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
    return weight - lr * ratio * update, mean, square


def warm_up(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Return what to call before each update, so that every group has the rate of that update.

    Args:
        optimizer: new, or loaded from a checkpoint.
        peak_lr: rate after the warmup.
        num_warmup: updates until then; update s, from 0, has (s + 1) / num_warmup of the peak, and later ones all.
        first_step: number of the first update that will be made: 0, or where the checkpoint was saved.
    """
    step = first_step

    def before_update() -> None:
        nonlocal step
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / num_warmup)
        step += 1

    return before_update
