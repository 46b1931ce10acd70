"""All parameters of a model, also those that the model does not show.

A model may override `parameters()`, `named_parameters()` or `named_modules()`, so that an optimizer gets some of them
only (adapters, say). The others take part in forward all the same. So ranks must begin with the same values of them,
too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters that a module shows, then those that it leaves out; a tied one comes once."""
    named = {parameter: name for name, parameter in module.named_parameters()}
    for path, layer in layers_of("", module, set()):
        for attribute, parameter in layer._parameters.items():
            if parameter is not None:
                named.setdefault(parameter, f"{path}.{attribute}".removeprefix("."))
    return [(name, parameter) for parameter, name in named.items()]


def layers_of(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all inside of it with their names, each once, also what `named_modules()` leaves out."""
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from layers_of(f"{path}.{name}".removeprefix("."), child, seen)
