"""Compare the cut model with the whole one: copies of both run once on an example, and must compute the same.

No plan shows how a forward uses what a layer makes. Three projections may lie one after the other, or side by side for
each head; a softmax may need all features. Then each rank computes something, and the shapes fit. So before the model
itself is cut, two copies that share its weights run in eval mode: a whole one and a cut one. What each row layer reads
must be the rank's part of what the whole one's reads. The first that is not says where the plan is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm.agree import group_device
from distlab.comm.p2p import group_rank
from distlab.modules.every_parameter import every_parameter
from distlab.modules.structures import find
from distlab.rng import keep_random_state
from distlab.tensor_parallel.by_plan.plan import HINTS, columns_of

OUTPUT = "the output"


class Made(NamedTuple):
    """What one forward made: the name of each row layer with its input, and then the output's tensors; or an error."""

    values: list[tuple[str, Tensor]]
    error: Exception | None
    inside: str  # the innermost module that ran when the error came


def compare(
    model: nn.Module,
    cut: Callable[[nn.Module], None],
    styles: Mapping[str, str],
    example: Sequence[Any],
    group: ProcessGroup | None,
) -> None:
    """Run a whole and a cut copy of a model; the model itself, which is not cut yet, stays as it is.

    Args:
        model: the same values on all ranks.
        cut: cuts a copy.
        styles: of the modules that it cuts.
        example: inputs of a forward, the same on all ranks.
        group: the ranks.

    It sends what a forward of the cut model sends, and 8 (t-1) bytes; the rank holds its parts twice meanwhile.

    Raises:
        ValueError: on every rank: they compute something else, the cut model alone raises, there is nothing to compare,
            or the model cannot be copied.
    """
    where = f"rank {group_rank(group)}: parallelize_module:"
    whole, twin = _copy(model, where), _copy(model, where)
    cut(twin)
    rows = [name for name, style in styles.items() if style == "row"]
    expected = _run(whole, rows, example)
    if expected.error is not None:
        raise expected.error  # the input is wrong: so one process says it
    if not any(tensor.is_floating_point() for _, tensor in expected.values):
        raise ValueError(f"{where} the example gives no numbers to compare; pass inputs of a forward")
    got = _run(twin, rows, example)
    of_sequence = f" {HINTS['sequence']}" if "sequence" in styles.values() else ""
    if got.error is not None:
        inside, error = got.inside, got.error
        near = [name for name in styles if name.startswith(inside + ".")] or [*styles]
        raise ValueError(
            f"{where} {inside or 'the model'} ({type(model.get_submodule(inside)).__name__}) fails in the cut "
            f"model and not in the whole one: {type(error).__name__}: {(str(error) or 'no words').splitlines()[0]}. "
            "Its forward takes a number of heads or features from a constant or a config, or it is whole behind a "
            "layer that is cut. If it is an attribute of the module, name that in head_counts=; else leave out of the "
            f"plan what is cut here: {', '.join(near[:4])}, with the row behind it.{of_sequence}"
        ) from error
    at, by = _first_difference(got.values, expected.values, _precision(model), group)
    if at < len(expected.values):
        why = _why(expected.values[at][0], styles) + of_sequence
        raise ValueError(
            f"{where} the cut model returns other numbers than the whole one (here by {by:.1e} of the largest); {why}"
        )


def _copy(model: nn.Module, where: str) -> nn.Module:
    own = {id(one): nn.Parameter(one.detach(), one.requires_grad) for _, one in every_parameter(model)}  # same memory
    try:
        return copy.deepcopy(model, own).eval()
    except Exception as error:  # whatever a foreign object says to it
        raise ValueError(
            f"{where} the example runs in a copy of the model, and it cannot be copied: {type(error).__name__}: {error}"
        ) from error


def _run(model: nn.Module, rows: Sequence[str], example: Sequence[Any]) -> Made:
    values: list[tuple[str, Tensor]] = []
    running: list[str] = []

    def enter(name: str) -> Any:
        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(name)
            if name in rows:
                values.extend([(name, one.detach()) for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])

        return entered

    for name, module in model.named_modules():
        if name and not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            module.register_forward_hook(lambda *_: running.pop() and None)
    with keep_random_state():
        try:
            output = model(*copy.deepcopy(tuple(example)))
        except Exception as error:  # whatever a foreign forward raises; the caller says it
            return Made(values, error, running[-1] if running else "")
    values += [(OUTPUT, one.detach()) for one in find(output)[0] if one.is_floating_point()]
    return Made(values, None, "")


def _first_difference(
    got: list[tuple[str, Tensor]], expected: list[tuple[str, Tensor]], precision: float, group: ProcessGroup | None
) -> tuple[int, float]:
    """Return, on every rank, the number of the first value that differs on some rank; and by how much here."""
    num_ranks, rank = dist.get_world_size(group), group_rank(group)
    first, by = len(expected) if len(got) >= len(expected) else len(got), 0.0
    begin = next((at for at, (name, _) in enumerate(expected) if name == OUTPUT), -1)
    for at, ((name, other), (also, one)) in enumerate(zip(expected, got, strict=False)):
        if name != OUTPUT and other.shape[-1] % num_ranks == 0:
            other = other.chunk(num_ranks, -1)[rank]
        elif one.shape != other.shape and at > begin >= 0:
            continue  # behind the first tensor: a cache of keys has other heads on each rank
        by = float("nan") if name != also or one.shape != other.shape else 0.0
        if by == 0.0 and one.numel():
            by = float((one - other).abs().max()) / (float(other.abs().max()) or 1.0)
        if not by <= min(100 * max(precision, _precision_of(other)) ** 0.75, 0.05):
            first = at
            break
    mine = torch.tensor([first], device=group_device(group))
    everyone = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(everyone, mine, group=group)
    return min(int(one) for one in everyone), by


def _why(name: str, styles: Mapping[str, str]) -> str:
    if name == OUTPUT:
        return (
            "what its row layers read is right, and the output is not. Does its forward use a constant number of heads "
            "(see head_counts=), or a layer's weight without the layer? Leave those layers out of the plan."
        )
    columns = columns_of(name, styles)
    hints = " ".join(dict.fromkeys(HINTS[styles[column]] for column in columns))
    return f"first in what {name} (row) reads, which {', '.join(columns[:4])} begin. {hints}"


def _precision_of(tensor: Tensor) -> float:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_number else 0.0


def _precision(model: nn.Module) -> float:
    """Return the relative rounding of the coarsest type that a forward computes in."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    casts = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return max([*(torch.finfo(kind).eps for kind in casts), *(_precision_of(p) for p in model.parameters())], default=0)
