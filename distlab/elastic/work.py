"""What a run does at each number of ranks: how many samples a step takes, which, and at which learning rate.

All of it is a function of one number, the samples that were used up before: the *position*. A checkpoint holds it. The
ranks that take up the checkpoint, however many, deal out what lies behind it. So no sample is taken twice or lost.

Two rules say what becomes of a step when there are more or fewer ranks:

- The batch stays. Each rank takes a smaller or larger part of it, and the learning rate stays as well. The run makes
  the steps of the uninterrupted one, up to the order in which numbers are added.
- Each rank's part stays. The batch grows with the ranks, and the learning rate with the batch: linearly (SGD), or with
  its root (Adam). See `distlab.large_batch.scaling`. This is a different run, which sees the same samples.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1 (linear); Malladi et al. 2022, "On the SDEs and
Scaling Rules for Adaptive Gradient Algorithms" (root).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from distlab.large_batch import LearningRateSchedule, linear_scaled_lr, sqrt_scaled_lr
from distlab.plan.require import require_count

_SCALED: dict[str, Callable[[float, int, int], float]] = {
    "same": lambda lr, batch, base: lr,
    "linear": linear_scaled_lr,
    "sqrt": sqrt_scaled_lr,
}


@dataclass(frozen=True)
class BatchRule:
    """How many samples a step takes on any number of ranks, and what becomes of the learning rate.

        BatchRule(64)                               # 64 samples per step, on any number of ranks
        BatchRule(64, world_size=4, lr="linear")    # 16 per rank; on 8 ranks 128 per step at twice the rate

    Attributes:
        batch: samples of a step, over all ranks.
        world_size: how many ranks share `batch`, where the batch grows with the ranks; None: it stays.
        lr: how the learning rate follows the batch: "same" where it stays, else "linear" or "sqrt".
    """

    batch: int
    world_size: int | None = None
    lr: str = "same"

    def __post_init__(self) -> None:
        require_count("BatchRule", batch=self.batch, world_size=1 if self.world_size is None else self.world_size)
        if self.lr not in _SCALED or (self.lr == "same") != (self.world_size is None):
            raise ValueError(
                f"BatchRule: world_size is {self.world_size} and lr {self.lr!r}; pass both, with lr='linear' or "
                "'sqrt', or neither: the batch and the rate stay"
            )
        if self.world_size is not None and self.batch % self.world_size:
            raise ValueError(
                f"BatchRule: {self.world_size} ranks cannot share a batch of {self.batch} evenly; pass a multiple of "
                f"{self.world_size}"
            )

    def batch_on(self, world_size: int) -> int:
        """Return the samples of a step.

        Raises:
            ValueError: some ranks would have none.
        """
        if self.world_size is not None:
            return self.batch // self.world_size * world_size
        if self.batch < world_size:
            raise ValueError(
                f"a batch of {self.batch} leaves some of {world_size} ranks without a sample; start at most "
                f"{self.batch} ranks, or let the batch grow: BatchRule(batch, world_size=..., lr='linear')"
            )
        return self.batch


@dataclass(frozen=True)
class Work:
    """What a run has to do: the same at each of its starts.

    Attributes:
        rule: samples of a step.
        num_samples: in the dataset.
        num_epochs: how often each is used.
        seed: of the order of samples, which is a new one each epoch.
        lr: learning rate of `rule.batch`, or a schedule counted in updates of `rule.batch`; None leaves the rate alone.
    """

    rule: BatchRule
    num_samples: int
    num_epochs: int = 1
    seed: int = 0
    lr: float | LearningRateSchedule | None = None

    def __post_init__(self) -> None:
        require_count("Work", num_samples=self.num_samples, num_epochs=self.num_epochs)
        if isinstance(self.lr, float | int) and not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"Work: lr is {self.lr!r}; pass a number, at least 0, a LearningRateSchedule, or None")
        if self.lr is None and self.rule.lr != "same":
            raise ValueError(f"Work: the rule changes the learning rate ({self.rule.lr}) and lr is None; pass lr=...")
        if self.rule.batch > self.num_samples * self.num_epochs:
            raise ValueError(
                f"Work: a batch of {self.rule.batch} is more than the run's {self.num_samples * self.num_epochs} "
                "samples (num_samples x num_epochs); use a smaller batch or more epochs"
            )

    @property
    def end(self) -> int:
        """The position at which the run is over."""
        return self.num_samples * self.num_epochs

    def batch_at(self, position: int, world_size: int) -> int:
        """Return the samples of the step that begins at a position; the run's last step takes the rest, up to twice.

        Raises:
            ValueError: some ranks would have none.
        """
        batch, rest = self.rule.batch_on(world_size), self.end - position
        if rest < world_size:
            raise ValueError(
                f"{rest} of the run's {self.end} samples are left for {world_size} ranks; start at most {rest}"
            )
        return batch if rest >= 2 * batch else rest

    def lr_at(self, position: int, world_size: int) -> float | None:
        """Return the learning rate of the step that begins at a position; None where it is left alone."""
        if self.lr is None:
            return None
        schedule = self.lr
        base = schedule.at(position // self.rule.batch) if isinstance(schedule, LearningRateSchedule) else schedule
        return _SCALED[self.rule.lr](base, self.rule.batch_on(world_size), self.rule.batch)

    def set_lr(self, parts: Iterable[object], position: int, world_size: int) -> float | None:
        """Give the optimizers among some parts the rate of the step that begins at a position, and return it."""
        lr = self.lr_at(position, world_size)
        for group in [one for part in parts if isinstance(part, Optimizer) for one in part.param_groups]:
            if lr is not None:
                group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def facts(self) -> dict[str, Any]:
        """Return what may not change during a run, or samples would be taken twice and others never."""
        return {"num_samples": self.num_samples, "seed": self.seed, "rule": asdict(self.rule)}


@dataclass(frozen=True)
class Step:
    """One step of a run, as one rank has it.

    Attributes:
        number: updates made before.
        position: samples that all ranks together used up before.
        batch: samples of all ranks in this step.
        samples: [batch/world_size] this rank's, as indices of the dataset.
        weight: what to multiply this rank's mean loss by, so that gradients' mean over ranks is that over samples.
        lr: learning rate, which the optimizers among the run's parts have already; None where it is left alone.
    """

    number: int
    position: int
    batch: int
    samples: Tensor
    weight: float
    lr: float | None
