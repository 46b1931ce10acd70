"""Parameters that shards cannot hold: two in the same memory, which one process updates at once; or hidden ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distlab.modules.every_parameter import every_parameter, hidden_parameters


def parameters_to_shard(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name all parameters; refuse trained ones that the module does not show: shards of them would be updated.

    Raises:
        ValueError: the text names the first of them.
    """
    hidden = [name for name, parameter in hidden_parameters(module) if parameter.requires_grad]
    if hidden:
        more = f" and {len(hidden) - 1} more" if hidden[1:] else ""
        raise ValueError(
            f"{type(module).__name__}.parameters() or named_parameters() leaves out {hidden[0]}{more}, which would "
            "train in shards and not in one process. Return it there, or freeze it with requires_grad_(False)"
        )
    return every_parameter(module)


def refuse_overlaps(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors of which two have a number in common; one tensor under two names is a tied one, and is right.

    Raises:
        ValueError: the text names two.
    """
    ends: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, one in {id(one): (name, one) for name, one in named}.values():
        if one.device.type != "meta" and one.layout is torch.strided and one.numel():
            first = int(one.storage_offset()) * one.element_size()
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            end = first + (int(last) + 1) * one.element_size()
            ends.setdefault(one.untyped_storage().data_ptr(), []).append((first, end, name, one))
    for in_one_storage in ends.values():
        reach: tuple[int, str, Tensor] | None = None
        for first, end, name, one in sorted(in_one_storage, key=lambda place: place[:3]):
            if reach is not None and first < reach[0] and _have_common(one, reach[2]):
                raise ValueError(
                    f"{reach[1]} and {name} lie in the same memory, and are two parameters: an update of one changes "
                    "the other in one process, and shards hold them apart. Give the layers one parameter (tied: "
                    "a.weight = b.weight), or each its own memory (.clone())"
                )
            if reach is None or end > reach[0]:
                reach = end, name, one


def _have_common(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have a number in common; columns of a matrix lie between each other."""
    return bool(torch.isin(_places(one), _places(other)).any())


def _places(one: Tensor) -> Tensor:
    places = torch.arange(one.untyped_storage().nbytes() // one.element_size())
    return places.as_strided(one.shape, one.stride(), one.storage_offset()).flatten()
