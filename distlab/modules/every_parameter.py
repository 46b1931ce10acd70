"""All parameters of a model, also those that the model does not show.

A model may override `parameters()` or `named_parameters()`, so that an optimizer gets some of them only (adapters,
say). The others take part in forward all the same. So ranks must begin with the same values of them, too.
"""

from __future__ import annotations

from torch import nn


def every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters that a module shows, then those that it leaves out; a tied one comes once."""
    shown = list(module.named_parameters())
    known = {parameter for _, parameter in shown}
    return shown + [(name, one) for name, one in nn.Module.named_parameters(module) if one not in known]


def hidden_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name the parameters that `parameters()` or `named_parameters()` leaves out."""
    shown = {*module.parameters()} & {parameter for _, parameter in module.named_parameters()}
    return [(name, parameter) for name, parameter in every_parameter(module) if parameter not in shown]
