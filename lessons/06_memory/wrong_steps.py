"""Wrong versions of accumulating, scaling the loss, and updating float32 masters."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction=reduction)


def accumulate_sum_of_means(model: nn.Module, microbatches: Batches) -> float:
    """Add up the means."""
    for inputs, targets in microbatches:
        loss = _loss(model, inputs, targets, "mean")
        loss.backward()
    return loss.item()


def accumulate_mean_of_means(model: nn.Module, microbatches: Batches) -> float:
    """Let each micro-batch count the same, however many tokens it has."""
    mean = 0.0
    for inputs, targets in microbatches:
        loss = _loss(model, inputs, targets, "mean") / len(microbatches)
        loss.backward()
        mean += loss.item()
    return mean


def accumulate_after_zero(model: nn.Module, microbatches: Batches) -> float:
    """Throw away what was accumulated."""
    count, mean = sum(targets.numel() for _, targets in microbatches), 0.0
    for inputs, targets in microbatches:
        model.zero_grad()
        loss = _loss(model, inputs, targets, "sum") / count
        loss.backward()
        mean += loss.item()
    return mean


def accumulate_one_batch(model: nn.Module, microbatches: Batches) -> float:
    """Put the micro-batches together again."""
    inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss = _loss(model, inputs, targets, "mean")
    loss.backward()
    return loss.item()


def accumulate_kept_graphs(model: nn.Module, microbatches: Batches) -> float:
    """Keep every loss with all that it was made from."""
    count = sum(targets.numel() for _, targets in microbatches)
    losses = []
    for inputs, targets in microbatches:
        losses.append(_loss(model, inputs, targets, "sum") / count)
        losses[-1].backward(retain_graph=True)
    return sum(loss.item() for loss in losses)


def _all_finite(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.isfinite().all() for gradient in gradients]).all()


def _decide(
    gradients: list[Tensor], overflow: bool, scale: float, streak: int, interval: int
) -> tuple[bool, float, int]:
    if overflow:
        return False, scale / 2, 0
    for gradient in gradients:
        gradient.div_(scale)
    return (True, scale * 2, 0) if streak + 1 == interval else (True, scale, streak + 1)


def _share(overflow: Tensor, op: dist.ReduceOp = dist.ReduceOp.MAX) -> bool:
    shared = overflow.float()
    dist.all_reduce(shared, op)
    return bool(shared.item() > 0)


def scaler_alone(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Decide from this rank's gradients."""
    return _decide(gradients, not bool(_all_finite(gradients)), scale, streak, interval)


def scaler_in_a_branch(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Tell the others only where there is something to tell."""
    overflow = not bool(_all_finite(gradients))
    if overflow:
        _share(torch.ones(()))
    return _decide(gradients, overflow, scale, streak, interval)


def scaler_min(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Skip if every rank overflows."""
    overflow = _share(~_all_finite(gradients), dist.ReduceOp.MIN)
    return _decide(gradients, overflow, scale, streak, interval)


def scaler_nan_only(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Look for NaN."""
    overflow = _share(torch.stack([gradient.isnan().any() for gradient in gradients]).any())
    return _decide(gradients, overflow, scale, streak, interval)


def scaler_first_gradient(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Look at one gradient."""
    return _decide(gradients, _share(~_all_finite(gradients[:1])), scale, streak, interval)


def scaler_not_unscaled(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Leave the gradients as they are."""
    return _decide([], _share(~_all_finite(gradients)), scale, streak, interval)


def scaler_into_list(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Put new tensors into the list, and leave the gradients as they are."""
    update, next_scale, next_streak = _decide([], _share(~_all_finite(gradients)), scale, streak, interval)
    gradients[:] = [gradient / scale for gradient in gradients]
    return update, next_scale, next_streak


def scaler_next_scale(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Grow first, then divide by the scale."""
    if _share(~_all_finite(gradients)):
        return False, scale / 2, 0
    streak += 1
    if streak == interval:
        scale, streak = scale * 2, 0
    for gradient in gradients:
        gradient.div_(scale)
    return True, scale, streak


def scaler_streak_goes_on(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Count good steps whether or not they come in a row."""
    update, next_scale, next_streak = _decide(gradients, _share(~_all_finite(gradients)), scale, streak, interval)
    return update, next_scale, next_streak if update else streak


def scaler_never_grows(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Halve, and never double."""
    update, next_scale, next_streak = _decide(gradients, _share(~_all_finite(gradients)), scale, streak, interval)
    return update, min(scale, next_scale), next_streak


def scaler_call_each(gradients: list[Tensor], scale: float, streak: int, interval: int) -> tuple[bool, float, int]:
    """Ask once for each gradient."""
    found = [_share(~gradient.isfinite().all()) for gradient in gradients]
    return _decide(gradients, any(found), scale, streak, interval)


def master_ignored(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Update the 16-bit weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.sub_(lr * gradient)
        weight.add_(0.0)


def master_rebuilt(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Begin at the 16-bit weights in each step."""
    for weight, master, gradient in zip(weights, masters, gradients, strict=True):
        master.copy_(weight.float() - lr * gradient.float())
        weight.copy_(master)


def master_not_copied(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Forget the weights."""
    for master, gradient in zip(masters, gradients, strict=True):
        master.sub_(lr * gradient.float())


def master_rounded_product(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Multiply in 16 bits."""
    for weight, master, gradient in zip(weights, masters, gradients, strict=True):
        master.sub_(lr * gradient)
        weight.copy_(master)


def master_as_weight(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Make the weights float32."""
    for weight, master, gradient in zip(weights, masters, gradients, strict=True):
        master.sub_(lr * gradient.float())
        weight.data = master.clone()


def master_rebound(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Write into new tensors."""
    for index, (master, gradient) in enumerate(zip(list(masters), gradients, strict=True)):
        master = master - lr * gradient.float()
        weight = weights[index]
        weight = master.bfloat16()  # noqa: F841


def master_all_at_once(weights: list[Tensor], masters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    """Turn all gradients into float32 first."""
    wide = [gradient.float() for gradient in gradients]
    for weight, master, gradient in zip(weights, masters, wide, strict=True):
        master.sub_(lr * gradient)
        weight.copy_(master)
