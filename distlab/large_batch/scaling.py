"""What to do with the learning rate when the batch grows, and how to get there.

k times the batch means k times fewer updates per epoch. *Linear scaling* makes each k times as long: k small steps and
one large one then cover the same way, as long as the gradient does not change much on it. *Square-root scaling* keeps
the noise: the mean of k times as many samples has 1/sqrt(k) of the deviation, and Adam divides a gradient by its own
size, in which noise is the larger part. Both break where the gradient turns within one step, first at the start of
training: hence *warmup*, a rate that rises to its peak over some updates.

A rate is a function of the update's number alone (`LearningRateSchedule.at`). Code that changes the rate it finds, by a
factor or only while it warms up, goes wrong when a run is resumed: it finds the rate of the checkpoint and takes it for
the peak.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", sections 2.1 and 2.2 (linear, gradual warmup). Krizhevsky
2014, "One weird trick for parallelizing convolutional neural networks" (square root). Malladi et al. 2022,
"On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (square root for Adam).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from distlab.large_batch.trust import check_number

DECAYS = ("constant", "linear", "cosine")


def linear_scaled_lr(lr: float, batch: int, base_batch: int) -> float:
    """Return the rate for a batch, in proportion to it, where `lr` was good for `base_batch`.

    Raises:
        ValueError: a batch is not a whole number of at least 1.
    """
    return lr * _times(batch, base_batch)


def sqrt_scaled_lr(lr: float, batch: int, base_batch: int) -> float:
    """Return the rate for a batch, in proportion to its root, where `lr` was good for `base_batch`.

    Raises:
        ValueError: a batch is not a whole number of at least 1.
    """
    return lr * math.sqrt(_times(batch, base_batch))


def warmup_factor(step: int, num_warmup: int) -> float:
    """Return the share of the peak rate at an update, counted from 0: 1/n, 2/n, ..., 1, and 1 ever after.

    The first update is not at zero: it would be wasted.

    Raises:
        ValueError: a number is below 0.
    """
    for name, value in (("step", step), ("num_warmup", num_warmup)):
        check_number(name, value)
    return min(1.0, (step + 1) / num_warmup) if num_warmup else 1.0


@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rate of every update: up to the peak, then down.

    Attributes:
        peak_lr: highest rate.
        num_steps: updates of the whole run; where the decay ends.
        num_warmup: updates on the way up, of num_steps.
        decay: "constant", "linear" or "cosine", from the end of the warmup on.
        final_lr: rate at the end of the decay.
    """

    peak_lr: float
    num_steps: int
    num_warmup: int = 0
    decay: str = "constant"
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        check_number("LearningRateSchedule: peak_lr", self.peak_lr)
        check_number("LearningRateSchedule: final_lr", self.final_lr)
        if self.num_steps < 1 or not 0 <= self.num_warmup <= self.num_steps:
            raise ValueError(
                f"LearningRateSchedule: {self.num_warmup} updates of warmup in a run of {self.num_steps}; "
                "pass at least 1 update, and no more for the warmup than there are"
            )
        if self.decay not in DECAYS:
            raise ValueError(f"LearningRateSchedule: decay is {self.decay!r}; pass one of {', '.join(DECAYS)}")

    def at(self, step: int) -> float:
        """Return the rate of an update, counted from 0; past the end it stays as at the end."""
        if step < self.num_warmup:
            return self.peak_lr * warmup_factor(step, self.num_warmup)
        done = min(1.0, (step - self.num_warmup) / max(1, self.num_steps - self.num_warmup))
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[self.decay]
        return self.final_lr + (self.peak_lr - self.final_lr) * left

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Give every group the rate of an update, times the group's own "lr_scale" where it has one.

        Call it before each update with the number of updates made so far: that number is all a checkpoint needs.
        """
        rate = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        return rate


def _times(batch: int, base_batch: int) -> float:
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}; pass a whole number of samples, at least 1")
    return batch / base_batch
