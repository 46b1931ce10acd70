"""Which layers of a module can let their weight gradients wait, and why the others cannot.

A layer can wait where there is a rule for its exact type (`layers`). Its forward must be its own, outside of compiled
code. And it must not share a parameter with a layer that cannot wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from distlab.pipeline.backward.layers import place_of, rule_of


def choose_layers(module: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Sort the modules that own parameters that want gradients.

    Returns:
        The layers that can wait, by name; and of the others the reason, by name.
    """
    layers: dict[str, nn.Module] = {}
    kept: dict[str, str] = {}
    compiled = tuple(f"{name}." for name, part in module.named_modules() if _is_compiled(part))
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        is_inside = "." in compiled or f"{name}.".startswith(compiled)  # "." is the module itself
        if own and (reason := "it is compiled" if is_inside else _reason(layer)):
            kept[name] = reason
        elif own:
            layers[name] = layer
    while shared := next(_shared(module, layers, kept), None):  # what one may not, those that share with it may not
        kept[shared[0]] = f"shares a parameter with {shared[1] or 'the module itself'}"
        del layers[shared[0]]
    return layers, kept


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made this module, or module.compile() was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _reason(layer: nn.Module) -> str | None:
    rule = rule_of(layer)
    if "forward" in vars(layer) or place_of(layer) in vars(layer):
        return "its forward was replaced"
    return f"{type(layer).__name__} has no rule" if rule is None else rule.refuses(layer)


def _shared(module: nn.Module, layers: dict[str, nn.Module], kept: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield layers that can wait and share a parameter with one that cannot, with that one's name."""
    owner = {p: name for name in kept for p in module.get_submodule(name).parameters(recurse=False)}
    for name, layer in layers.items():
        for parameter in layer.parameters(recurse=False):
            if parameter in owner:
                yield name, owner[parameter]
