# mypy: disable-error-code="override, assignment"
# torch's stubs declare each method once for every way in which C++ may be called; calls from torch come in one way.
"""The process group that torch sees: each method takes a collective apart, checks it, and has it done.

torch's Python functions call these methods by name. Its C++ code (DDP's reducer, functional collectives) reaches those
that torch's trampoline knows. Newer versions of torch have new names for some; both are here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.shared_memory.collectives.collectives import Collectives
from distlab.shared_memory.collectives.dense import (
    Landings,
    bytes_of,
    check,
    check_list,
    fits,
    flat_of,
    listed,
    parts,
    places,
    split_bytes,
)
from distlab.shared_memory.collectives.reductions import reduction_of
from distlab.shared_memory.group_base import GroupBase
from distlab.shared_memory.join import CannotShare
from distlab.shared_memory.meeting import Meeting, meet
from distlab.shared_memory.messages.messages import Messages, MessageWork
from distlab.shared_memory.untraced import keep_untraced
from distlab.shared_memory.work import SharedWork, Tensors


class SharedGroup(GroupBase):
    """A process group whose ranks meet in shared memory."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of all ranks."""
        return self._reduce_all("all_reduce", listed(tensors), opts, -1)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Combine several tensors."""
        return self._reduce_all("all_reduce", tensors, opts, -1)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of all ranks at the root."""
        return self._reduce_all("reduce", listed(tensors), opts, self._root(opts))

    def _reduce_all(self, op: str, tensors: Tensors, opts: Any, root: int) -> Any:
        who, all_reduce = self._who(op), self._collectives.all_reduce
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        kind = getattr(kind, "op", kind)
        for tensor in tensors:
            check(tensor, who, written=True)
        reductions = [reduction_of(kind, tensor.dtype, who) for tensor in tensors]

        def do() -> None:
            landings = Landings()
            for tensor, reduction in zip(tensors, reductions, strict=True):
                all_reduce(landings.of(tensor), reduction, root)
            if root in (-1, self._meeting.rank):
                landings.settle()

        key = (op, root, kind, *[(t.shape, t.dtype) for t in tensors])
        return self._start(key, lambda: self._text(op, tensors, root, reductions[0].name), do, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the root's tensor to all."""
        tensors, root = listed(tensors), self._root(opts)

        def do() -> None:
            landings = Landings()
            for tensor in tensors:
                flat = landings.of(tensor)
                self._collectives.broadcast(flat.data_ptr(), bytes_of(flat), root)
            if root != self._meeting.rank:
                landings.settle()

        for tensor in tensors:
            check(tensor, self._who("broadcast"), written=True)
        key = ("broadcast", root, *[(t.shape, t.dtype) for t in tensors])
        return self._start(key, lambda: self._text("broadcast", tensors, root), do, tensors, opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy every rank's tensor to all."""
        inputs = listed(inputs)
        if output_lists and isinstance(output_lists[0], torch.Tensor):
            output_lists = [output_lists]
        return self._gather_all(output_lists, inputs, opts)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Copy several tensors of every rank to all; `output_lists` has one list for each rank."""
        return self._gather_all([list(outputs) for outputs in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        """Copy every rank's tensor to its place in one tensor."""
        return self._gather_single([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """As `all_gather_single`, for several tensors."""
        return self._gather_single(outputs, inputs, opts)

    def _gather_single(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        who, size = self._who("all_gather"), self._meeting.size
        for output, source in zip(outputs, inputs, strict=True):
            check(output, who, written=True)
            check(source, who)
            fits(output, source, size, who, "output")

        def do() -> None:
            landings = Landings()
            for output, source in zip(outputs, inputs, strict=True):
                flat, block = flat_of(source), landings.of(output)
                length = bytes_of(flat)
                places = [block.data_ptr() + rank * length for rank in range(size)]
                self._collectives.all_gather(places, flat.data_ptr(), length)
            landings.settle()

        key = ("all_gather", *[(t.shape, t.dtype) for t in inputs])
        return self._start(key, lambda: self._text("all_gather", inputs), do, outputs, opts)

    def _gather_all(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        who, size = self._who("all_gather"), self._meeting.size
        for outputs, source in zip(output_lists, inputs, strict=True):
            check_list(outputs, source, size, who, "output")

        def do() -> None:
            landings = Landings()
            for outputs, source in zip(output_lists, inputs, strict=True):
                flat, blocks = flat_of(source), [landings.of(output) for output in outputs]
                self._collectives.all_gather([b.data_ptr() for b in blocks], flat.data_ptr(), bytes_of(flat))
            landings.settle()

        key = ("all_gather", *[(t.shape, t.dtype) for t in inputs])
        results = [output for outputs in output_lists for output in outputs]
        return self._start(key, lambda: self._text("all_gather", inputs), do, results, opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Combine each rank's list; rank r gets the r-th of the results."""
        outputs = listed(outputs)
        if input_lists and isinstance(input_lists[0], torch.Tensor):
            input_lists = [input_lists]
        for output, inputs in zip(outputs, input_lists, strict=True):
            check_list(inputs, output, self._meeting.size, self._who("reduce_scatter"), "input")
        return self._scatter_sums(outputs, lambda: [[flat_of(t) for t in inputs] for inputs in input_lists], opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        """Combine a tensor of all ranks; rank r gets the r-th part."""
        return self._scatter_single([output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """As `reduce_scatter_single`, for several tensors."""
        return self._scatter_single(outputs, inputs, opts)

    def _scatter_single(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        size, who = self._meeting.size, self._who("reduce_scatter")
        for output, source in zip(outputs, inputs, strict=True):
            check(source, who)
            check(output, who, written=True)
            fits(source, output, size, who, "input")
        return self._scatter_sums(outputs, lambda: [list(flat_of(t).view(size, -1)) for t in inputs], opts)

    def _scatter_sums(self, outputs: Tensors, parts: Callable[[], list[Tensors]], opts: Any) -> Any:
        who = self._who("reduce_scatter")
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        kind = getattr(kind, "op", kind)
        reductions = [reduction_of(kind, output.dtype, who) for output in outputs]

        def do() -> None:
            landings = Landings()
            for output, inputs, reduction in zip(outputs, parts(), reductions, strict=True):
                self._collectives.reduce_scatter(landings.of(output), inputs, reduction)
            landings.settle()

        key = ("reduce_scatter", kind, *[(t.shape, t.dtype) for t in outputs])
        text = functools.partial(self._text, "reduce_scatter to", outputs, -1, reductions[0].name)
        return self._start(key, text, do, outputs, opts)

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> Any:
        """Copy every rank's tensor to the root's list."""
        source, root = listed(inputs)[0], self._root(opts)
        outputs = output_lists[0] if root == self._meeting.rank else []
        check(source, self._who("gather"))
        if root == self._meeting.rank:
            check_list(outputs, source, self._meeting.size, self._who("gather"), "output")

        def do() -> None:
            landings, flat = Landings(), flat_of(source)
            places = [landings.of(output).data_ptr() for output in outputs]
            self._collectives.gather(places, flat.data_ptr(), bytes_of(flat), root)
            landings.settle()

        key = ("gather", root, source.shape, source.dtype)
        return self._start(key, lambda: self._text("gather", [source], root), do, outputs, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Copy the root's r-th tensor to rank r."""
        output, root = listed(outputs)[0], self._root(opts)
        inputs = input_lists[0] if root == self._meeting.rank else []
        check(output, self._who("scatter"), written=True)
        if root == self._meeting.rank:
            check_list(inputs, output, self._meeting.size, self._who("scatter"), "input")

        def do() -> None:
            landings, flats = Landings(), [flat_of(tensor) for tensor in inputs]
            block = landings.of(output)
            places = [flat.data_ptr() for flat in flats]
            self._collectives.scatter(block.data_ptr(), places, bytes_of(block), root)
            landings.settle()

        key = ("scatter", root, output.shape, output.dtype)
        return self._start(key, lambda: self._text("scatter", [output], root), do, [output], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Copy the s-th tensor to rank s, and get one from each."""
        who = self._who("all_to_all")
        for tensor in inputs:
            check(tensor, who)
        for tensor in outputs:
            check(tensor, who, written=True)
        if not len(outputs) == len(inputs) == self._meeting.size:
            raise ValueError(
                f"{who}: got {len(inputs)} inputs and {len(outputs)} outputs; pass {self._meeting.size} of each, one "
                "for every rank of the group"
            )

        def do() -> None:
            landings, flats = Landings(), [flat_of(tensor) for tensor in inputs]
            blocks = [landings.of(tensor) for tensor in outputs]
            self._collectives.all_to_all(places(blocks), places(flats))
            landings.settle()

        return self._exchange(inputs[0].dtype, do, outputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Any:
        """Cut a tensor in parts along its first dimension, one for each rank, and get one from each."""
        who, size = self._who("all_to_all"), self._meeting.size
        check(output, who, written=True)
        check(source, who)
        takes = split_bytes(output, output_sizes, size, who, "output")
        gives = split_bytes(source, input_sizes, size, who, "input")

        def do() -> None:
            landings, flat = Landings(), flat_of(source)
            block = landings.of(output)
            self._collectives.all_to_all(parts(block.data_ptr(), takes), parts(flat.data_ptr(), gives))
            landings.settle()

        return self._exchange(source.dtype, do, [output], opts)

    def _exchange(self, dtype: torch.dtype, do: Callable[[], None], results: Tensors, opts: Any) -> Any:
        text = f"all_to_all {str(dtype).removeprefix('torch.')}"
        return self._start(("all_to_all", dtype), lambda: text, do, results, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all are here."""
        return self._start("barrier", lambda: "barrier", self._collectives.barrier, [], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


keep_untraced(GroupBase, SharedGroup, SharedWork, MessageWork)


def shared_group(meeting: Meeting) -> SharedGroup:
    """Return a group that does all through the memory of a meeting."""
    return SharedGroup(Collectives(meeting), Messages(meeting, f"shared-messages-{meeting.members}"))


def meet_if_possible(store: Any, rank: int, world_size: int, timeout_s: float, reason: str = "") -> Meeting | None:
    """Meet all ranks in shared memory; None on all of them where they cannot, and gloo is to be taken.

    Args:
        store: through which the ranks find each other.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: how long a call may wait for another rank.
        reason: why this rank does not want to; one that has a reason is enough.
    """
    part = dist.PrefixStore("shared memory", store)  # type: ignore[attr-defined]
    try:
        return meet(part, rank, list(range(world_size)), timeout_s, insists=False, reason=reason)
    except CannotShare:
        return None


def make(options: Any, met: Meeting | None) -> SharedGroup:
    """Make a group; torch calls this. `met` is given where the ranks have met already.

    Raises:
        CannotShare: on every rank.
    """
    if met is None:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        met = meet(options.store, options.group_rank, members, options.timeout.total_seconds())
    return shared_group(met)
