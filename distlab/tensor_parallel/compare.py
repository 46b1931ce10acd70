"""What no plan shows is compared: the cut model with the whole one, and the ranks with each other.

No plan shows how a forward uses what a layer makes. Three projections may lie one after the other, or side by side for
each head; a softmax may need all features. Then each rank computes something, and the shapes fit. So before the model
itself is cut, two copies that share its weights run in eval mode on an example: a whole one and a cut one. What each
cut layer reads must be what the whole one's reads (a row layer: the rank's part of it). The first that is not says
where the plan is wrong. Then both run backward: what stays whole must have the whole model's gradients, not a part of
them, nor a multiple.

While the cut model trains, a hook compares the ranks. Ranks that work on different inputs would add up parts of
different samples. A parameter that each rank holds whole must have the same gradient on all: where it has not, the
ranks' copies drift apart, and training goes wrong without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from distlab.blocks.modules.moved import NotHere
from distlab.blocks.modules.split import splits_of
from distlab.blocks.modules.structures import find
from distlab.blocks.replicate import every_parameter
from distlab.comm.agree import group_device
from distlab.comm.p2p import group_rank
from distlab.rng import keep_random_state
from distlab.tensor_parallel.linear import agree_on_inputs
from distlab.tensor_parallel.plan import HINTS, LAYERS, columns_of, parent_of

OUTPUT, GRADIENT = "the output", "the gradient of "
FINE = 1e-4  # rounding that does not hide a wrong gradient
TOLERANCE = 1e-6  # of a parameter's norm: far more than rounding, far less than an update
Read = list[tuple[str, Tensor]]  # what a forward's cut layers read, by their names; the output; gradients


def compare(
    model: nn.Module,
    cut: Callable[[nn.Module], None],
    styles: Mapping[str, str],
    example: Sequence[Any],
    group: ProcessGroup | None,
) -> None:
    """Run a whole and a cut copy of a model, forward and backward; the model itself, not cut yet, stays as it is.

    Args:
        model: the same values on all ranks.
        cut: cuts a copy.
        styles: of the modules that it cuts.
        example: inputs of a forward, the same on all ranks.
        group: the ranks.

    It sends what a step of the cut model sends, two exchanges of 40 bytes and an all-reduce of 8; the rank holds its
    parts twice meanwhile. No backward runs in half precision, whose rounding would hide what it looks for, nor where
    the whole model has none in eval mode.

    Raises:
        ValueError: on every rank: inputs differ, they compute something else, the cut model alone raises, or there is
            nothing to compare.
    """
    agree_on_inputs(example, group)
    where, running = f"rank {group_rank(group)}: parallelize_module:", list[str]()
    layers = [name for name, style in styles.items() if style in LAYERS]
    whole, twin = _copy(model, layers), _copy(model, layers)
    cut(twin)
    expected = _run(whole, layers, example, [])
    with suppress(RuntimeError):  # some layers of torch run backward in training alone
        expected += _gradients(whole, expected)
    if unread := [name for name in (*layers, OUTPUT) if name not in dict(expected)]:
        raise ValueError(
            f"{where} the example gives no numbers to compare of {', '.join(unread[:4])}; pass inputs of a forward "
            "that uses all that the plan cuts"
        )
    try:
        got = _run(twin, layers, example, running)
        if expected[-1][0].startswith(GRADIENT):
            got += _gradients(twin, got)
    except Exception as error:  # whatever a foreign forward raises
        inside = (running or [""])[-1]
        near = [name for name in styles if name.startswith(inside + ".")] or [*styles]
        raise ValueError(
            f"{where} {inside or 'the model'} ({type(model.get_submodule(inside)).__name__}) fails in the cut "
            f"model and not in the whole one: {type(error).__name__}: {(str(error) or 'no words').splitlines()[0]}. "
            "Its forward takes a number of heads or features from a constant or a config, a layer before it is cut by "
            "outputs and it is no row, or it is a row without such a layer. Let an attribute num_heads hold "
            "the number and forward use it, or leave out of the plan what is cut here: "
            f"{', '.join(near[:4])}, with the row behind it"
        ) from error
    at, by = _first_difference(got, expected, styles, max(map(_rounding, model.parameters())), group)
    if at < len(expected):
        name = expected[at][0]
        what = "has other gradients" if name.startswith(GRADIENT) else "returns other numbers"
        worst = f"here by {by:.1e} of the largest"
        raise ValueError(f"{where} the cut model {what} than the whole one ({worst}); {_why(name, styles)}")


def _copy(model: nn.Module, layers: Sequence[str]) -> nn.Module:
    """Return a copy on the same memory, in which only what stays whole wants gradients."""
    cut = {id(one) for name in layers for one in model.get_submodule(name).parameters()}
    own = {
        id(one): nn.Parameter(one.detach(), one.requires_grad and id(one) not in cut and _rounding(one) < FINE)
        for _, one in every_parameter(model)
    }
    return copy.deepcopy(model, own).eval()


def _run(model: nn.Module, layers: Sequence[str], example: Sequence[Any], running: list[str]) -> Read:
    """Return what layers read in one forward, and the output; an error leaves the modules that ran in `running`."""
    read: Read = []

    def enter(name: str) -> Any:
        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(name)
            if name in layers:
                read.extend([(name, one.detach()) for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])

        return entered

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(name), with_kwargs=True)
        module.register_forward_hook(leave)
    with keep_random_state():
        output = model(*copy.deepcopy(tuple(example)))
    return read + [(OUTPUT, one) for one in find(output)[0] if one.is_floating_point()]


def _gradients(model: nn.Module, read: Read) -> Read:
    """Return the gradients that the output's first tensor brings; others may be of the own heads, such as a cache."""
    first = next((one for name, one in read if name == OUTPUT), None)
    if first is not None and first.requires_grad:
        first.backward(torch.arange(first.numel()).to(first).cos().view_as(first))
    return [(GRADIENT + name, one.grad.to_dense()) for name, one in every_parameter(model) if one.grad is not None]


@torch.no_grad()
def _first_difference(
    got: Read, expected: Read, styles: Mapping[str, str], rounding: float, group: ProcessGroup | None
) -> tuple[int, float]:
    """Return, on every rank, the number of the first tensor that differs on some rank; and by how much here."""
    num_ranks = dist.get_world_size(group)
    first, by = min(len(got), len(expected)), 0.0
    begin = [name for name, _ in expected].index(OUTPUT)
    some = max((float(one.abs().max()) for name, one in expected if name.startswith(GRADIENT)), default=0.0) / 100
    for at, ((name, other), (also, one)) in enumerate(zip(expected, got, strict=False)):
        if styles.get(name) == "row" and other.shape[-1] % num_ranks == 0:
            other = other.chunk(num_ranks, -1)[group_rank(group)]
        elif one.shape != other.shape and at > begin:
            continue  # behind the first tensor of the output: a cache of keys has other heads on each rank
        by = float("nan") if name != also or one.shape != other.shape else 0.0
        if by == 0.0 and one.numel():
            least = some if name.startswith(GRADIENT) else 0.0  # a gradient may be rounding alone
            by = float((one - other).abs().max()) / (max(float(other.abs().max()), least) or 1.0)
        if not by <= min(100 * max(rounding, _rounding(other)) ** 0.75, 0.05):
            first = at
            break
    everywhere = torch.tensor([first], device=group_device(group))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return int(everywhere), by


def _why(name: str, styles: Mapping[str, str]) -> str:
    if name.startswith(GRADIENT):
        return (
            f"first {name}. Where each rank has a part of it alone, its module works on the own heads, features or "
            "positions and needs the style 'inside'; where the whole was summed, it has that style and should not"
        )
    if styles.get(name) != "row":
        return (
            f"what row layers before it read is right, and {name if name == OUTPUT else f'what {name} reads'} is not. "
            "Does a forward use a constant number of heads, or a layer's weight without the layer? "
            "Leave those layers out of the plan."
        )
    columns = columns_of(name, styles)
    hints = " ".join(dict.fromkeys(HINTS[styles[column]] for column in columns))
    return f"first in what {name} (row) reads, which {', '.join(columns[:4])} begin. {hints}"


def _rounding(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


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


def _compare_whole(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Refuse parameters that every rank holds whole and whose values differ; a ValueError on every rank names them.

    Cost: an all-gather of 16 bytes per parameter.
    """
    split, layers = splits_of(model), dict(model.named_modules())
    whole = {name: parameter for name, parameter in every_parameter(model) if name not in split}
    _compare({name: one for name, one in whole.items() if not isinstance(one, NotHere)}, group)
    in_shards = [name for name, one in whole.items() if isinstance(one, NotHere)]
    for path in dict.fromkeys(map(parent_of, in_shards)):
        _compare_when_called(layers[path], [name for name in in_shards if parent_of(name) == path], group)


def _compare_when_called(layer: nn.Module, names: Sequence[str], group: ProcessGroup | None) -> None:
    """Compare parameters that lie in shards when their layer runs next: then they are whole."""

    def before(*_: object) -> None:
        handle.remove()
        _compare({name: getattr(layer, name.rpartition(".")[2]) for name in names}, group)

    handle = layer.register_forward_pre_hook(torch.compiler.disable(before))


@torch.no_grad()
def _compare(whole: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
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
