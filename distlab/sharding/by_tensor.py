"""ByTensor: a model cut tensor by tensor on dim 0, as torch's fully_shard (FSDP2) does; `FullyShard` cuts flat rows.

Each rank keeps its own rows of every parameter, by torch.chunk's rule: the last ranks' may be few, or none. These rows
are parameters with a name and dims of their own, so groups of an optimizer may follow names and dims. What is frozen
lies beside what trains: it is gathered in the same call, and no gradient of it travels. The price is copies and
padding: all tensors of a unit travel in one collective, copied into one buffer before it and out of it after.

Whole tensors live as long as someone holds them. The modules hold them during their unit's forward. What autograd would
save for backward is noted instead: which tensor, and how it was seen. Backward gathers the unit again and sees it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from distlab.blocks.eight_bits import E4M3, agree_on_largest, from_eight, largest_of, scale_of, to_eight
from distlab.blocks.modules.blocks import Choice
from distlab.blocks.replicate import agree_on_build, broadcast_each
from distlab.collectives import DirectGather, DirectScatter
from distlab.sharding.checks import parameters_to_shard
from distlab.sharding.cut_layers import CutLayers, clip_shards_
from distlab.sharding.fsdp.hooks import put
from distlab.sharding.fsdp.step import step_on_pieces
from distlab.sharding.fsdp.wrapping import ROOT, UnitMembers, assign, automatic_units, chosen_units, dtype_of
from distlab.sharding.part import as_part


class TensorUnit:
    """Tensors that are gathered together, and whose gradients are summed together.

    Attributes:
        members: their names, and the modules that use them.
        parts: this rank's rows of each; what optimizers update.
        shapes: of the whole tensors.
        rows: of the longest part of each: the ranks' parts lie that far apart.
        in_eight: numbers of those that travel in 8 bits.
    """

    def __init__(self, name: str, members: UnitMembers, group: ProcessGroup | None, *, eight_bits: bool) -> None:
        dtype_of(name, members)
        linear = {at.tensor for at in members.places if isinstance(at.module, nn.Linear) and at.attribute == "weight"}
        self.in_eight = sorted(linear) if eight_bits else []
        self.members, self.group, self.num_ranks = members, group, dist.get_world_size(group)
        self.shapes = [one.shape for one in members.parameters]
        self.rows = [-(-len(one) // self.num_ranks) for one in members.parameters]  # of the longest part
        self.parts = []
        for whole, rows in zip(members.parameters, self.rows, strict=True):
            own = whole.detach()[dist.get_rank(group) * rows :][:rows].clone(memory_format=torch.contiguous_format)
            part = nn.Parameter(own, requires_grad=whole.requires_grad)
            part.is_shard = True  # type: ignore[attr-defined]  # checkpoints refuse to take rank 0's for all
            if part.requires_grad:
                part.register_post_accumulate_grad_hook(_mark_gradient)
            self.parts.append(part)
        members.parameters.clear()

    @property
    def version(self) -> int:
        """Changes when a part changes."""
        return sum(part._version for part in self.parts)

    @torch.no_grad()
    def gather(self, *, exactly: bool = False) -> list[Tensor]:
        """Return the whole tensors; those that travel in 8 bits as these have them, unless exactly.

        Cost: one all-gather: (n-1)/n of the unit's padded bytes sent per rank, of a number in 8 bits one byte; for each
            tensor in 8 bits 4 bytes of an all-reduce.
        """
        own: list[Tensor] = [_padded(part, rows) for part, rows in zip(self.parts, self.rows, strict=True)]
        small = {} if exactly else self._scales()
        own = [to_eight(one, E4M3, small[at]) if at in small else one for at, one in enumerate(own)]
        bytes_of = [one.reshape(-1).view(torch.uint8) for one in own]
        flat = torch.cat(bytes_of)
        arrived = flat.new_empty(self.num_ranks, len(flat))
        DirectGather(arrived.view(-1), flat, self.group).finish()
        columns = [one.clone(memory_format=torch.contiguous_format) for one in arrived.split([*map(len, bytes_of)], 1)]
        whole = [
            column.view(-1).view(one.dtype).view(-1, *shape[1:])[: shape[0]]
            for column, one, shape in zip(columns, own, self.shapes, strict=True)
        ]
        return [
            from_eight(one, small[at], self.parts[at].dtype) if at in small else one for at, one in enumerate(whole)
        ]

    def _scales(self) -> dict[int, Tensor]:
        """Return the scales of tensors that travel in 8 bits: a rank has a part, and all must cast by one scale."""
        if not self.in_eight:
            return {}
        names = [self.members.names[at] for at in self.in_eight]
        largest = agree_on_largest(torch.stack([largest_of(self.parts[at]) for at in self.in_eight]), self.group, names)
        return dict(zip(self.in_eight, scale_of(largest, E4M3), strict=True))

    @torch.no_grad()
    def scatter(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return this rank's rows of the gradients' mean; None for what is frozen.

        Cost: one reduce-scatter: (n-1)/n of the padded bytes of what trains, sent per rank.
        """
        trained = [at for at, part in enumerate(self.parts) if part.requires_grad]
        rows = [_padded(gradients[at], self.num_ranks * self.rows[at]).view(self.num_ranks, -1) for at in trained]
        total = DirectScatter(torch.cat(rows, 1).view(-1), self.group, by_rank=True).finish().div_(self.num_ranks)
        found: list[Tensor | None] = [None] * len(self.parts)
        for at, one in zip(trained, total.split([one.shape[1] for one in rows]), strict=True):
            found[at] = one[: self.parts[at].numel()].view_as(self.parts[at])
        return found


class Saved(NamedTuple):
    """What autograd keeps in place of a whole tensor, or of a view of one."""

    unit: TensorUnit
    tensor: int
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class ByTensor(nn.Module):
    """Shard a module's parameters, gradients and optimizer state tensor by tensor over a group.

        model = ByTensor(module)
        optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim > 1]}, ...])
        loss_fn(model(inputs), targets).backward()
        model.clip_gradients_(1.0)
        optimizer.step()

    Gradients are means over the ranks as soon as backward is over. All ranks run the same units in one order. A tensor
    that no rank used gets a gradient of zeros, if its unit was used. Nothing overlaps. The optimizer must work by
    element: any other is refused at its first step. `recompute_blocks(model.module)` comes after this, not before.

    Args:
        module: the model; the values of the group's first rank are taken.
        group: ranks that hold rows each; None is all.
        units: submodules to gather one by one, as of `FullyShard`.
        eight_bits: weights of linear layers travel as float8_e4m3fn, with a scale that all ranks agree on, and are used
            so; parts, gradients and updates stay what they are.

    Cost: with Psi bytes of padded parameters, Psi' of those that train: (2 Psi + Psi') (n-1)/n sent per step and rank.
    Error: as one process up to the order of additions; repeats bit for bit.

    Raises:
        ValueError: on every rank: ranks hold different models, a parameter without dims, units that cannot be.

    Source: torch.distributed.fsdp.fully_shard (FSDP2); Rajbhandari et al. 2020 (ZeRO, stage 3).
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None = None,
        *,
        units: Choice | None = None,
        eight_bits: bool = False,
    ) -> None:
        super().__init__()
        step_on_pieces()
        named = parameters_to_shard(module, plain=True)
        names = automatic_units(module) if units is None else chosen_units(module, units)
        agree_on_build(named, group, units=units if units is None else names, eight_bits=eight_bits)
        for name, one in named:
            if one.ndim == 0:
                raise ValueError(f"{name} has no dims, so it has no rows to cut; give it the shape [1]")
        found = assign(module, names, automatic=units is None)
        broadcast_each([one.detach() for one in (*(one for _, one in named), *module.buffers())], group)
        self.module, self.group, self.cut = module, group, CutLayers.of(module)
        self.units: list[TensorUnit] = []
        self._live: dict[int, tuple[TensorUnit, int]] = {}  # whole tensors in use, by where they lie
        self._again: tuple[TensorUnit, list[Tensor]] | None = None  # what backward has gathered last
        for name in (ROOT, *names):
            both = [found[name, frozen] for frozen in (False, True) if (name, frozen) in found]
            if both:
                self._wrap(name, UnitMembers.joined(both), eight_bits)

    def _wrap(self, name: str, members: UnitMembers, eight_bits: bool) -> None:
        """Put parts in the place of parameters, and whole tensors in their place around the module's forward."""
        unit = TensorUnit(name, members, self.group, eight_bits=eight_bits)
        self.units.append(unit)
        module = self.module.get_submodule(name)
        inner = module.forward

        def show(tensors: Sequence[Tensor]) -> None:
            for place in unit.members.places:
                put(place.module, place.attribute, tensors[place.tensor])

        def forward(*args: Any, **kwargs: Any) -> Any:
            whole = WholeTensors.apply(self, unit, *unit.parts)  # type: ignore[no-untyped-call]
            at = {one.untyped_storage().data_ptr(): number for number, one in enumerate(whole) if one.numel()}
            self._live |= {pointer: (unit, number) for pointer, number in at.items()}
            show(whole)
            try:
                return inner(*args, **kwargs)
            finally:
                show(unit.parts)
                for pointer in at:
                    del self._live[pointer]
                for one, own in zip(whole, unit.members.names, strict=True):
                    if one._version:
                        raise RuntimeError(
                            f"{own} was changed in its unit's forward (an Embedding with max_norm does), and the "
                            "change would be lost; compute with a changed copy instead"
                        )

        show(unit.parts)
        module.forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; what autograd saves of whole tensors is noted."""
        self._again = None
        with saved_tensors_hooks(self._note, self._see):
            return self.module(*args, **kwargs)

    def _note(self, saved: Tensor) -> Tensor | Saved:
        found = self._live.get(saved.untyped_storage().data_ptr())
        if found is None:
            return saved
        return Saved(*found, found[0].version, saved.size(), saved.stride(), saved.storage_offset())

    def _see(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        unit = saved.unit
        if saved.version != unit.version:
            raise RuntimeError(
                f"{unit.members.names[saved.tensor]} or its unit was changed between forward and backward, so backward "
                "would use other parameters than forward; update after backward"
            )
        if self._again is None or self._again[0] is not unit:
            self._again = unit, unit.gather()
        return self._again[1][saved.tensor].as_strided(saved.size, saved.stride, saved.offset)

    def clip_gradients_(self, max_norm: float, *, check_finite: bool = True) -> Tensor:
        """Clip the gradients by the norm of all ranks' parts; return it. Every rank calls this.

        Cost: an all-reduce of 8 bytes, and one over the tensor ranks of a cut model.
        """
        return clip_shards_(self.module.named_parameters(), max_norm, self.group, self.cut, check_finite=check_finite)

    def full_state(self) -> dict[str, Tensor]:
        """Return the module's whole state, by its own names; every rank calls this.

        Cost: an all-gather for each unit.
        """
        state = dict(self.module.state_dict())
        gathered = (zip(unit.parts, unit.gather(exactly=True), strict=True) for unit in self.units)
        whole = {id(part): one for unit in gathered for part, one in unit}
        places = {name: id(part) for name, part in self.module.named_parameters(remove_duplicate=False)}
        return state | {name: whole[part] for name, part in places.items() if name in state}


class WholeTensors(torch.autograd.Function):
    """Forward: gather a unit. Backward: the mean of its gradients, this rank's rows."""

    @staticmethod
    def forward(ctx: Any, model: ByTensor, unit: TensorUnit, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return the whole tensors."""
        ctx.model, ctx.unit = model, unit
        whole = unit.gather()
        ctx.mark_non_differentiable(*(one for one, part in zip(whole, parts, strict=True) if not part.requires_grad))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sum and scatter: all gradients of the unit exist, so that its whole tensors may go."""
        ctx.model._again = None
        return None, None, *ctx.unit.scatter(gradients)


def _mark_gradient(part: Tensor) -> None:
    """Let a part's gradient refuse what would take it for the whole one, such as torch's clip_grad_norm_."""
    assert part.grad is not None, "called once there is one"
    part.grad = as_part(part.grad)


def _padded(part: Tensor, rows: int) -> Tensor:
    return torch.cat([part.detach(), part.new_zeros(rows - len(part), *part.shape[1:])])
