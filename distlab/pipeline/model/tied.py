"""A weight that several stages use: each holds a copy, and after each step all copies get the sum of the gradients.

A GPT may use one matrix as token embedding and as output layer. In a pipeline the two uses lie on the first and on the
last stage. Each computes its own part of the gradient; one process would have added them. So the holders exchange
their parts and add them, in the same order everywhere: the sums are the same bits, and an optimizer that starts equal
keeps the copies equal forever.

Stages on one rank simply share the parameter, and autograd adds. That is so for GPT's two ends under a V placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.replicate import every_parameter
from distlab.comm import agree
from distlab.comm.p2p import Receive, Send, group_rank, start


@dataclass(frozen=True)
class TiedParameter:
    """One parameter under the names that it has in several stages.

    Attributes:
        name: what to call it in messages.
        stages: the stages that hold it, each once.
        names: its name in each of these stages' modules; `name` in all of them where left out.
    """

    name: str
    stages: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "names", tuple(self.names) or (self.name,) * len(self.stages))
        if len(set(self.stages)) != len(self.stages) or len(self.stages) < 2 or len(self.names) != len(self.stages):
            raise ValueError(
                f"tied parameter {self.name!r}: stages {self.stages}, names {self.names}; give at least two different "
                "stages and a name for each"
            )


def find_tied(stages: Sequence[nn.Module]) -> list[TiedParameter]:
    """Find the parameters that several stages of one model share, before the stages go to their ranks."""
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in every_parameter(stage):
            holders.setdefault(parameter, {}).setdefault(index, name)
    return [
        TiedParameter(next(iter(places.values())), tuple(places), tuple(places.values()))
        for places in holders.values()
        if len(places) > 1
    ]


class TiedGradients:
    """Keeps the copies of tied parameters equal: their values now, their gradients after each step.

    Every rank makes one, with the same tied parameters, also ranks that hold none. Holders get the value of the first
    holder; stages on the same rank get one parameter between them, so make the optimizer afterwards.

    Call `begin()` before a step's first backward and `finish()` after its last, or `give_up()` when it failed.
    Gradients from earlier steps that `.grad` still holds are set aside in between, or they would be added up again.

    Args:
        tied: the same on all ranks.
        modules: this rank's stages by number.
        stage_to_rank: the rank of each stage of the pipeline.
        group: ranks of the pipeline.

    Cost: for h ranks that hold a parameter of b bytes, each of them sends (h - 1) b bytes per step, in one exchange; at
        construction the first sends (h - 1) b.
    Error: the sum of the ranks' parts in the order of ranks; one process adds them by micro-batches.

    Raises:
        ValueError: on every rank: the tied parameters differ between ranks, a stage does not exist or has no such
            parameter, or the copies differ in shape, type or in whether they want gradients.
    """

    def __init__(
        self,
        tied: Sequence[TiedParameter],
        modules: Mapping[int, nn.Module],
        stage_to_rank: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._rank = group_rank(group)
        self._shares: list[tuple[nn.Parameter, list[int]]] = []  # with other ranks: my copy, all holders
        self._earlier: list[Tensor | None] = []
        _check(tied, modules, [int(rank) for rank in stage_to_rank], group)
        for one in tied:
            holders = sorted({int(stage_to_rank[stage]) for stage in one.stages})
            mine = [(stage, name) for stage, name in zip(one.stages, one.names, strict=True) if stage in modules]
            if not mine:
                continue
            parameter = modules[mine[0][0]].get_parameter(mine[0][1])
            for stage, name in mine[1:]:
                _replace(modules[stage], modules[stage].get_parameter(name), parameter)
            if len(holders) > 1:
                self._share_value(parameter, holders)
                if parameter.requires_grad:
                    self._shares.append((parameter, holders))

    def begin(self) -> None:
        """Set earlier gradients aside: what `finish` adds up is this step's alone."""
        self._earlier = [parameter.grad for parameter, _ in self._shares]
        for parameter, _ in self._shares:
            parameter.grad = None

    def finish(self) -> None:
        """Give each copy the sum of all holders' gradients of this step, added to those set aside."""
        for (parameter, holders), earlier in zip(self._shares, self._earlier, strict=True):
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            parts = {self._rank: mine} | {r: torch.empty_like(mine) for r in holders if r != self._rank}
            messages: list[Send | Receive] = [Receive(parts[r], r) for r in holders if r != self._rank]
            messages += [Send(mine, r) for r in holders if r != self._rank]
            start(*messages, group=self._group).wait()
            total = torch.zeros_like(mine)
            for rank in holders:  # the same order on each of them
                total += parts[rank]
            parameter.grad = total if earlier is None else earlier.add_(total)
        self._earlier = []

    def give_up(self) -> None:
        """Put back what was set aside: after a step that failed the copies' gradients are equal, as before it."""
        for (parameter, _), earlier in zip(self._shares, self._earlier, strict=True):
            parameter.grad = earlier
        self._earlier = []

    def _share_value(self, parameter: nn.Parameter, holders: list[int]) -> None:
        value = parameter.detach().contiguous()
        if self._rank == holders[0]:
            start(*(Send(value, rank) for rank in holders[1:]), group=self._group).wait()
        else:
            start(Receive(value, holders[0]), group=self._group).wait()
            parameter.detach().copy_(value)


def _check(
    tied: Sequence[TiedParameter],
    modules: Mapping[int, nn.Module],
    stage_to_rank: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse, on every rank, ties that do not hold: each rank tells what it found, and all look at everything."""
    agree([[one.name, one.stages, one.names] for one in tied], group, what="tied parameters")
    for one in tied:
        if max(one.stages) >= len(stage_to_rank):
            raise ValueError(
                f"tied parameter {one.name!r}: stage {max(one.stages)} is not in the pipeline; name stages of 0.."
                f"{len(stage_to_rank) - 1}"
            )
    found = {
        (index, stage): _describe(modules[stage], name)
        for index, one in enumerate(tied)
        for stage, name in zip(one.stages, one.names, strict=True)
        if stage in modules
    }
    everyone: list[dict[tuple[int, int], str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, found, group=group)
    for index, one in enumerate(tied):
        kinds = {stage: part[index, stage] for part in everyone for stage in one.stages if (index, stage) in part}
        missing = [stage for stage in one.stages if kinds.get(stage, "") == ""]
        if missing:
            name = one.names[one.stages.index(missing[0])]
            raise ValueError(
                f"tied parameter {one.name!r}: stage {missing[0]} on rank {stage_to_rank[missing[0]]} has no parameter "
                f"{name!r}; name one that it has"
            )
        if len(set(kinds.values())) > 1:
            listed = "; ".join(f"stage {stage} has {kind}" for stage, kind in sorted(kinds.items()))
            raise ValueError(f"tied parameter {one.name!r}: {listed}; all copies must be alike")


def _describe(module: nn.Module, name: str) -> str:
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None:
        return ""
    frozen = "" if parameter.requires_grad else ", frozen"
    return f"{list(parameter.shape)} {parameter.dtype}{frozen}"


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put one parameter in the place of a different one, everywhere in a module."""
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(layer, name, new)
