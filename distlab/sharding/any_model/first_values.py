"""What every rank begins with: the parameters and buffers of the first rank of all."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from distlab.modules.moved import mark_moved
from distlab.replicate import broadcast_each
from distlab.sharding.fsdp.flat_unit import Unit
from distlab.sharding.fsdp.wrapping import Members
from distlab.sharding.part import plain


@torch.no_grad()
def fill_from_first(unit: Unit, parameters: list[nn.Parameter]) -> None:
    """Take this rank's part of what the first rank of all holds: broadcast it in the group, and shards to replicas."""
    if parameters[0].device.type == "meta":
        return
    options = unit.options
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    broadcast_each([flat], options.group)
    unit.fill(flat.split(list(unit.layout.sizes)))
    if options.replicas is not None:
        values = plain(unit.shard).to(options.device)
        broadcast_each([values], options.replicas)
        unit.shard.copy_(values)


def leave_behind(members: Members) -> None:
    """Free a unit's parameters, whose values are in its shard; other code that holds one gets an error."""
    for name, parameter in zip(members.names, members.parameters, strict=True):
        mark_moved(parameter, name, "FullyShard moved it into a shard")
    members.parameters.clear()


def broadcast_buffers(module: nn.Module, group: ProcessGroup | None, replicas: ProcessGroup | None) -> None:
    """Give every rank the first rank's buffers, which stay whole."""
    for buffer in module.buffers():
        if buffer.device.type != "meta":
            broadcast_each([buffer], group)
            if replicas is not None:
                broadcast_each([buffer], replicas)
