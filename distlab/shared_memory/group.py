"""The process group that torch sees: each method takes a call apart, checks it, and has it done.

torch's Python functions call these methods by name. Its C++ code (DDP's reducer, functional collectives) reaches those
that torch's trampoline knows. Newer versions of torch have new names for some; both are here.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab.shared_memory.arena import LEFT, join
from distlab.shared_memory.collectives import Collectives, bytes_of
from distlab.shared_memory.dense import Landings, check, flat_of, same_length
from distlab.shared_memory.lanes import Message
from distlab.shared_memory.meeting import Meeting, Record, Records, shapes_of
from distlab.shared_memory.messages import Messages, MessageWork
from distlab.shared_memory.reductions import reduction_of
from distlab.shared_memory.work import CallQueue, SharedWork, Tensors


class SharedGroup(dist.ProcessGroup):
    """A process group whose ranks meet in shared memory.

    Args:
        store: through which the members find each other.
        members: global rank of each member.
        rank: this process's number among them.
        timeout_s: how long a call may wait for another rank.
    """

    def __init__(self, store: Any, members: list[int], rank: int, timeout_s: float) -> None:
        super().__init__(rank, len(members))
        self._name = self._description = ""
        self._members = members
        self._meeting = Meeting(join(store, rank, members, timeout_s), members, timeout_s)
        self._collectives = Collectives(self._meeting)
        self._messages = Messages(self._meeting, f"shared-messages-{members}")
        self._queue = CallQueue(f"shared-calls-{members}")
        self._records = Records()
        self._coalesced: list[SharedWork] | None = None
        self._end = weakref.finalize(self, _leave, self._meeting, self._queue, self._messages)
        self._end.atexit = False

    def getBackendName(self) -> str:
        """The name that torch prints."""
        return "shared"

    def setGroupName(self, name: str) -> None:
        """Take the name that torch gives; its own place for it is in backends written in C++."""
        self._name = name

    def getGroupName(self) -> str:
        """The name that torch gave."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Take the description that torch gives."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The description that torch gave."""
        return self._description

    def shutdown(self) -> None:
        """Leave the group; the others learn of it."""
        self._end()

    def abort(self) -> None:
        """Leave the group."""
        self._end()

    def _who(self, op: str) -> str:
        return f"rank {self._meeting.me}: {op}"

    def _start(self, key: Any, text: Callable[[], str], do: Callable[[], None], results: Tensors, opts: Any) -> Any:
        """Have a call done, here or on the group's thread."""
        record = self._records.of(key, text)
        call = functools.partial(_do, self._meeting, record, do)
        work = self._queue.run(call, results, is_async=getattr(opts, "asyncOp", True))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of all ranks."""
        return self._reduce_all("all_reduce", _listed(tensors), opts, -1)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Combine several tensors."""
        return self._reduce_all("all_reduce", tensors, opts, -1)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Combine a tensor of all ranks at the root."""
        return self._reduce_all("reduce", _listed(tensors), opts, self._root(opts))

    def _reduce_all(self, op: str, tensors: Tensors, opts: Any, root: int) -> Any:
        who, all_reduce = self._who(op), self._collectives.all_reduce
        kind = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        kind = getattr(kind, "op", kind)
        for tensor in tensors:
            check(tensor, who)
        reductions = [reduction_of(kind, tensor.dtype, who) for tensor in tensors]

        def do() -> None:
            landings = Landings()
            for tensor, reduction in zip(tensors, reductions, strict=True):
                all_reduce(landings.of(tensor), reduction, root)
            if root in (-1, self._meeting.rank):
                landings.settle()

        key = (op, root, kind, *[(t.shape, t.dtype) for t in tensors])
        return self._start(key, lambda: self._text(op, tensors, root, reductions[0].name), do, tensors, opts)

    def _text(self, op: str, tensors: Sequence[torch.Tensor], root: int = -1, reduction: str = "") -> str:
        words = [op, shapes_of(tensors)] if tensors else [op]
        words += [f"root {self._members[root]}"] if root >= 0 else []
        return ", ".join([" ".join(words), *([reduction] if reduction not in ("", "sum") else [])])

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._meeting.size:
            raise ValueError(f"{self._who('root')} {root} is not in the group, whose ranks are 0 to {self.size() - 1}")
        return root

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the root's tensor to all."""
        tensors, root = _listed(tensors), self._root(opts)

        def do() -> None:
            landings = Landings()
            for tensor in tensors:
                flat = landings.of(tensor)
                self._collectives.broadcast(flat.data_ptr(), bytes_of(flat), root)
            if root != self._meeting.rank:
                landings.settle()

        for tensor in tensors:
            check(tensor, self._who("broadcast"))
        key = ("broadcast", root, *[(t.shape, t.dtype) for t in tensors])
        return self._start(key, lambda: self._text("broadcast", tensors, root), do, tensors, opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy every rank's tensor to all."""
        inputs = _listed(inputs)
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
            check(output, who)
            check(source, who)
            _fits(output, source, size, who, "output")

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
            _check_list(outputs, source, size, who, "output")

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
        outputs = _listed(outputs)
        if input_lists and isinstance(input_lists[0], torch.Tensor):
            input_lists = [input_lists]
        for output, inputs in zip(outputs, input_lists, strict=True):
            _check_list(inputs, output, self._meeting.size, self._who("reduce_scatter"), "input")
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
            check(output, who)
            _fits(source, output, size, who, "input")
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
        source, root = _listed(inputs)[0], self._root(opts)
        outputs = output_lists[0] if root == self._meeting.rank else []
        check(source, self._who("gather"))
        if root == self._meeting.rank:
            _check_list(outputs, source, self._meeting.size, self._who("gather"), "output")

        def do() -> None:
            landings, flat = Landings(), flat_of(source)
            places = [landings.of(output).data_ptr() for output in outputs]
            self._collectives.gather(places, flat.data_ptr(), bytes_of(flat), root)
            landings.settle()

        key = ("gather", root, source.shape, source.dtype)
        return self._start(key, lambda: self._text("gather", [source], root), do, outputs, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Copy the root's r-th tensor to rank r."""
        output, root = _listed(outputs)[0], self._root(opts)
        inputs = input_lists[0] if root == self._meeting.rank else []
        check(output, self._who("scatter"))
        if root == self._meeting.rank:
            _check_list(inputs, output, self._meeting.size, self._who("scatter"), "input")

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
        for tensor in (*outputs, *inputs):
            check(tensor, who)
        if not len(outputs) == len(inputs) == self._meeting.size:
            raise ValueError(f"{who}: pass {self._meeting.size} tensors each, got {len(inputs)} and {len(outputs)}")

        def do() -> None:
            landings, flats = Landings(), [flat_of(tensor) for tensor in inputs]
            blocks = [landings.of(tensor) for tensor in outputs]
            self._collectives.all_to_all(_places(blocks), _places(flats))
            landings.settle()

        return self._exchange(inputs[0].dtype, do, outputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Any:
        """Cut a tensor in parts along its first dimension, one for each rank, and get one from each."""
        who, size = self._who("all_to_all"), self._meeting.size
        check(output, who)
        check(source, who)
        takes = _split_bytes(output, output_sizes, size, who, "output")
        gives = _split_bytes(source, input_sizes, size, who, "input")

        def do() -> None:
            landings, flat = Landings(), flat_of(source)
            block = landings.of(output)
            self._collectives.all_to_all(_parts(block.data_ptr(), takes), _parts(flat.data_ptr(), gives))
            landings.settle()

        return self._exchange(source.dtype, do, [output], opts)

    def _exchange(self, dtype: torch.dtype, do: Callable[[], None], results: Tensors, opts: Any) -> Any:
        text = f"all_to_all {str(dtype).removeprefix('torch.')}"
        return self._start(("all_to_all", dtype), lambda: text, do, results, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all are here."""
        return self._start("barrier", lambda: "barrier", self._collectives.barrier, [], opts)

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Send a tensor to a rank of the group."""
        check(tensors[0], self._who("send"))
        message = self._message(tensors[0], flat_of(tensors[0]), destination, tag, "send")
        self._messages.send(message)
        return self._with(message.work)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one."""
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> Any:
        check(tensors[0], self._who("recv"))
        landings = Landings()
        message = self._message(tensors[0], landings.of(tensors[0]), source, tag, "recv")
        message.landed = landings.settle
        self._messages.receive(message)
        return self._with(message.work)

    def _message(self, tensor: torch.Tensor, memory: torch.Tensor, peer: int, tag: int, op: str) -> Message:
        if not -1 <= peer < self._meeting.size:
            raise ValueError(f"{self._who(op)}: there is no rank {peer}: the group has ranks 0 to {self.size() - 1}")
        self._meeting.require_usable(op)
        meets = (tensor.numel(), tensor.dtype)
        mark = self._records.of(meets, lambda: f"{tensor.numel()} {tensor.dtype}").mark
        text = self._records.of(("shape", tensor.shape, tensor.dtype), lambda: shapes_of([tensor])).text
        work = MessageWork([tensor], self._messages)
        limit = time.monotonic() + self._meeting.timeout_s
        return Message(peer, tag, memory, mark, f"{op} {text}", work, limit)

    def _with(self, work: SharedWork) -> SharedWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return self._queue.run(lambda: _wait_for(works), [], is_async=True)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _leave(meeting: Meeting, calls: CallQueue, messages: Messages) -> None:
    meeting.leave(LEFT)
    calls.close()
    messages.close()


def _do(meeting: Meeting, record: Record, do: Callable[[], None]) -> None:
    """Do a call; where it fails the group is of no use any more, and the others learn why."""
    meeting.begin(record)
    try:
        do()
    except BaseException as error:
        meeting.fail(error)
        raise error.with_traceback(None)  # noqa: B904 (the same error: its own frames here tell a caller nothing)


def _wait_for(works: Sequence[SharedWork]) -> None:
    for work in works:
        work.wait()


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _places(flats: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(flat.data_ptr(), bytes_of(flat)) for flat in flats]


def _parts(address: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [(address + start, length) for start, length in zip(starts, lengths, strict=True)]


def _fits(whole: torch.Tensor, part: torch.Tensor, size: int, who: str, what: str) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{who}: the {what} is {whole.dtype}{list(whole.shape)}; for {size} ranks and {part.dtype}"
            f"{list(part.shape)} of each it must have {size * part.numel()} elements of that dtype"
        )


def _check_list(tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int, who: str, what: str) -> None:
    for tensor in (like, *tensors):
        check(tensor, who)
    if len(tensors) != size:
        raise ValueError(f"{who}: pass {size} {what} tensors, one for each rank; got {len(tensors)}")
    same_length(tensors, like, who, what)


def _split_bytes(tensor: torch.Tensor, sizes: Sequence[int], size: int, who: str, what: str) -> list[int]:
    """Return the bytes of each rank's part."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % size:
            raise ValueError(f"{who}: the {what} has {rows} rows, which {size} ranks cannot share evenly; pass sizes")
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(f"{who}: {what} split sizes {list(sizes)} must be {size} numbers whose sum is {rows}")
    row = bytes_of(tensor) // rows if rows else 0
    return [count * row for count in sizes]
