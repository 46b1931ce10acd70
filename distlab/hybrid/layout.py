"""Where a rank stands: its place on each axis, the groups that it speaks in, and which part of a batch is its own.

A plan is a few degrees; a mesh turns a rank's number into a place on five axes; each axis asks a different question:

| axis     | ranks along it                | what differs between them                 |
|----------|-------------------------------|-------------------------------------------|
| data     | equal replicas                | samples                                   |
| expert   | replicas except for experts   | samples, and which experts are theirs     |
| context  | equal replicas                | positions of the same samples             |
| tensor   | parts of each layer           | features; samples and positions are equal |
| pipeline | stages of the model           | layers; samples and positions are equal   |

So three axes cut the batch, and three cut the model (expert does both). Ranks that differ on data, expert and context
alone hold equal copies of everything but the experts: their gradients are averaged, in one group over the three axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import mesh_groups
from distlab.context_parallel import position_ids
from distlab.plan import Mesh, Plan

COPIES = ("data", "expert", "context")  # ranks along these hold equal copies of all but the experts
EXPERT_COPIES = ("data", "context")  # and along these, of an expert


@dataclass(frozen=True)
class Layout:
    """One rank's place.

    Attributes:
        plan: the degrees.
        mesh: of all ranks.
        coordinates: this rank's place on each axis.
        groups: by axis, the ranks that differ from this one there alone.
        everyone: all ranks of the mesh.
        copies: ranks that hold equal copies of all but the experts.
        expert_copies: ranks that hold equal copies of this rank's experts.
        copies_in_layers: the ranks of `copies` once more, for what layers sum in backward. On the same group a sum
            would wait its turn among the gradients, and ranks may take these in a different order.
    """

    plan: Plan
    mesh: Mesh
    coordinates: Mapping[str, int]
    groups: Mapping[str, ProcessGroup]
    everyone: ProcessGroup
    copies: ProcessGroup
    expert_copies: ProcessGroup
    copies_in_layers: ProcessGroup

    def close(self) -> None:
        """Destroy all groups; no rank may be about to use them."""
        for group in {*self.groups.values(), self.everyone, self.copies, self.expert_copies, self.copies_in_layers}:
            dist.destroy_process_group(group)

    def is_first(self, *axes: str) -> bool:
        """Return whether this rank is the first along all of these axes."""
        return not any(self.coordinates[axis] for axis in axes)

    def own_part(self, batch: Tensor) -> Tensor:
        """Return this rank's samples and positions of a batch that every rank has whole.

        Shapes: [B, S] -> [B/(d e), S/c], for d, e, c ranks along data, expert and context
        """
        place = self.coordinates["data"] * self.plan.expert + self.coordinates["expert"]
        own = batch.chunk(self.plan.num_replicas)[place]
        if self.plan.context == 1:
            return own
        return own.index_select(1, position_ids(batch.shape[1], self.groups["context"]).to(batch.device))


def lay_out(plan: Plan, mesh: Mesh) -> Layout:
    """Make the groups of a mesh over all ranks; every rank calls this.

    Raises:
        ValueError: the mesh does not have as many places as there are ranks.
    """
    groups = mesh_groups(mesh)
    everyone = dist.new_group(list(range(mesh.size)), group_desc=f"all of {mesh}")
    return Layout(
        plan,
        mesh,
        mesh.coordinates(dist.get_rank()),
        groups,
        everyone,
        copies=joint_group(mesh, COPIES, groups),
        expert_copies=joint_group(mesh, EXPERT_COPIES, groups),
        copies_in_layers=joint_group(mesh, COPIES, {}),
    )


def joint_group(mesh: Mesh, axes: Sequence[str], groups: Mapping[str, ProcessGroup]) -> ProcessGroup:
    """Return the ranks that differ from this one on some of these axes and on no other; every rank calls this.

    Where only one of them is longer than 1, that axis' group is returned if `groups` has it, and nothing is made.
    """
    long = [axis for axis in axes if mesh.axis_size(axis) > 1]
    if groups and len(long) <= 1:
        return groups[(long or axes)[0]]
    others = [axis for axis in mesh.names if axis not in axes]
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinates(rank)
        sets.setdefault(tuple(place[axis] for axis in others), []).append(rank)
    made = [dist.new_group(members, group_desc=f"{' x '.join(long)} {members}") for members in sets.values()]
    mine: ProcessGroup = next(
        group for group, members in zip(made, sets.values(), strict=True) if dist.get_rank() in members
    )
    return mine


def problem_of_batch(plan: Plan, inputs: object, targets: object, context: int) -> str:
    """Say why a batch cannot be cut over a plan's ranks and micro-batches; "" where it can.

    Pure, and the same on every rank that is given the same batch.
    """
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            got = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            return f"{name} are {got}; pass tokens [batch, positions], the whole batch on every rank"
    assert isinstance(inputs, Tensor), "looked at above"
    assert isinstance(targets, Tensor), "looked at above"
    if inputs.shape != targets.shape:
        return f"inputs {list(inputs.shape)} and targets {list(targets.shape)}; pass as many of both"
    samples, length = inputs.shape
    parts = plan.num_replicas * plan.num_microbatches
    if samples == 0 or samples % parts:
        return (
            f"a batch of {samples} cannot be cut evenly into data ({plan.data}) x expert ({plan.expert}) x "
            f"micro-batches ({plan.num_microbatches}) = {parts} parts; use a multiple of {parts}"
        )
    if length > context:
        return f"{length} tokens do not fit a context of {context}; pass shorter sequences"
    sequence_parts = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    chunks = math.lcm(2 * plan.context if plan.context > 1 else 1, sequence_parts)
    if length % chunks:
        return (
            f"a sequence of {length} cannot be cut evenly over context ({plan.context})"
            f"{f' and tensor ({plan.tensor}) with sequence_parallel' if plan.sequence_parallel else ''}; use a "
            f"multiple of {chunks}"
        )
    return ""


def checksum(batch: Sequence[Tensor]) -> int:
    """Return a number that batches with other shapes or tokens do not share, but by chance; below 2**61."""
    total = 0
    for tensor in batch:
        places = torch.arange(1, len(tensor) + 1, device=tensor.device).unsqueeze(1)
        for number in (*tensor.shape, int(tensor.sum()), int((tensor * places).sum())):
            total = (total * 1_000_003 + number) % (2**61 - 1)
    return total
