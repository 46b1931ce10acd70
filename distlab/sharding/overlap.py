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
    """Refuse tensors whose places in one memory overlap; one tensor under two names is a tied one, and is right.

    Raises:
        ValueError: the text names two.
    """
    places = []
    for name, one in {id(one): (name, one) for name, one in named}.values():
        if one.device.type != "meta" and one.layout is torch.strided and one.numel():
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            end = one.data_ptr() + (last + 1) * one.element_size()
            places.append((one.untyped_storage().data_ptr(), one.data_ptr(), end, name))
    reach = (0, 0, "")
    for storage, first, end, name in sorted(places):
        if storage == reach[0] and first < reach[1]:
            raise ValueError(
                f"{reach[2]} and {name} lie in the same memory, and are two parameters: an update of one changes "
                "the other in one process, and shards hold them apart. Give the layers one parameter (tied: "
                "a.weight = b.weight), or each its own memory (.clone())"
            )
        reach = max(reach, (storage, end, name)) if storage == reach[0] else (storage, end, name)
