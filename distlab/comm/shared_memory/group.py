# mypy: disable-error-code="override, assignment"
# torch's stubs declare each method once for every way in which C++ may be called; calls from torch come in one way.
"""The process group that torch sees: each method takes a call apart, checks it, and has it done.

torch's Python functions call these methods by name. Its C++ code (DDP's reducer, functional collectives) reaches those
that torch's trampoline knows. Newer versions of torch have new names for some; both are here.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm.shared_memory import dense
from distlab.comm.shared_memory.collectives import Collectives, ReduceOperation, reduction_of
from distlab.comm.shared_memory.forms import Shown, as_torch_calls_it, event_of, until
from distlab.comm.shared_memory.meeting import CallRecord, GroupCall, Meeting, record_of
from distlab.comm.shared_memory.messages import Message, Messages
from distlab.comm.shared_memory.work import CallQueue, SharedWork, Tensors, keep_untraced

Do = Callable[[Tensors, Tensors], None]  # a call's work, with what it reads and writes as flat tensors
END_S = 5.0  # how long a group that is left waits for its threads


class SharedGroup(dist.ProcessGroup):
    """A process group whose ranks meet in shared memory. No method that torch knows calls a second: each is recorded.

    Attributes:
        wire: what takes time between its ranks (`distlab.comm.nodes.group.NodeWire`); None: nothing but memory.
    """

    def __init__(self, meeting: Meeting, wire: Any = None) -> None:
        super().__init__(meeting.rank, meeting.size)  # type: ignore[call-arg]
        self.wire = wire
        self._name = self._description = ""
        self._meeting, self._members = meeting, meeting.members
        self._collectives, self._messages = Collectives(meeting), Messages(meeting)
        self._queue = CallQueue(f"shared-calls-{meeting.members}")
        self._coalesced: list[SharedWork] | None = None
        self.shown = Shown(self)
        self._who = functools.cache(functools.partial("rank {}: {}".format, meeting.me))  # begins an error's text
        self._end = weakref.finalize(self, _leave, meeting, self._queue, self._messages)

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

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself as its one backend.

        Raises:
            RuntimeError: the device is not the CPU.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"{self._who('backend')} 'shared' moves CPU tensors, and was asked for {device}: use gloo or nccl"
            )
        return AsBackend(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may wait for a different rank, from the next call on."""
        self._meeting.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group; the others learn of it."""
        self._end()

    abort = shutdown

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._meeting.size:
            raise ValueError(f"{self._who('root')} {root} is not in the group, whose ranks are 0 to {self.size() - 1}")
        return root

    def _reduction(self, op: str, tensor: torch.Tensor, opts: Any) -> ReduceOperation:
        kind = opts.reduceOp
        return reduction_of(getattr(kind, "op", kind), tensor.dtype, self._who(op))

    def _start(self, call: GroupCall, do: Do, reads: Tensors, writes: Tensors, opts: Any) -> Any:
        """Have a call done, here or on the group's thread."""
        who = self._who(call.op)
        for tensor in reads:
            dense.check(tensor, who)
        for tensor in writes:
            dense.check(tensor, who, written=True)
        record = call.record(self._members)
        if self._meeting.arena.owner != os.getpid() or not self._end.alive:
            self._meeting.require_usable(record.text)  # no thread is here that would make the call
        call_it = functools.partial(self._do, call, record, do, reads, writes, opts)
        if (event := event_of(call.op.partition(" ")[0], reads or writes)) is not None:
            call_it = functools.partial(until, event, call_it)
        return self._with(self._queue.run(call_it, writes, is_async=getattr(opts, "asyncOp", True)))

    def _with(self, work: SharedWork | None) -> SharedWork | None:
        if self._coalesced is not None and work is not None:
            self._coalesced.append(work)
        return work

    def _do(self, call: GroupCall, record: CallRecord, do: Do, reads: Tensors, writes: Tensors, opts: Any) -> None:
        """Do a call; where it fails the group is of no use any more, and the others learn why."""
        self._meeting.begin(record, opts)
        try:
            with dense.unseen():
                sources, targets = ([dense.flat_of(tensor) for tensor in tensors] for tensors in (reads, writes))
                if len(sources) + len(targets) > 1:
                    sources, targets = dense.apart(sources, targets, -1 if call.gives else self._meeting.rank)
                if self.wire is not None:
                    self._collectives.barrier()  # so that all count the time from one moment
                    since_s = time.monotonic()
                do(sources, targets)
                if self.wire is not None:
                    self.wire.collective(call.op.partition(" ")[0], call.handed(self._meeting.size), since_s)
                for tensor, flat in zip(writes, targets, strict=True):
                    dense.settle(tensor, flat)
        except BaseException as error:
            self._meeting.fail(error)
            raise error.with_traceback(None)  # noqa: B904 (the same error: its own frames here tell a caller nothing)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Combine a tensor of all ranks."""
        return self._reduce("all_reduce", [dense.only(tensors, self._who("all_reduce"))], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        """Combine each of several tensors of all ranks."""
        return self._reduce("all_reduce", tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Combine a tensor of all ranks at the root."""
        return self._reduce("reduce", [dense.only(tensors, self._who("reduce"))], opts, self._root(opts))

    def _reduce(self, op: str, tensors: Tensors, opts: Any, root: int = -1) -> Any:
        reductions = [self._reduction(op, tensor, opts) for tensor in tensors]

        def do(_: Tensors, flats: Tensors) -> None:
            for flat, reduction in zip(flats, reductions, strict=True):
                self._collectives.all_reduce(flat, reduction, root)

        name = reductions[0].name if reductions else ""
        return self._start(GroupCall(op, tensors, root, name), do, [], tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Copy the root's tensor to all."""
        tensor, root = dense.only(tensors, self._who("broadcast")), self._root(opts)

        def do(_: Tensors, flats: Tensors) -> None:
            self._collectives.broadcast(flats[0], root)

        return self._start(GroupCall("broadcast", [tensor], root), do, [], [tensor], opts)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any) -> Any:
        """Copy every rank's tensor to all."""
        source = dense.only(inputs, self._who("all_gather"))
        return self._gather([source], [dense.only_list(output_lists)], opts)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """As `allgather`, for several tensors; `output_lists` has one list for each rank."""
        return self._gather(inputs, [[*its] for its in zip(*output_lists, strict=True)], opts)

    def all_gather_single(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copy every rank's tensor to its place in one tensor; so with each of several tensors."""
        return self._gather(dense.listed(inputs), dense.listed(outputs), opts)

    all_gather_single_coalesced = all_gather_single

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> Any:
        """Copy every rank's tensor to the root's list."""
        root, source = self._root(opts), dense.only(inputs, self._who("gather"))
        outputs = [dense.only_list(output_lists)] if root == self._meeting.rank else []
        return self._gather([source], outputs, opts, root)

    def _gather(self, sources: Tensors, outputs: list[Any], opts: Any, root: int = -1) -> Any:
        """Gather each source to its output, a tensor or a list of them; where a root is named, there alone."""
        op, size = "all_gather" if root < 0 else "gather", self._meeting.size
        for output, source in zip(outputs, sources, strict=root < 0):
            dense.fits(output, source, size, self._who(op), "output")

        def do(flats: Tensors, targets: Tensors) -> None:
            left = iter(targets)
            for flat, output in zip(flats, outputs or [[]], strict=False):  # who is not the root takes nothing
                if isinstance(output, list):
                    places = [next(left).data_ptr() for _ in output]
                else:
                    first, length = next(left).data_ptr(), flat.nbytes
                    places = [first + rank * length for rank in range(size)]
                self._collectives.all_gather(places, flat)

        writes = [tensor for output in outputs for tensor in (output if isinstance(output, list) else [output])]
        return self._start(GroupCall(op, sources, root), do, sources, writes, opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Combine each rank's list; rank r gets the r-th of the results."""
        output = dense.only(outputs, self._who("reduce_scatter"))
        return self._scatter_sum([output], [dense.only_list(input_lists)], opts)

    def reduce_scatter_single(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Combine a tensor of all ranks, of which rank r gets the r-th part; so with each of several tensors."""
        return self._scatter_sum(dense.listed(outputs), dense.listed(inputs), opts)

    reduce_scatter_single_coalesced = reduce_scatter_single

    def _scatter_sum(self, outputs: Tensors, inputs: list[Any], opts: Any) -> Any:
        """Combine each input, a tensor or a list of them, into its output."""
        op, size = "reduce_scatter", self._meeting.size
        for output, given in zip(outputs, inputs, strict=True):
            dense.fits(given, output, size, self._who(op), "input")
        reductions = [self._reduction(op, output, opts) for output in outputs]

        def do(sources: Tensors, targets: Tensors) -> None:
            is_list = bool(inputs) and isinstance(inputs[0], list)
            lists = [sources] if is_list else [flat.view(size, -1).unbind() for flat in sources]
            for target, parts, reduction in zip(targets, lists, reductions, strict=True):
                self._collectives.reduce_scatter(target, parts, reduction)

        reads = [tensor for given in inputs for tensor in (given if isinstance(given, list) else [given])]
        name = reductions[0].name if reductions else ""
        return self._start(GroupCall("reduce_scatter to", outputs, -1, name), do, reads, outputs, opts)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Any:
        """Copy the root's r-th tensor to rank r."""
        who, root = self._who("scatter"), self._root(opts)
        output, inputs = dense.only(outputs, who), dense.only_list(input_lists) if root == self._meeting.rank else []
        if root == self._meeting.rank:
            dense.fits(inputs, output, self._meeting.size, who, "input")

        def do(sources: Tensors, targets: Tensors) -> None:
            self._collectives.scatter(targets[0], sources, root)

        return self._start(GroupCall("scatter", [output], root), do, inputs, [output], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Copy the s-th tensor to rank s, and get one from each."""
        if not len(outputs) == len(inputs) == self._meeting.size:
            raise ValueError(
                f"{self._who('all_to_all')}: got {len(inputs)} inputs and {len(outputs)} outputs; pass "
                f"{self._meeting.size} of each, one for every rank of the group"
            )
        takes, gives = ([tensor.nbytes for tensor in tensors] for tensors in (outputs, inputs))
        return self._exchange(outputs, takes, inputs, gives, opts)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Any:
        """Cut a tensor in parts along its first dimension, one for each rank, and get one from each."""
        who, size = self._who("all_to_all"), self._meeting.size
        takes = dense.split_bytes(output, output_sizes, size, who, "output")
        gives = dense.split_bytes(source, input_sizes, size, who, "input")
        return self._exchange([output], takes, [source], gives, opts)

    def _exchange(self, outputs: Tensors, takes: list[int], inputs: Tensors, gives: list[int], opts: Any) -> Any:
        def do(sources: Tensors, targets: Tensors) -> None:
            self._collectives.all_to_all(dense.parts(targets, takes), dense.parts(sources, gives))

        call = GroupCall(f"all_to_all {str(inputs[0].dtype).removeprefix('torch.')}", gives=gives)
        return self._start(call, do, inputs, outputs, opts)

    def barrier(self, opts: Any) -> Any:
        """Wait until all are here."""
        return self._start(GroupCall("barrier"), lambda _, __: self._collectives.barrier(), [], [], opts)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> Any:
        works, self._coalesced = self._coalesced or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        return self._queue.run(wait_for_all, [], is_async=True)

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Send a tensor to a rank of the group."""
        message = self._message(tensors, destination, tag, "send")
        if self.wire is not None:
            message.until_s, message.arrives_s = self.wire.message(destination, message.num_bytes)
        self._messages.send(message)
        return self._with(message)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one."""
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> Any:
        message = self._message(tensors, source, tag, "recv")
        self._messages.receive(message)
        return self._with(message)

    def _message(self, tensors: Tensors, peer: int, tag: int, op: str) -> Message:
        tensor = tensors[0]
        dense.check(tensor, self._who(op), written=op == "recv")
        if not -1 <= peer < self._meeting.size:
            raise ValueError(f"{self._who(op)}: there is no rank {peer}: the group has ranks 0 to {self.size() - 1}")
        if peer == self._meeting.rank:
            towards = "to" if op == "send" else "from"
            raise ValueError(f"{self._who(op)} {towards} this rank itself: a message needs two ranks; keep the tensor")
        self._meeting.require_usable(op)
        mark = record_of("message", -1, "", ((tensor.numel(),), tensor.dtype)).mark
        text = record_of(op, -1, "", (tensor.shape, tensor.dtype)).text
        with dense.unseen():
            message = Message(self._messages, tensor, peer=peer, tag=tag, mark=mark, text=text)
        message.end.event = event_of(op, tensors)
        return message


class AsBackend:
    """A group as torch's code for backends sees it. It takes none but its own for one whose timeout can be set."""

    supports_splitting = supports_coalescing = supports_time_estimate = False
    __class__ = property(lambda _: getattr(dist, "ProcessGroupGloo", AsBackend))

    def __init__(self, group: SharedGroup) -> None:
        self._set_default_timeout = group.set_timeout
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether callers may ask for memory: no, they take their own."""
        return False


as_torch_calls_it(SharedGroup)
keep_untraced(SharedGroup, SharedWork, Message)


def _leave(meeting: Meeting, calls: CallQueue, messages: Messages) -> None:
    """Leave the group and end its threads: one that still ran when the interpreter ends could abort the process."""
    meeting.leave()
    if meeting.arena.owner == os.getpid():
        for ending in (calls, messages):
            ending.close()
            for thread in ending.threads:
                if thread is not threading.current_thread():
                    thread.join(END_S)


def make(options: Any, met: Meeting | None) -> SharedGroup:
    """Make a group; torch calls this. `met` is given where the ranks have met already.

    Raises:
        CannotShare: on every rank.
    """
    if met is None:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        met = Meeting(options.store, options.group_rank, members, options.timeout.total_seconds())
    return SharedGroup(met)


def is_shared(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of a group meet in one memory, and nothing else takes time between them."""
    place = dist.group.WORLD if group is None else group
    return isinstance(place, SharedGroup) and place.wire is None


def buffer_of(
    numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """Return a 1-d tensor of zeros in the group's shared buffer, or None if it has none. All ranks call this alike."""
    place = dist.group.WORLD if group is None else group
    if device.type != "cpu" or not isinstance(place, SharedGroup) or not numel or place.size() == 1:
        return None
    made, num_bytes = [], numel * dtype.itemsize

    def do(_: Tensors, __: Tensors) -> None:
        made.append(place._collectives.buffers.make(num_bytes))

    place._start(GroupCall(f"buffer of {num_bytes} bytes"), do, [], [], None).wait()
    return made[0].view(dtype)


def zeros(numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return zeros in one dimension, in a buffer where the group has such; every rank of it calls this alike."""
    buffer = buffer_of(numel, dtype=dtype, device=device, group=group)
    return torch.zeros(numel, dtype=dtype, device=device) if buffer is None else buffer
