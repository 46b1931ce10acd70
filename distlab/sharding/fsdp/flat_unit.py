"""Unit: parameters that are whole only while they are used.

Between uses a rank keeps its shard: one part of a flat buffer in which all parameters of the unit lie end to end. To
use them, the ranks gather their shards into a full buffer, and the module's parameters are views of it
(`Unit.start_gather`, `Unit.finish_gather`). To free them (`Unit.free`), the *storage* of the full buffer shrinks to
nothing. The views stay: autograd saved such views for backward, and they are right again as soon as the storage has
been gathered again. No tensor is copied. All views share one version counter, by which autograd knows that a tensor
changed since it was saved: it is `HERE` from the end of a gather until the unit is freed. So backward cannot read what
is not there.

The autograd part is one function (`FreedByFullyShard`). Its forward returns the views, so the graph of backward ends
there. Its backward is called when the gradients of all views exist: the unit is done, and their reduce-scatter starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.replicate import broadcast_each
from distlab.collectives import DirectGather, DirectScatter
from distlab.comm import device
from distlab.comm.device import CopyStream
from distlab.comm.p2p import needs_batches
from distlab.comm.shared_memory.group import zeros
from distlab.plan import FlatLayout, Precision
from distlab.sharding.fsdp.gradient import (
    GradientMemory,
    HostGradient,
    PendingGradient,
    mark,
    note_unused,
    put_end_to_end,
)
from distlab.sharding.fsdp.wrapping import UnitMembers, dtype_of
from distlab.sharding.part import FlatShard, OwnPiece, plain
from distlab.trace import OpenCall, SpanWriter

HERE, FREED = 0, 1  # versions of the whole parameters
OnGradients = Callable[["Unit", Sequence[Tensor | None]], None]


@dataclass(frozen=True)
class Options:
    """What all units of a model have in common.

    Attributes:
        group: ranks that hold a shard each.
        replicas: ranks of other groups that hold the same shard, or None.
        device: where parameters are whole.
        precision: types to compute and to sum in; None keeps the parameters' own.
        offload: shards and their gradients live in the host's memory.
        spans: draws gathers and scatters, or None.
        to_gpu: stream of the copies of offloaded shards.
        to_host: stream of the copies of their gradients.
        gradients: where whole gradients wait to be summed.
    """

    group: ProcessGroup | None
    replicas: ProcessGroup | None
    device: torch.device
    precision: Precision | None
    offload: bool
    spans: SpanWriter | None
    to_gpu: CopyStream
    to_host: CopyStream
    gradients: GradientMemory

    @property
    def num_gradients(self) -> int:
        """Ranks whose gradients a mean is of."""
        num = dist.get_world_size(self.group)
        return num if self.replicas is None else num * dist.get_world_size(self.replicas)


class Unit:
    """Parameters that are gathered, and freed, together.

    Attributes:
        index: its number in the model.
        name: of its submodule; "" is the root, and frozen parameters have a unit of their own, "... (frozen)".
        layout: where each parameter lies, and who has which part.
        shard: this rank's part; what optimizers update. Its padding is zero and stays zero.
        members: names, and the modules that use the parameters.
        reshard_after_forward: free after forward and gather again for backward; may be changed between steps.
        sends: whether gradients are reduced as backward brings them (no_sync keeps them whole).
    """

    def __init__(self, index: int, name: str, members: UnitMembers, options: Options) -> None:
        self.index, self.name, self.members, self.options = index, name, members, options
        own = dtype_of(name, members)
        precision = options.precision
        self.compute_dtype = own if precision is None else _dtype(precision.compute)
        self.reduce_dtype = own if precision is None else _dtype(precision.reduce)
        kept = own if precision is None else torch.float32 if precision.master else self.compute_dtype
        shapes = tuple(tuple(parameter.shape) for parameter in members.parameters)
        self.layout = FlatLayout(tuple(members.names), shapes, dist.get_world_size(options.group))
        host = torch.device("cpu") if options.offload else options.device
        self._is_offloaded = options.offload and device.is_gpu(options.device)
        memory = zeros(self.layout.shard_size, dtype=kept, device=host, group=options.group)  # others gather from it
        if self._is_offloaded:
            memory = device.pinned_empty(memory.shape, kept).zero_()
        self.shard = FlatShard(memory, requires_grad=members.parameters[0].requires_grad)
        self.shard.pieces = self._own_pieces()
        hooks = [(at, one._backward_hooks or {}) for at, one in enumerate(members.parameters)]
        self._hooks = [(at, hook) for at, own in hooks for hook in own.values()]
        self.reshard_after_forward = True
        self.sends = True
        self._full = torch.empty(self.layout.padded_size, dtype=self.compute_dtype, device=options.device)
        self._full_bytes = self._full.untyped_storage().nbytes()
        options.gradients.reserve(self.layout.padded_size * self.reduce_dtype.itemsize)
        self._full.untyped_storage().resize_(0)
        self._parts = [*self.layout.sizes, self.layout.padded_size - self.layout.num_elements]
        self._version = -1  # of the shard that the full buffer was gathered from; -1: it is not there
        self._gathering: DirectGather | None = None
        self._copied: Any = None  # event: the offloaded shard has been copied
        self._call: OpenCall | None = None  # of the gather
        self._sum_call: OpenCall | None = None
        self._host_gradient = HostGradient(options.to_host)
        self._pending = PendingGradient(self.shard)
        self._unused: set[int] = set()  # tensors that got no gradient here: of what comes next,
        self._unused_in_sum: set[int] = set()  # and of the sum on its way
        self._scatter: DirectScatter | None = None
        self._replica_sum: tuple[Tensor, dist.Work] | None = None

    def _own_pieces(self) -> list[OwnPiece]:
        """Return the tensors that have elements in the shard, as plain parameters in its memory."""
        memory, trains, pieces = plain(self.shard), self.shard.requires_grad, []
        for at, start, stop, offset in self.layout.pieces(dist.get_rank(self.options.group)):
            own = memory[offset:][: stop - start]
            pieces.append(OwnPiece(self.layout.names[at], at, start, stop, nn.Parameter(own, trains), own))
        return pieces

    # Parameters: gather, use, free

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Take this rank's part of whole parameters, given in the order of the layout; sends nothing."""
        for one in self.shard.pieces:
            one.parameter.copy_(tensors[one.slot].detach().reshape(-1)[one.start : one.stop])

    @torch.no_grad()
    def fill_from_first(self, parameters: Sequence[Tensor]) -> None:
        """Take this rank's part of what the first rank of all holds, sent to the group; shards go to replicas."""
        if parameters[0].device.type == "meta":
            return
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        broadcast_each([flat], self.options.group)
        self.fill(flat.split(list(self.layout.sizes)))
        if self.options.replicas is not None:
            values = plain(self.shard).to(self.options.device)
            broadcast_each([values], self.options.replicas)
            self.shard.copy_(values)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to make the parameters whole, unless they are; do not wait.

        Cost: one all-gather of a shard, in the type of compute: (n-1)/n of the unit's padded bytes sent per rank.
        """
        if self._version == self.shard._version:
            return
        self.finish_gather()
        self._full.untyped_storage().resize_(self._full_bytes)
        self._version = self.shard._version
        self._call = self._started_call()
        if self._is_offloaded:
            with self.options.to_gpu.after_current():
                self._gather(self.options.to_gpu.to_gpu(plain(self.shard)))
                self._copied = device.event(self.options.device)
        else:
            self._gather(plain(self.shard))

    def _gather(self, shard: Tensor) -> None:
        self._gathering = DirectGather(self._full.detach(), shard.to(self.compute_dtype), self.options.group)
        if self._call is not None:
            self._call.follow(self._gathering.work)

    def finish_gather(self) -> None:
        """Wait for a gather that was started."""
        if self._gathering is None:
            return
        self._gathering.finish()
        device.wait_in_stream(self._copied, self.options.device)
        self._gathering = self._copied = None
        self._set_version(HERE)
        self._draw("all_gather", "gather", self._call)

    def free(self) -> None:
        """Free the whole parameters; the shard stays."""
        self.finish_gather()
        self._full.untyped_storage().resize_(0)
        self._set_version(FREED)
        self._version = -1

    def _set_version(self, version: int) -> None:
        torch._C._autograd._unsafe_set_version_counter((self._full,), (version,))

    def views(self, on_gradients: OnGradients | None = None) -> tuple[Tensor, ...]:
        """Return the whole parameters.

        Args:
            on_gradients: is called once backward has computed the gradients of all that are used (None for others).
        """
        if on_gradients is not None and self.shard.requires_grad and torch.is_grad_enabled():
            views: tuple[Tensor, ...] = FreedByFullyShard.apply(  # type: ignore[no-untyped-call]
                self.shard, self, on_gradients
            )
            for number, hook in self._hooks:
                views[number].register_hook(hook)
            return views
        return self._make_views()

    def _make_views(self) -> tuple[Tensor, ...]:
        parts = self._full.split(self._parts)[:-1]
        return tuple([part.view(shape).detach() for part, shape in zip(parts, self.layout.shapes, strict=True)])

    @property
    def buffer(self) -> Tensor:
        """Where the whole parameters lie end to end; without memory while the unit is freed."""
        return self._full

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """Whole gradients that are kept or travel, and what arrives of other ranks'."""
        kept = [] if self._pending.whole is None else [self._pending.whole]
        return [*kept, *([] if self._scatter is None else [self._scatter._full, *self._scatter.arriving])]

    # Gradients: sum over the ranks, keep the own part

    @torch.no_grad()
    def take_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Put backward's gradients end to end, and start to reduce them unless they are to be kept whole."""
        self._pending.check()
        unused = {number for number, one in enumerate(gradients) if one is None}
        self._unused = unused if self._pending.whole is None else unused & self._unused
        size, dtype = self.layout.padded_size, self.reduce_dtype
        if self.sends:
            flat = self.options.gradients.take(size, dtype)
        else:
            flat = torch.empty(size, dtype=dtype, device=self._full.device)
        put_end_to_end(flat, gradients, self.layout)
        if self._pending.whole is not None:
            flat.add_(self._pending.whole)
            self._pending.whole = None
        self._pending.begin()
        if self.sends:
            self.start_scatter(flat)
            self._unused = set()
        else:
            self._pending.whole = flat

    def start_scatter(self, flat: Tensor) -> None:
        """Begin to sum a flat gradient over the group.

        Cost: (n-1)/n of the unit's padded bytes, in the type of the sum, sent per rank.
        """
        self.finish_scatter()
        self.finish_replica_sum()
        if self.reduce_dtype is torch.float16:  # its sum could overflow: divide before, and lose small numbers instead
            flat.div_(self.options.num_gradients).add_(0.0)  # what becomes -0.0 is 0.0
        self._unused_in_sum = self._unused
        mark(flat, self.layout, self._unused)
        self._sum_call = self._started_call()
        self._scatter = DirectScatter(flat, self.options.group)
        if self._sum_call is not None:
            self._sum_call.follow(self._scatter.work)

    @torch.no_grad()
    def finish_scatter(self) -> None:
        """Wait for the sum; with replicas, begin to sum it over them too."""
        if self._scatter is None:
            return
        total = self._scatter.finish()
        self._scatter = None
        self._draw("reduce_scatter", "scatter", self._sum_call)
        if self.options.replicas is None:
            self._keep(total)
            return
        total = total.contiguous()
        self._sum_call = self._started_call()
        work = dist.all_reduce(total, group=self.options.replicas, async_op=True)
        self._replica_sum = total, work
        if self._sum_call is not None and needs_batches(total, self.options.replicas):
            self._sum_call.follow(work)

    @torch.no_grad()
    def finish_replica_sum(self) -> None:
        """Wait for the sum over the replicas."""
        if self._replica_sum is None:
            return
        total, work = self._replica_sum
        work.wait()
        self._replica_sum = None
        self._draw("all_reduce", "scatter", self._sum_call)
        self._keep(total)

    def _keep(self, total: Tensor) -> None:
        """Divide, once, and add to the shard's gradient."""
        self.finish_host_copy()
        note_unused(self.shard, total, self._unused_in_sum, adds=self._pending.summed is not None)
        if self.reduce_dtype is not torch.float16:
            total.div_(self.options.num_gradients)
        total = total.to(self.shard.dtype)
        if self._is_offloaded:
            self._host_gradient.start(total, self._pending.summed)
        else:
            self._pending.add(total)

    @torch.no_grad()
    def finish_host_copy(self) -> None:
        """Let the host wait for an offloaded gradient that is on its way."""
        arrived = self._host_gradient.finish()
        if arrived is not None:
            self._pending.add(arrived)

    def finish_gradient(self) -> None:
        """Wait for all sums, and put the gradient in its place; refuse one that was forgotten on its way."""
        self._wait_for_sums()
        self._pending.settle()

    def _wait_for_sums(self) -> None:
        for finish in (self.finish_scatter, self.finish_replica_sum, self.finish_host_copy):
            finish()

    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """Drop accumulated gradients, also those on their way; or, without set_to_none, make them zeros."""
        if set_to_none:
            self._wait_for_sums()
            self._pending.forget()
        elif self.shard.grad is not None:
            self.shard.grad.zero_()

    def _started_call(self) -> OpenCall | None:
        return None if self.options.spans is None else self.options.spans.call()

    def _draw(self, kind: str, lane: str, call: OpenCall | None) -> None:
        if call is not None:
            dtype = self.compute_dtype if kind == "all_gather" else self.reduce_dtype
            size = self.layout.shard_size if kind == "all_reduce" else self.layout.padded_size
            call.draw(f"{kind} unit {self.index}", kind, lane=lane, num_bytes=size * dtype.itemsize)


class FreedByFullyShard(torch.autograd.Function):
    """Forward: return the whole parameters. Backward: hand their gradients, which all exist now, to the unit.

    Autograd names it where backward would read a parameter that its unit has freed.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: Unit, on_gradients: OnGradients) -> tuple[Tensor, ...]:
        """Return the whole parameters."""
        ctx.unit, ctx.on_gradients = unit, on_gradients
        ctx.set_materialize_grads(False)
        return unit._make_views()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        """Hand over their gradients."""
        ctx.on_gradients(ctx.unit, gradients)
        return None, None, None


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
