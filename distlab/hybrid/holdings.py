"""What a rank holds, by names of the whole model; what of it is whose; and who of all that hold it counts it.

Seen from one process a model has each parameter once. On a mesh most have many equal copies, some are in parts, and
experts are elsewhere. A sum over the model (the norm of its gradients) must count each element once: not once a copy,
nor never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from distlab.hybrid.build import Built
from distlab.hybrid.layout import COPIES, EXPERT_COPIES, Layout


def named_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Name this rank's parameters as the whole model does; one that two stages here share comes once."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for _, module in sorted(stages.items()):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
    return found


def split_experts(
    named: Mapping[str, nn.Parameter], built: Built, layout: Layout
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Divide the trained parameters: those that all copies hold, and this rank's experts (none if all are the same)."""
    spread = layout.plan.expert > 1
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    experts = {name: p for name, p in trained.items() if spread and built.holdings[name].is_expert}
    return {name: p for name, p in trained.items() if name not in experts}, experts


def tied_parameters(named: Mapping[str, nn.Parameter], built: Built) -> list[nn.Parameter]:
    """Return this rank's parameters that several stages use."""
    names = {name for one in built.tied for name in one.names}
    return [parameter for name, parameter in named.items() if name in names]


def counts_here(built: Built, layout: Layout, name: str, *, sharded: bool = False) -> bool:
    """Return whether this rank is the one that counts what it holds of a parameter.

    Args:
        built: how parameters lie.
        layout: where this rank stands.
        name: of the parameter.
        sharded: copies hold different pieces of it.
    """
    holding = built.holdings[name]
    axes: tuple[str, ...] = () if sharded else EXPERT_COPIES if holding.is_expert else COPIES
    if not holding.is_split:
        axes += ("tensor",)
    return not holding.is_copy and layout.is_first(*axes)


@torch.no_grad()
def divide_(parameters: Iterable[nn.Parameter], divisor: int) -> None:
    """Divide gradients in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
