"""What all calls of a group share: how a call is described, done and ended; and messages between two ranks."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.shared_memory.arena import LEFT
from distlab.shared_memory.collectives.collectives import Collectives
from distlab.shared_memory.collectives.dense import Landings, check, flat_of, unseen
from distlab.shared_memory.meeting import CallRecord, Meeting, RecordTable, shapes_of
from distlab.shared_memory.messages.lanes import Message
from distlab.shared_memory.messages.messages import Messages, MessageWork
from distlab.shared_memory.work import CallQueue, SharedWork, Tensors, end_threads


class GroupBase(dist.ProcessGroup):
    """A process group that can name, start and end calls; `SharedGroup` adds the collectives.

    Args:
        collectives: this rank's part in them; their meeting says who the members are.
        messages: this rank's messages, in the same meeting.
    """

    def __init__(self, collectives: Collectives, messages: Messages) -> None:
        self._meeting = meeting = collectives.meeting
        super().__init__(meeting.rank, meeting.size)  # type: ignore[call-arg]
        self._name = self._description = ""
        self._members = members = meeting.members
        self._collectives, self._messages = collectives, messages
        self._queue = CallQueue(f"shared-calls-{members}")
        self._records = RecordTable()
        self._num_calls = 0
        self._coalesced: list[SharedWork] | None = None
        self._end = weakref.finalize(self, _leave, self._meeting, self._queue, self._messages)

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

    # What torch asks of the backends in a group: this one is the only one in its group.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself, which is the backend.

        Raises:
            RuntimeError: the device is not the CPU.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"{self._who('backend')} 'shared' moves CPU tensors, and was asked for {device}: use gloo or nccl"
            )
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether callers may ask for memory: no, they take their own."""
        return False

    def buffer(self, num_bytes: int) -> torch.Tensor | None:
        """Return this rank's buffer of bytes, of zeros, whose collectives copy least; every rank calls this alike.

        None on all ranks where the group has one rank or crosses nodes.
        """
        if not is_shared(self) or self._meeting.size == 1:
            return None
        made, buffers = [], self._collectives.buffers

        def do() -> None:
            made.append(buffers.make(num_bytes))

        self._start(("buffer", num_bytes), lambda: f"buffer of {num_bytes} bytes", do, [], None).wait()
        return made[0]

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has made."""
        return self._num_calls

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
        self._num_calls += 1
        record = self._records.of(key, text)
        if self._meeting.arena.owner != os.getpid() or not self._end.alive:
            self._meeting.require_usable(record.text)  # no thread is here that would make the call
        call = functools.partial(_do, self._meeting, record, do)
        work = self._queue.run(call, results, is_async=getattr(opts, "asyncOp", True))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _text(self, op: str, tensors: Sequence[torch.Tensor], root: int = -1, reduction: str = "") -> str:
        words = [f"{op} {shapes_of(tensors)}" if tensors else op]
        words += [f"root {self._members[root]}"] if root >= 0 else []
        words += [reduction] if reduction not in ("", "sum") else []
        return ", ".join(words)

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank
        if not 0 <= root < self._meeting.size:
            raise ValueError(f"{self._who('root')} {root} is not in the group, whose ranks are 0 to {self.size() - 1}")
        return root

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        """Send a tensor to a rank of the group."""
        check(tensors[0], self._who("send"))
        with unseen():
            memory = flat_of(tensors[0])
        message = self._message(tensors[0], memory, destination, tag, "send")
        self._messages.send(message)
        return self._with(message.work)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receive a tensor from a rank of the group."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one."""
        return self._receive(tensors, -1, tag)

    def _receive(self, tensors: Tensors, source: int, tag: int) -> Any:
        check(tensors[0], self._who("recv"), written=True)
        landings = Landings()
        with unseen():
            memory = landings.of(tensors[0])
        message = self._message(tensors[0], memory, source, tag, "recv")
        message.landed = landings.settle
        self._messages.receive(message)
        return self._with(message.work)

    def _message(self, tensor: torch.Tensor, memory: torch.Tensor, peer: int, tag: int, op: str) -> Message:
        if not -1 <= peer < self._meeting.size:
            raise ValueError(f"{self._who(op)}: there is no rank {peer}: the group has ranks 0 to {self.size() - 1}")
        if peer == self._meeting.rank:
            towards = "to" if op == "send" else "from"
            raise ValueError(f"{self._who(op)} {towards} this rank itself: a message needs two ranks; keep the tensor")
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


def _leave(meeting: Meeting, calls: CallQueue, messages: Messages) -> None:
    """Leave the group and end its threads: one that still ran when the interpreter ends could abort the process."""
    meeting.leave(LEFT)
    if meeting.arena.owner == os.getpid():
        for ending in (calls, messages):
            end_threads(ending.close, ending.threads)


def _do(meeting: Meeting, record: CallRecord, do: Callable[[], None]) -> None:
    """Do a call; where it fails the group is of no use any more, and the others learn why."""
    meeting.begin(record)
    try:
        with unseen():
            do()
    except BaseException as error:
        meeting.fail(error)
        raise error.with_traceback(None)  # noqa: B904 (the same error: its own frames here tell a caller nothing)


def _wait_for(works: Sequence[SharedWork]) -> None:
    for work in works:
        work.wait()


def is_shared(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of a group meet in one memory."""
    place = dist.group.WORLD if group is None else group
    return isinstance(place, GroupBase) and type(place._collectives) is Collectives


def buffer_of(
    numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """Return a 1-d tensor of zeros in the group's shared buffer, or None if it has none. All ranks call this alike."""
    place = dist.group.WORLD if group is None else group
    if device.type != "cpu" or not isinstance(place, GroupBase) or not numel:
        return None
    buffer = place.buffer(numel * dtype.itemsize)
    return None if buffer is None else buffer.view(dtype)


def zeros(numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return zeros in one dimension, in a buffer where the group has such; every rank of it calls this alike."""
    buffer = buffer_of(numel, dtype=dtype, device=device, group=group)
    return torch.zeros(numel, dtype=dtype, device=device) if buffer is None else buffer
