"""What these optimizers share: their groups and steps, tensors gathered by kind, all norms taken at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.large_batch.trust import Trust, trust_ratio

Group = dict[str, Any]
LARGE = 1 << 18  # elements; on a CPU such a tensor goes alone, so that the next one reuses its temporaries' memory


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that looks at whole tensors, checks its groups' options, and updates many tensors at once."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters; what it does not set is as in the constructor.

        Raises:
            ValueError: an argument is out of range, or a parameter is not real.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check(group)
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                shape = list(parameter.shape)
                raise ValueError(
                    f"a parameter of shape {shape} is {parameter.dtype}; {type(self).__name__} takes real floating "
                    "point: give it to a different optimizer"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; return what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in batches(group):
                self._update(parameters, group)
        return loss

    def _check(self, group: Group) -> None:
        """Refuse arguments of a group that are out of range."""
        raise NotImplementedError

    def _update(self, parameters: list[Tensor], group: Group) -> None:
        """Update tensors of one dtype on one device, all of which have a gradient."""
        raise NotImplementedError


def trust_of(group: Group) -> Trust:
    """Return a parameter group's Trust; a group may set any of its fields, also between updates."""
    return Trust(**{name: group[name] for name in Trust.__dataclass_fields__})


def batches(group: Group) -> list[list[Tensor]]:
    """Return the parameters that have a gradient, in lists of one dtype on one device; large ones on a CPU alone.

    Shapes: any

    Raises:
        ValueError: a gradient is sparse.
    """
    kinds: dict[tuple[torch.dtype, torch.device, int], list[Tensor]] = {}
    for index, parameter in enumerate(group["params"]):
        if parameter.grad is None:  # frozen, or not used in this step: it keeps its value and its memory
            continue
        if parameter.grad.is_sparse:
            shape = list(parameter.shape)
            raise ValueError(
                f"the gradient of a parameter of shape {shape} is sparse; LARS, LAMB and Muon need dense ones: "
                "build the embedding with sparse=False"
            )
        alone = index if not parameter.is_cuda and parameter.numel() >= LARGE else -1
        kinds.setdefault((parameter.dtype, parameter.device, alone), []).append(parameter)
    return list(kinds.values())


def norms(*lists: Sequence[Tensor]) -> list[list[float]]:
    """Return the length of every tensor of every list: one wait for the device in all.

    Half-precision tensors are summed in float32, in which no square of theirs overflows.
    """
    every = [tensor for tensors in lists for tensor in tensors]
    half = every[0].dtype in (torch.bfloat16, torch.float16)
    lengths = torch._foreach_norm(every, 2, dtype=torch.float32 if half else None)
    values = iter(torch.stack(lengths).tolist())
    return [[next(values) for _ in tensors] for tensors in lists]


def ratios(weight_norms: Iterable[float], update_norms: Iterable[float], trust: Trust) -> list[float]:
    """Return the trust ratio of each tensor."""
    pairs = zip(weight_norms, update_norms, strict=True)
    return [trust_ratio(weight_norm, update_norm, trust) for weight_norm, update_norm in pairs]


def add_scaled(targets: list[Tensor], sources: list[Tensor], scales: list[float]) -> None:
    """Add to each target its source times its scale: in one pass on a CPU, in one launch for all on a GPU.

    Shapes: targets and sources alike, in pairs
    """
    if targets[0].is_cuda:
        torch._foreach_add_(targets, torch._foreach_mul(sources, scales))
        return
    for target, source, scale in zip(targets, sources, scales, strict=True):
        target.add_(source, alpha=scale)
