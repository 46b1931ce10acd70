"""Wrong versions of rates and of accumulation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

Microbatches = list[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


def rate_not_scaled(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Warm up to the base rate, whatever the batch."""
    return base_lr * min(1.0, (step + 1) / num_warmup) if num_warmup else base_lr


def rate_inverse(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Divide where one multiplies."""
    peak = base_lr * base_batch / batch
    return peak * min(1.0, (step + 1) / num_warmup) if num_warmup else peak


def rate_by_root(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Scale by the root."""
    peak = base_lr * (batch / base_batch) ** 0.5
    return peak * min(1.0, (step + 1) / num_warmup) if num_warmup else peak


def rate_from_zero(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Give the first update nothing."""
    peak = base_lr * batch / base_batch
    return peak * step / num_warmup if step < num_warmup else peak


def rate_beyond_the_peak(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Never stop rising."""
    peak = base_lr * batch / base_batch
    return peak * (step + 1) / num_warmup if num_warmup else peak


def rate_divides_by_zero(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Forget that there may be no warmup."""
    return base_lr * batch / base_batch * min(1.0, (step + 1) / num_warmup)


def rate_that_jumps(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Warm up to the base rate, then go on with the full one."""
    return base_lr * (step + 1) / num_warmup if step < num_warmup else base_lr * batch / base_batch


def rate_without_warmup(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Begin with the full rate."""
    return base_lr * batch / base_batch


def rate_from_the_base(step: int, base_lr: float, *, batch: int, base_batch: int, num_warmup: int) -> float:
    """Warm up from the base rate."""
    peak = base_lr * batch / base_batch
    return base_lr + (peak - base_lr) * (step + 1) / num_warmup if step < num_warmup else peak


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def accumulate_sum(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Divide no loss."""
    for inputs, targets in microbatches:
        loss_fn(model(inputs), targets).backward()
    _average(model)


def accumulate_equally(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Count micro-batches, not samples."""
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) / len(microbatches)).backward()
    _average(model)


def accumulate_last(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Begin anew with every micro-batch."""
    for inputs, targets in microbatches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
    _average(model)


def accumulate_alone(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Forget the other ranks."""
    num_samples = sum(len(inputs) for inputs, _ in microbatches)
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) * (len(inputs) / num_samples)).backward()


def accumulate_rank_sum(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Add over ranks."""
    accumulate_alone(model, microbatches, loss_fn)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def accumulate_divided_twice(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Average over ranks, and divide once more."""
    accumulate_alone(model, microbatches, loss_fn)
    _average(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def accumulate_sums_again(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Add over ranks after every micro-batch, also what was added already."""
    num_samples = sum(len(inputs) for inputs, _ in microbatches)
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) * (len(inputs) / num_samples)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def accumulate_averages_again(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Average after every micro-batch: the mean of a mean is the mean, but three times the bytes."""
    num_samples = sum(len(inputs) for inputs, _ in microbatches)
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) * (len(inputs) / num_samples)).backward()
        _average(model)


def accumulate_at_once(model: nn.Module, microbatches: Microbatches, loss_fn: Loss) -> None:
    """Run all samples together, for which there is no memory."""
    inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss_fn(model(inputs), targets).backward()
    _average(model)


def warm_up_again(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Count from 0 after every resume."""
    step = 0

    def before_update() -> None:
        nonlocal step
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / num_warmup)
        step += 1

    return before_update


def warm_up_that_does_not_count(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Set the rate of the first update for ever."""

    def before_update() -> None:
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (first_step + 1) / num_warmup)

    return before_update


def warm_up_first_group(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Set the first group's rate."""
    step = first_step

    def before_update() -> None:
        nonlocal step
        optimizer.param_groups[0]["lr"] = peak_lr * min(1.0, (step + 1) / num_warmup)
        step += 1

    return before_update


def warm_up_from_zero(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Give the first update nothing."""
    step = first_step

    def before_update() -> None:
        nonlocal step
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, step / num_warmup)
        step += 1

    return before_update


def warm_up_only_new_runs(
    optimizer: torch.optim.Optimizer, peak_lr: float, *, num_warmup: int, first_step: int
) -> Callable[[], None]:
    """Leave a resumed run's rate alone."""
    step = first_step

    def before_update() -> None:
        nonlocal step
        if first_step == 0:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, (step + 1) / num_warmup)
        step += 1

    return before_update
