"""A hook on a model that was cut by a plan: it refuses, on every rank, what no plan can show before the model runs.

Ranks that work on different inputs would add up parts of different samples. A parameter that each rank holds whole must
have the same gradient on all: where it has not, the ranks' copies drift apart, and training goes wrong without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from distlab.comm import agree
from distlab.comm.p2p import group_rank
from distlab.modules.every_parameter import every_parameter
from distlab.modules.moved import NotHere
from distlab.modules.split import splits_of

TOLERANCE = 1e-6  # of a parameter's norm: far more than rounding, far less than an update


def watch(model: nn.Module, group: ProcessGroup | None) -> None:
    """Compare ranks before forward: inputs where their shape is new, weights at call 2, 4, 8 and so on in training."""
    seen: set[object] = set()
    calls = 0

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        shapes = (*(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)),)
        if (shapes, module.training) not in seen:
            agree_on_inputs((args, kwargs), group)
            seen.add((shapes, module.training))
        if module.training:
            calls += 1
            if calls > 1 and calls & (calls - 1) == 0:
                _compare_whole(module, group)

    if dist.get_world_size(group) > 1:
        model.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True)  # a graph cannot hold a hash


def agree_on_inputs(inputs: Any, group: ProcessGroup | None) -> None:
    """Refuse, on every rank, inputs of a forward that differ between ranks."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    agree([list(tensor.shape) for tensor in tensors], group, what="the shapes of the inputs of tensor ranks")
    what = "the inputs of tensor ranks, which work on the same samples (sha256)"
    agree([_digest(tensor) for tensor in tensors], group, what=what)


def _compare_whole(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Refuse parameters that every rank holds whole, and whose values differ between ranks.

    Cost: an all-gather of 16 bytes per parameter.

    Raises:
        ValueError: naming them, on every rank.
    """
    split, layers = splits_of(model), dict(model.named_modules())
    whole = {name: parameter for name, parameter in every_parameter(model) if name not in split}
    _compare({name: one for name, one in whole.items() if not isinstance(one, NotHere)}, group)
    in_shards = [name for name, one in whole.items() if isinstance(one, NotHere)]
    for path in dict.fromkeys(name.rpartition(".")[0] for name in in_shards):
        _compare_when_called(layers[path], [name for name in in_shards if name.rpartition(".")[0] == path], group)


def _compare_when_called(layer: nn.Module, names: Sequence[str], group: ProcessGroup | None) -> None:
    """Compare parameters that lie in shards when their layer runs next: then they are whole."""

    def before(*_: object) -> None:
        handle.remove()
        _compare({name: getattr(layer, name.rpartition(".")[2]) for name in names}, group)

    handle = layer.register_forward_pre_hook(torch.compiler.disable(before))


@torch.no_grad()
def _compare(whole: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
    """Compare two numbers of each parameter."""
    if not whole:
        return
    mine = torch.stack([_two_numbers(parameter) for parameter in whole.values()])  # [N, 2]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    values = torch.stack(everyone)  # [t, N, 2]
    spread = (values.amax(0) - values.amin(0)).amax(-1)
    apart = (spread > TOLERANCE * values.abs().amax((0, 2))).tolist()
    differ = [name for name, is_apart in zip(whole, apart, strict=True) if is_apart]
    if differ:
        raise ValueError(
            f"rank {group_rank(group)}: {', '.join(differ[:5])}{' and others' if differ[5:] else ''} differ between "
            "ranks, and must be the same on all tensor ranks. A module that works on each rank's own heads, features "
            "or positions needs the style 'inside'. Clip with clip_tensor_parallel_, not with torch's "
            "clip_grad_norm_. Dropout needs one seed on all ranks of the group"
        )


def _two_numbers(parameter: Tensor) -> Tensor:
    """Return a norm, and a sum in which each element has a weight of its own: [...] -> [2]."""
    values = parameter.detach().double().flatten()
    weights = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
    return torch.stack([values.norm(), values @ weights / max(len(values), 1) ** 0.5])


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
