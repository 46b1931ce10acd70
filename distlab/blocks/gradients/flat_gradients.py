"""Flat gradients: buckets of gradients that leave during backward, in one order on all ranks.

Backward brings one gradient after the other, the last layer's first. A bucket collects some of them (`GradientSlots`),
and is sent when all are there. `SendInBackward` does that for a list of buckets. It starts them in order, even when a
later bucket is full first: all ranks must make the same calls in one order, and ranks may run their hooks in different
orders. `TimedWork` is one bucket under way, and remembers when.

How a bucket packs and sends is each technique's own: all-reduce (data parallelism) or reduce-scatter (sharding).

A sum in bfloat16 rounds after each addition: 256 + 1 is 256, however often 1 is added. So half precision is summed in
float32 (`all_reduce_in_float32`). What is *sent* may stay short: the values were short to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import all_gather_single, same_kind
from distlab.blocks.gradient_hook import GradientBucket, Pending
from distlab.blocks.gradients.gradient_status import TWICE, UNUSED, USED
from distlab.blocks.modules.moved import Absent
from distlab.trace import SpanWriter

HALF = (torch.float16, torch.bfloat16)


class GradientSlots:
    """A bucket's parameters, one slot each, and which of their gradients are packed.

    A subclass says in `pack` what packing is; without one the gradients stay where they are.

    Attributes:
        parameters: whose gradients travel together.
        marks: stand in the place of gradients that are on their way.
        comes: whether its gradient is.
        statuses: what became of each parameter's gradient in this step (`GradientStatus`).
        packed: whether its gradient is in the bucket.
        num_packed: how many are.
    """

    marks: Sequence[Absent] = ()

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.reset()

    def reset(self) -> None:
        """Be ready for the next step."""
        self.statuses: list[int] = [UNUSED] * len(self.parameters)
        self.comes, self.was_touched = [False] * len(self.parameters), False
        self.empty()

    def empty(self) -> None:
        """Be ready for the next backward pass of the same step."""
        self.packed = [False] * len(self.parameters)
        self.num_packed = 0

    def has_mark(self, slot: int) -> bool:
        """Whether the mark stands in the gradient's place."""
        return self.parameters[slot].grad is self.marks[slot]

    @property
    def is_touched(self) -> bool:
        """Whether a gradient that is on its way was replaced or forgotten."""
        return self.was_touched or any(comes and not self.has_mark(slot) for slot, comes in enumerate(self.comes))

    @property
    def full(self) -> bool:
        """Whether every gradient is packed."""
        return self.num_packed == len(self.parameters)

    def note(self, slot: int) -> bool:
        """Enter that backward brought a gradient; return False where the slot's first gradient may be on the wire."""
        self.statuses[slot] = TWICE if self.packed[slot] else USED
        return not self.packed[slot]

    def take(self, slot: int) -> None:
        """Pack a parameter's gradient."""
        self.pack(slot)
        self.packed[slot] = True
        self.num_packed += 1

    def take_rest(self) -> None:
        """Pack the slots that this backward did not reach: gradients accumulated earlier, or zeros."""
        for slot, packed in enumerate(self.packed):
            if not packed:
                self.take(slot)

    def pack(self, slot: int) -> None:
        """Copy a gradient to its place, if it has one already; one that is None counts as zeros."""


Slots = TypeVar("Slots", bound=GradientSlots)


class SendInBackward(Generic[Slots]):
    """Hooks on all parameters that fill buckets during backward and start each full one, in order.

    Args:
        buckets: in the order in which they are sent.
        start: begins a bucket's exchange, and does not wait.
        on_gradient: called with bucket and slot when backward has added to a gradient; returns whether the gradient is
            complete and goes into its bucket now.
        num_early: how many of the buckets may start during backward; None is all.

    Attributes:
        num_started: buckets that were started in this pass.
    """

    def __init__(
        self,
        buckets: Sequence[Slots],
        start: Callable[[Slots], None],
        on_gradient: Callable[[Slots, int], bool],
        *,
        num_early: int | None = None,
    ) -> None:
        self.buckets, self.num_started = buckets, 0
        self._start, self._on_gradient = start, on_gradient
        self._num_early = len(buckets) if num_early is None else num_early
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
            for bucket in buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    def _hook(self, bucket: Slots, slot: int) -> Callable[[nn.Parameter], None]:
        def gradient_ready(_: nn.Parameter) -> None:
            if self._on_gradient(bucket, slot):
                bucket.take(slot)
                if bucket.full:
                    self.start_full(self._num_early)

        gradient_ready.sends = True  # type: ignore[attr-defined]
        return gradient_ready

    def start_full(self, end: int | None = None) -> None:
        """Start, in order, every bucket that is full and has only started ones before it; `end` bounds their number."""
        end = len(self.buckets) if end is None else end
        while self.num_started < end and self.buckets[self.num_started].full:
            self._start(self.buckets[self.num_started])
            self.num_started += 1

    def reset(self) -> None:
        """Be ready for the next pass."""
        self.num_started = 0

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def refuse_second(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse parameters whose gradients a different technique sends: they would be sent and divided twice.

    Raises:
        ValueError: on every rank that built the same techniques.
    """
    for parameter in parameters:
        if any(getattr(hook, "sends", False) for hook in (parameter._post_accumulate_grad_hooks or {}).values()):
            raise ValueError(
                f"rank {dist.get_rank()}: gradients of this module are averaged already, by a DataParallel or "
                "ShardedOptimizer that was built before; call close() of that one first, or build the module anew"
            )


class TimedWork:
    """An exchange under way: made when it starts, and over with `wait()`.

    Args:
        start: begins it.
        spans: draws it, with `mark`.
        of_nccl: whether it is a call of nccl, which tells by itself when it is over.
    """

    def __init__(
        self, start: Callable[[], Pending | None], spans: SpanWriter | None = None, *, of_nccl: bool = False
    ) -> None:
        self._call = None if spans is None else spans.call()
        pending = start()
        assert pending is not None, "only ranks outside the group get nothing to wait for"
        self._pending = pending
        if self._call is not None and of_nccl:
            self._call.follow(pending)

    def wait(self) -> None:
        """Wait until it is over."""
        self._pending.wait()

    def note_end(self) -> None:
        """Remember when a call was first seen to be over; of a gradient hook only its own wait tells."""
        call, work = self._call, self._pending
        if call is not None and call.end_ns is None and isinstance(work, dist.Work) and work.is_completed():
            call.note_end()

    def mark(self, name: str, num_bytes: int) -> None:
        """Draw it on the communication lane; a call whose end was not seen earlier ends now."""
        if self._call is not None:
            self._call.draw(name, "all_reduce", lane="communication", num_bytes=num_bytes)


@torch.no_grad()
def sum_and_divide(parameters: list[nn.Parameter], groups: Sequence[ProcessGroup | None], divisor: int) -> None:
    """Sum gradients over groups, one after the other, as flat rows; then divide. For what is averaged after backward.

    A parameter without a gradient on every rank keeps None; where only some have one, the others count as zero.

    Cost: per dtype and group one all-reduce of the parameters' elements, and of one flag per parameter.
    """
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    if not groups:  # nothing travels, and nothing is copied
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        return
    for same in same_kind(parameters):
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in same]
            + [same[0].new_tensor([float(p.grad is not None) for p in same])]
        )
        for group in groups:
            all_reduce_in_float32(flat, group)
        *parts, present = flat.split([*(p.numel() for p in same), len(same)])
        for parameter, part, ranks in zip(same, parts, present.tolist(), strict=True):
            if ranks:
                mean = part.view(parameter.shape) / divisor
                parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)


def all_reduce_in_float32(tensor: Tensor, group: ProcessGroup | None = None, *, op: str = "sum") -> Tensor:
    """Sum a half-precision tensor over the group, in place, as if it were float32 until the end.

    Each rank receives everybody's values of its own part as they are, adds them in float32, rounds once, and gives the
    result to all. A float32 copy sent instead would need twice the bytes.

    Shapes: any; the same on all ranks; contiguous; returns `tensor`.
    Cost: 2 E (n-1)/n elements of the tensor's own type sent per rank (as a ring in that type); two calls. A longer type
        takes one plain all-reduce.
    Error: one rounding of the float32 sum; a sum in bfloat16 rounds n - 1 times. The same bits on every rank.

    Raises:
        ValueError: before any message: an op other than "sum" or "mean", or a tensor that is not contiguous.
    """
    return _Float32Sum(tensor, group, op).wait()


class _Float32Sum:
    """A sum, or a mean, in float32: begun when it is made; `wait` leaves it in the tensor."""

    @torch.no_grad()
    def __init__(self, tensor: Tensor, group: ProcessGroup | None, op: str) -> None:
        if op not in ("sum", "mean") or not tensor.is_contiguous():
            text = f"op is {op!r}, contiguous {tensor.is_contiguous()}; pass sum or mean, and a contiguous tensor"
            raise ValueError(text)
        self.tensor, self.group, self.num_ranks = tensor, group, dist.get_world_size(group)
        self.divisor, self.is_half = self.num_ranks if op == "mean" else 1, tensor.dtype in HALF
        if not self.is_half:
            self.work = dist.all_reduce(tensor.div_(self.divisor), group=group, async_op=True)
            return
        flat = tensor.detach().view(-1)
        self.outgoing = flat.new_zeros(self.num_ranks * -(-flat.numel() // self.num_ranks))  # the last part padded
        self.outgoing[: flat.numel()] = flat
        self.incoming = torch.empty_like(self.outgoing)
        self.work = dist.all_to_all_single(self.incoming, self.outgoing, group=group, async_op=True)

    @torch.no_grad()
    def wait(self) -> Tensor:
        """Finish it, and return the tensor."""
        self.work.wait()
        if self.is_half:
            share = len(self.incoming) // self.num_ranks
            theirs = self.incoming.view(self.num_ranks, share)  # my part, as each rank has it
            mine = theirs[0].float()
            for other in theirs[1:]:  # in the order of ranks, so the same input gives the same bits again
                mine.add_(other)
            mine = mine.div_(self.divisor).to(self.tensor.dtype)  # while long: a mean that fits never overflows
            all_gather_single(self.outgoing, mine, group=self.group)
            self.tensor.view(-1).copy_(self.outgoing[: self.tensor.numel()])
        return self.tensor


class Float32Reduce:
    """GradientHook that averages half-precision buckets in float32: `DataParallel(module, hook=Float32Reduce())`.

    Cost: as `all_reduce_in_float32`: the bytes of a half-precision all-reduce.
    Error: one rounding of the mean.
    """

    def start(self, bucket: GradientBucket, group: ProcessGroup | None) -> Pending:
        """Begin to exchange a bucket; do not wait."""
        return _Float32Sum(bucket.buffer, group, "mean")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no step depends on an earlier one."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back nothing."""
