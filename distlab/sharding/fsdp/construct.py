"""Build a model that no rank could hold: shapes first, then a layer's weights at a time; each rank keeps its part.

`FullyShard(GPT(config))` needs the whole model in every rank's memory for a moment: exactly what sharding is to avoid.
Here each parameter moves to the "meta" device as soon as the module gets it: it has a shape there, and no memory. Then
the shards are laid out. Every rank draws every weight, one layer after the other, copies its own part and frees the
rest. All ranks draw the same numbers, so nothing is sent.

Each parameter (each layer, where layers draw their own) has a generator, seeded by the seed and its name. Its values
then do not depend on what else the model has. `draw_weights` draws the same for an unsharded module.

Who draws? The module's own `draw_weight(name, parameter, generator)` (GPT has one), or else each layer's
`reset_parameters()`, as when torch makes it. A weight that is tied is drawn where it comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_parameter_registration_hook

from distlab.blocks.modules.every_parameter import every_parameter
from distlab.comm.agree import group_device
from distlab.rng import generator
from distlab.sharding.fsdp.fully_shard import FullyShard


def build_sharded(
    make_module: Callable[[], nn.Module],
    group: ProcessGroup | None = None,
    *,
    seed: int,
    **options: Any,
) -> FullyShard:
    """Build a sharded model without ever holding the whole of it.

    Args:
        make_module: makes the module; called twice, and the values of its parameters are lost.
        group: as `FullyShard`.
        seed: where the numbers come from, the same on every rank.
        options: of `FullyShard`.

    Cost: nothing of the model is sent. Memory: the shards, and one layer's own parameters.
        Every rank draws all weights, in the host's memory.
    Error: the same bits as `draw_weights` of an unsharded module.

    Raises:
        ValueError: a layer cannot draw its weights; the text names it. Also what FullyShard refuses.
    """
    handle = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            module, template = make_module(), make_module()
    finally:
        handle.remove()
    _refuse_undrawable(template)
    device = group_device(group)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    model = FullyShard(module, group, **options)
    pieces = {piece.name: piece for unit in model.units for piece in unit.shard.pieces}
    for name, values in _drawn(template, seed):
        if name in pieces:
            with torch.no_grad():
                pieces[name].parameter.copy_(values.flatten()[pieces[name].start : pieces[name].stop])
        del values  # before the next is drawn
    return model


@torch.no_grad()
def draw_weights(module: nn.Module, *, seed: int) -> None:
    """Draw a module's weights in place: the numbers that `build_sharded` gives to shards.

    Raises:
        ValueError: as `build_sharded`.
    """
    _refuse_undrawable(module)
    named = dict(every_parameter(module))
    for name, values in _drawn(module, seed):
        named[name].copy_(values)


def _refuse_undrawable(module: nn.Module) -> None:
    for path, layer, _ in _layers(module) if not hasattr(module, "draw_weight") else ():
        if not hasattr(layer, "reset_parameters"):
            raise ValueError(
                f"{path or 'the module'} ({type(layer).__name__}) has parameters and no reset_parameters() that gives "
                "them random start values; give it one, or the module a draw_weight(name, parameter, generator)"
            )


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """Yield each layer with parameters of its own, and their names by attribute; a tied one counts once."""
    names = {parameter: name for name, parameter in every_parameter(module)}
    for path, layer in module.named_modules():
        prefix = f"{path}." if path else ""
        own = {key: names[p] for key, p in layer._parameters.items() if p is not None and names[p] == f"{prefix}{key}"}
        if own:
            yield path, layer, own


def _drawn(module: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's name and its values, in host memory, in the order of `named_parameters()`."""
    draw: Callable[[str, Tensor, torch.Generator], None] | None = getattr(module, "draw_weight", None)
    for path, layer, own in _layers(module):
        if draw is None:
            yield from _reset(layer, own, generator(seed, 0, f"weights of {path}"))
            continue
        for key, name in own.items():
            values = torch.zeros_like(layer._parameters[key], device="cpu", requires_grad=False)  # type: ignore[arg-type]
            draw(name, values, generator(seed, 0, f"weights of {name}"))
            yield name, values


def _reset(layer: nn.Module, own: dict[str, str], source: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Have a layer draw its own parameters, in the host's memory, from `source`."""
    before = {**layer._parameters}
    try:
        for key, one in before.items():
            if one is not None:
                layer._parameters[key] = nn.Parameter(torch.zeros(one.shape, dtype=one.dtype, device="cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(source.get_state())
            layer.reset_parameters()  # type: ignore[operator]
        drawn = [(name, layer._parameters[key].detach()) for key, name in own.items()]  # type: ignore[union-attr]
    finally:
        layer._parameters.update(before)
    while drawn:
        yield drawn.pop(0)  # and hold on to none: the next layer needs the memory


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return what a module gets in a parameter's place; a tied one is there already."""
    if parameter is None or parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
