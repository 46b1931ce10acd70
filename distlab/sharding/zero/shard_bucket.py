"""ShardBucket: parameters that lie in one buffer, of which each rank owns a part, and how their gradients travel.

A backward pass hands over one gradient after the other (`take`). When all are there the bucket is sent (`start`): every
rank gets the mean of its own part. `finish` keeps that part and frees the rest. After the update each rank has new
values of its own part, and `gather` brings the others'.

Parts are cut in one of two ways. "elements": equal shards, wherever the cut falls, so reduce-scatter and all-gather
are one call each. "tensors": whole parameters, so parts differ in size, and each owner gets its part by a reduce of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import MOST_ALIGNED, alignment
from distlab.blocks.gradients.flat_gradients import GradientSlots
from distlab.blocks.gradients.gradient_status import MOVED, NOT_FINITE, ON_THEIR_WAY, SPARSE, UNUSED, USED
from distlab.collectives import DirectGather, DirectScatter
from distlab.comm.p2p import started
from distlab.plan import FlatLayout
from distlab.sharding.part import NO_MEANS, OwnPiece, Piece, as_part, nowhere, replaced
from distlab.trace import SpanWriter

Kind: TypeAlias = tuple[torch.dtype, torch.device]
Use: TypeAlias = tuple[str, Kind]  # "gradients" that travel until they are summed, "arriving" parts of other ranks


class BufferPool:
    """Where all buckets of a model get their buffers, used again and again: as many as are under way, and no more.

    Attributes:
        made: all of them, in use or not.
    """

    def __init__(self) -> None:
        self._sizes: dict[Use, int] = {}
        self._spare: dict[Use, list[Tensor]] = {}
        self.made: list[Tensor] = []

    def reserve(self, use: Use, size: int) -> None:
        """Announce how many elements a bucket will need; call it before anything is taken."""
        self._sizes[use] = max(self._sizes.get(use, 0), size)
        self._spare.setdefault(use, [])

    def take(self, use: Use) -> Tensor:
        """Return a buffer; what it holds is of no use."""
        if not self._spare[use]:
            self.made.append(torch.empty(self._sizes[use], dtype=use[1][0], device=use[1][1]))
            return self.made[-1]
        return self._spare[use].pop()

    def give_back(self, use: Use, buffer: Tensor) -> None:
        """Take a buffer that is not needed any more."""
        self._spare[use].append(buffer)

    def free(self, what: str) -> None:
        """Free the memory of all buffers for one purpose that are not in use."""
        for use in [use for use in self._spare if use[0] == what]:
            spare = {id(buffer) for buffer in self._spare[use]}
            self.made = [buffer for buffer in self.made if id(buffer) not in spare]
            self._spare[use].clear()


class ShardBucket(GradientSlots):
    """Parameters in one buffer of which this rank owns the part `bounds`.

    Attributes:
        parameters: the module's own, which are views of `whole` from now on.
        whole: all their values, padding included.
        edges: where each rank's part begins, and the end.
        pieces: what this rank owns.
        shard: mean gradient of the own part, where `held`.
        held: a sum has arrived since gradients were last forgotten.

    Args:
        index: place in the order in which buckets are sent.
        named: names and parameters, of one dtype on one device.
        owners: the rank that owns each parameter; None cuts equal shards.
        group: ranks that own a part each.
        keep: keep a buffer for all gradients between steps (stage 1), or one for the own part (stage 2).
        pool: where it gets buffers.
    """

    def __init__(
        self,
        index: int,
        named: Sequence[tuple[str, nn.Parameter]],
        owners: Sequence[int] | None,
        group: ProcessGroup | None,
        *,
        keep: bool,
        pool: BufferPool,
    ) -> None:
        self.index, self.group, self.keep, self.pool = index, group, keep, pool
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.equal = owners is None
        # What one rank owns lies side by side, and each tensor where a longer type may begin.
        in_order = sorted(
            zip(owners or [0] * len(named), named, strict=True), key=lambda pair: (pair[0], -alignment(pair[1][1]))
        )
        owners, named = owners and [owner for owner, _ in in_order], [one for _, one in in_order]
        self.names = tuple(name for name, _ in named)
        self._scatter: DirectScatter | None = None
        self._landing: Tensor | None = None
        self._reduces: list[dist.Work] = []
        super().__init__([parameter for _, parameter in named])
        shapes = tuple(tuple(parameter.shape) for parameter in self.parameters)
        self.layout = FlatLayout(self.names, shapes, self.num_ranks if self.equal else 1)
        self.edges, offsets = self._cut(owners)
        self.bounds = self.edges[self.rank], self.edges[self.rank + 1]
        first = self.parameters[0]
        self.kind: Kind = (first.dtype, first.device)
        self._places = list(zip(offsets, self.layout.sizes, shapes, strict=True))
        ends = [*offsets[1:], self.edges[-1]]
        self._gaps = [slice(at + size, end) for (at, size, _), end in zip(self._places, ends, strict=True)]
        self.whole = torch.zeros(self.edges[-1], dtype=first.dtype, device=first.device)
        self._move_in()
        self.pieces = self._own_pieces()
        self._buffer = torch.zeros_like(self.whole) if keep else None
        own = slice(*self.bounds)
        self.shard = self._buffer[own] if self._buffer is not None else torch.zeros_like(self.whole[own])
        self.held = False
        self.has_gradient = [False] * len(named)
        self._is_marked = [False] * len(named)  # since `hand_out`
        self._carried: Tensor | None = None
        self.marks = [nowhere(parameter, self.shard, NO_MEANS) for parameter in self.parameters]
        pool.reserve(("gradients", self.kind), self.whole.numel())
        pool.reserve(("arriving", self.kind), self.layout.shard_size * (self.num_ranks - 1) if self.equal else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.whole.numel() * self.whole.element_size()

    def forget(self, *, to_none: bool = True) -> None:
        """Forget all gradients; or let those that there are be zeros, where no other comes."""
        before = [had and not to_none for had in self.has_gradient]
        self.forget_sums()
        self.has_gradient = before
        for parameter in self.parameters:
            parameter.grad = None

    def forget_sums(self) -> None:
        """Forget gradients that were summed; those that this backward pass has brought stay."""
        self.held, self._carried = False, None
        self.has_gradient, self._is_marked = ([False] * len(self.parameters) for _ in range(2))
        for piece in self.pieces:
            piece.parameter.grad = None

    def take_mark(self, slot: int) -> None:
        """Remove a parameter's mark; where `module.zero_grad()` has done so, forget what was summed."""
        if self.has_mark(slot):
            self.parameters[slot].grad = None
        elif self.comes[slot]:
            self.was_touched = True
        elif self.lost_mark(slot):
            self.forget_sums()
        elif self._is_marked[slot]:
            self._replace_sum(slot)
        self._is_marked[slot] = self.comes[slot] = False

    def _replace_sum(self, slot: int) -> None:
        """Forget one parameter's sum: a gradient that was set by hand stands for all that was summed before."""
        begin, size, _ = self._places[slot]
        for flat in (self.shard, self._carried):
            if flat is not None:
                flat[max(begin - self.bounds[0], 0) : max(begin + size - self.bounds[0], 0)].zero_()

    def lost_mark(self, slot: int) -> bool:
        """Whether a parameter's mark was taken away since `hand_out`."""
        return self._is_marked[slot] and self.parameters[slot].grad is None

    def pack(self, slot: int) -> None:
        """Copy a parameter's gradient to its place, divided by the ranks, and take it from the parameter."""
        self.take_mark(slot)
        if self.num_packed == 0:
            self._open()
        view, parameter = self._place(self._buffer, slot), self.parameters[slot]
        gradient = parameter.grad
        if gradient is not None and self.statuses[slot] == UNUSED:  # set by hand
            self._replace_sum(slot)
            self.statuses[slot] = USED
        if gradient is not None and gradient.layout is not torch.strided:
            self.statuses[slot], gradient = SPARSE, None
        elif parameter.data_ptr() != self._place(self.whole, slot).data_ptr():
            self.statuses[slot] = MOVED
        if gradient is None:
            view.zero_()
        else:  # divided before it is summed, so that half precision cannot overflow
            torch.mul(gradient.detach(), 1 / self.num_ranks, out=view)
        self.comes[slot] = True
        self._put_mark(slot, ON_THEIR_WAY)

    def _put_mark(self, slot: int, reason: str) -> None:
        self.marks[slot].reason, self.parameters[slot].grad = reason, self.marks[slot]

    def start(self, spans: SpanWriter | None) -> None:
        """Begin to sum the bucket over the ranks, and to draw that; do not wait."""
        buffer = self._buffer
        assert buffer is not None, "a bucket starts when its gradients lie in its buffer"
        self._call = None if spans is None else spans.call()
        if not self.whole.numel():  # parameters without elements, on every rank
            return
        if self.equal:
            self._landing = self.pool.take(("arriving", self.kind))
            whole = buffer[: self.whole.numel()]
            self._scatter = DirectScatter(whole, self.group, landing=self._landing, in_place=True)
            if self._call is not None:
                self._call.follow(self._scatter.work)
            return
        for owner, part in self._parts(buffer):
            self._reduces.append(started(dist.reduce(part, group_dst=owner, group=self.group, async_op=True)))

    def finish(self) -> None:
        """Wait for the sum, add it to what `shard` holds, and give the buffers back."""
        buffer = self._buffer
        assert buffer is not None, "a bucket finishes once after each start"
        total = buffer[slice(*self.bounds)] if self._scatter is None else self._scatter.finish()
        for work in self._reduces:
            work.wait()
        if self._call is not None:
            name = f"reduce_scatter bucket {self.index}"
            self._call.draw(name, "reduce_scatter", lane="scatter", num_bytes=self.num_bytes)
        if self._carried is not None:
            torch.add(total, self._carried, out=self.shard)
            self._carried = None
        elif self.held and not self.keep:
            self.shard.add_(total)
        elif self.shard.data_ptr() != total.data_ptr():
            self.shard.copy_(total)
        if self._landing is not None:
            self.pool.give_back(("arriving", self.kind), self._landing)
        if not self.keep:
            self._buffer = None
            self.pool.give_back(("gradients", self.kind), buffer)
        self.held = True
        self._scatter, self._landing, self._reduces = None, None, []
        self.empty()

    def gather(self) -> list[DirectGather | dist.Work]:
        """Begin to bring every rank's part of the parameters to all, in place; return what to wait for."""
        if not self.whole.numel():
            return []
        if self.equal:
            return [DirectGather(self.whole, self.whole[slice(*self.bounds)], self.group)]
        return [
            started(dist.broadcast(part, group_src=owner, group=self.group, async_op=True))
            for owner, part in self._parts(self.whole)
        ]

    def hand_out(self, used: Sequence[bool]) -> None:
        """Set the pieces' gradients, None where no rank has one; the whole parameters get a mark."""
        self.has_gradient = [before or now for before, now in zip(self.has_gradient, used, strict=True)]
        for slot, parameter in enumerate(self.parameters):
            parameter.grad = None
            if self.has_gradient[slot]:
                self._put_mark(slot, NO_MEANS)
        self._is_marked = list(self.has_gradient)
        self.mark_gradients(True)

    def mark_gradients(self, refusing: bool) -> None:
        """Let pieces tell of changes, and their gradients refuse torch's tools; or be plain ones, for the own step."""
        for piece in self.pieces:
            piece.settle()
            piece.parameter.__class__ = Piece if refusing else nn.Parameter
            if self.has_gradient[piece.slot]:
                gradient = self.gradient_of(piece)
                piece.parameter.grad = as_part(gradient) if refusing else replaced(piece.parameter.grad, gradient)

    def note_not_finite(self) -> None:
        """Enter which of this rank's mean gradients are NaN or infinite."""
        if self.shard.sum().isfinite():  # almost always; a sum that is too large for its type is looked into, below
            return
        for piece in self.pieces:
            if not self.gradient_of(piece).isfinite().all():
                self.statuses[piece.slot] = NOT_FINITE

    def gradient_of(self, piece: OwnPiece) -> Tensor:
        """Return the mean gradient of a piece, as a view of the shard."""
        offset = self._places[piece.slot][0] + piece.start - self.bounds[0]
        return self.shard[offset : offset + piece.stop - piece.start].view(piece.parameter.shape)

    def _open(self) -> None:
        """Have a buffer for the gradients that are about to come."""
        if self._buffer is None:
            self._buffer = self.pool.take(("gradients", self.kind))
            for gap in self._gaps:
                self._buffer[gap].zero_()  # padding travels too
        elif self.held:  # the own part of the buffer is about to be written, and holds what was summed before
            self._carried = self.shard.clone()

    def _place(self, flat: Tensor | None, slot: int) -> Tensor:
        assert flat is not None, "there is a buffer while gradients are taken"
        offset, size, shape = self._places[slot]
        return flat[offset : offset + size].view(shape)

    def _parts(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Return the owners that own something here, each with its part."""
        parts = [(owner, flat[self.edges[owner] : self.edges[owner + 1]]) for owner in range(self.num_ranks)]
        return [(owner, part) for owner, part in parts if part.numel()]

    def _cut(self, owners: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Return where each rank's part begins, and the end; and where each tensor begins."""
        if owners is None:
            return [shard * self.layout.shard_size for shard in range(self.num_ranks + 1)], [*self.layout.offsets]
        edges, offsets = [0], []
        for rank in range(self.num_ranks):
            sizes = [size for owner, size in zip(owners, self.layout.sizes, strict=True) if owner == rank]
            *starts, end = accumulate(sizes, initial=edges[-1])
            offsets += starts
            edges.append(-(-end // MOST_ALIGNED) * MOST_ALIGNED)
        return edges, offsets

    @torch.no_grad()
    def _move_in(self) -> None:
        for slot, parameter in enumerate(self.parameters):
            view = self._place(self.whole, slot)
            view.copy_(parameter)
            parameter.data = view

    def _own_pieces(self) -> list[OwnPiece]:
        """Return the part of each parameter that lies in the own bounds: rows, or whole tensors in their shape."""
        low, high = self.bounds
        found = []
        for slot, (offset, size, shape) in enumerate(self._places):
            start, stop = max(offset, low), min(offset + size, high)
            if start < stop:
                values = self.whole[start:stop] if self.equal else self.whole[start:stop].view(shape)
                found.append(OwnPiece(self.names[slot], slot, start - offset, stop - offset, Piece(values), values))
        return found
