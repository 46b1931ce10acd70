"""Dynamic loss scaling: keep float16 gradients between too small and too large, and all ranks of one mind about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.structures import replace
from distlab.comm.agree import group_device
from distlab.precision.half import HALF
from distlab.precision.master_weights import MasterWeights

LARGEST_SCALE = 2.0**100  # gradients that are all zero would let it grow forever
SMALLEST_SCALE = 2.0**-20  # a scaler that has come here fights NaN, not overflow

Losses = TypeVar("Losses")


class Steps(Protocol):
    """Any optimizer: torch's, MasterWeights, a sharded one."""

    def step(self) -> object:
        """Update the parameters."""


class LossScaler:
    """Dynamic loss scaling: the largest factor that does not overflow, found by trying, the same on all ranks.

    A step: `scale(loss).backward()`, average, `unscale_(parameters)`, clip, `step(optimizer, parameters)`, `update()`.
    `step` unscales what `unscale_` was not given. Average with `check_finite=False`: here an overflow is not an error.
    Each of several optimizers has a `step` of its own, which is skipped where its parameters overflowed and done where
    they did not; `update` comes once, at the end.

    Args:
        initial: the first factor. A power of two, times powers of two, loses no bits.
        growth: what to multiply it by after `interval` good steps in a row.
        backoff: what to multiply it by after an overflow.
        interval: good steps between growths.
        group: ranks that skip together: all that hold replicas or shards of one model. None is all ranks.

    Attributes:
        value: the factor now.
        num_skipped: steps so far in which something was skipped.

    Cost: one all-reduce of one element (4 bytes) for each `step`, and for each `unscale_`. Ranks that decide alone go
        apart at the first overflow, or hang: with sharded gradients only the rank that holds the overflow sees it.
    Error: exact for powers of two, apart from what underflowed.

    Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        group: ProcessGroup | None = None,
    ) -> None:
        if not (SMALLEST_SCALE <= initial <= LARGEST_SCALE and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError(
                f"initial {initial}, growth {growth}, backoff {backoff}, interval {interval}; pass an initial of "
                f"{SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, growth >= 1, backoff between 0 and 1, interval >= 1"
            )
        self.value, self.group, self.num_skipped = float(initial), group, 0
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._good_steps = 0
        self._begin()

    def _begin(self) -> None:
        """Forget what became of this step."""
        self._finite: bool | None = None  # once it is known
        self._overflowed: dict[nn.Parameter, bool] = {}  # of those that are unscaled
        self._stepped: list[Steps] = []

    def scale(self, loss: Losses) -> Losses:
        """Return the loss times the factor, in float32 at least: the product may be too large for half precision.

        Of several losses, in lists, tuples or dicts, each.

        Raises:
            ValueError: something in them is no tensor.
        """
        return cast(Losses, replace(loss, self._times))

    def _times(self, loss: object) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ValueError(f"scale got a {type(loss).__name__}; pass a tensor, or lists, tuples and dicts of tensors")
        return (loss.float() if loss.dtype in HALF else loss) * self.value

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the factor; return whether they are finite on all ranks.

        Raises:
            ValueError: before any message: a float16 parameter, whose gradient would underflow again.
            RuntimeError: one of them was unscaled before in this step.
        """
        wanted = dict.fromkeys(parameters)
        if not self._overflowed.keys().isdisjoint(wanted):
            raise RuntimeError("the gradients were unscaled before in this step; call update() at its end")
        return self._unscale(wanted)

    def step(self, optimizer: Steps, parameters: Iterable[nn.Parameter]) -> bool:
        """Step the optimizer if the gradients are finite on all ranks; return whether it was done.

        The parameters are all that it updates: those of `unscale_`, or others, which are unscaled here.

        Raises:
            ValueError: before any message: the optimizer updates others too, whose gradients are still scaled; or as
                `unscale_`.
            RuntimeError: it has stepped since the last `update`.
        """
        wanted, inner = dict.fromkeys(parameters), getattr(optimizer, "optimizer", optimizer)
        if any(one is optimizer for one in self._stepped):
            raise RuntimeError("this optimizer has stepped since the last update(); call update() at the end of a step")
        if isinstance(optimizer, MasterWeights):
            optimizer.accumulate()
        updates = [one for group in getattr(inner, "param_groups", ()) for one in group["params"]]
        left = [p for p in updates if p.grad is not None and p not in wanted and p not in self._overflowed]
        if left:
            raise ValueError(
                f"the optimizer updates {len(left)} parameters more than were given, and their gradients are still "
                f"{self.value:g} times too large; pass all that it updates"
            )
        finite = self._unscale(wanted)
        self._stepped.append(optimizer)
        if finite:
            optimizer.step()
        return finite

    @torch.no_grad()
    def _unscale(self, wanted: Iterable[nn.Parameter]) -> bool:
        """Divide those gradients that are not divided yet; return whether all of these are finite, on all ranks."""
        if any(p.dtype == torch.float16 for p in wanted):
            raise ValueError("float16 gradients underflow again once they are unscaled; pass MasterWeights' parameters")
        new = [p for p in wanted if p not in self._overflowed]
        gradients = [p.grad.detach() for p in new if p.grad is not None]
        gradients = [g._values() if g.is_sparse else g.as_subclass(Tensor) for g in gradients]  # also of parts
        found = torch.zeros((), device=gradients[0].device if gradients else None)
        if gradients:  # the largest magnitude of each: NaN and infinity survive, and nothing can overflow
            largest = torch._foreach_norm(gradients, math.inf)
            found = torch.stack([(~one.isfinite()).to(found.device, torch.float32) for one in largest]).max()
            torch._foreach_mul_(gradients, 1.0 / self.value)
        if any(self._overflowed.get(p) for p in wanted):
            found.fill_(1.0)
        if dist.is_initialized():
            found = found.to(group_device(self.group))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        finite = not bool(found.item())
        self._overflowed |= dict.fromkeys(new, not finite)
        self._finite = finite and self._finite is not False
        return finite

    def update(self) -> None:
        """End the step: shrink the factor after an overflow, grow it after enough good steps.

        Raises:
            RuntimeError: nothing was unscaled in this step; or, on all ranks, the factor has no more room to shrink.
        """
        if self._finite is None:
            raise RuntimeError("update() without step() or unscale_() before it")
        finite = self._finite
        self._begin()
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.num_skipped += 1
            self.value *= self._backoff
            if self.value < SMALLEST_SCALE:
                raise RuntimeError(
                    f"gradients are not finite even with the loss scaled by {self.value:g}: the loss or the parameters "
                    "are; lower the learning rate, or look for a division by zero"
                )
        elif self._good_steps == self._interval:
            self.value = min(self.value * self._growth, LARGEST_SCALE)
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; the same on all ranks."""
        return {"value": self.value, "good_steps": self._good_steps, "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.value, self._good_steps = float(state_dict["value"]), int(state_dict["good_steps"])
        self.num_skipped = int(state_dict["num_skipped"])
