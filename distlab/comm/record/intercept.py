"""Watch every call to torch.distributed in this process, and hand it to the recorders that are on.

Kernels for the `c10d::*` operators see every call on every thread, those of DDP's C++ reducer, FSDP and functional
collectives included. They patch something that the whole process shares. So there is one FrontEnd per process, however
many recorders are on, and the last one to stop puts back exactly what was there.
Groups in shared memory are seen by their methods, since no operator tells of their calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distlab.comm import device
from distlab.comm.record import operations
from distlab.comm.record.file import ASIDE, DONE, FAILED, ISSUED, WAITING, RecordWriter
from distlab.comm.shared_memory.forms import OTHER_NAMES, Unmoved, with_options
from distlab.comm.shared_memory.group import SharedGroup
from distlab.comm.shared_memory.work import SharedWork, untraced
from distlab.comm.where.frames import blocks_rank, find_site

MAX_UNWAITED = 1024  # of sends and receives without a wait; older ones are dropped, so that their tensors can be freed

Token = tuple[RecordWriter, int]


class FrontEnd:
    """The process's one tap on torch.distributed."""

    _active: ClassVar[FrontEnd | None] = None
    _guard: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self) -> None:
        self.sinks: tuple[Any, ...] = ()  # of class Recorder or ThrottledLink
        self._main = threading.main_thread().ident
        self._live: dict[Any, list[Token]] = {}  # Work -> its rows
        self._unwaited: deque[Any] = deque()  # asynchronous collectives, oldest first; `_live` alone keeps them
        self._over: Any = weakref.WeakKeyDictionary()  # those that were seen to be over before a wait
        self._works: dict[int, Any] = {}  # address of a result -> Work: functional collectives wait for a tensor
        self._addresses: dict[Any, int] = {}
        self._has_gpu = False
        self._collectives: set[Any] = set()  # Works that can be asked, after a wait too, whether they are over
        self._undo = contextlib.ExitStack()  # puts back what was there

    @classmethod
    def install(cls) -> FrontEnd:
        """Put the tap in place, with no recorder on it: in a fork server, so that its ranks inherit it."""
        with cls._guard:
            if cls._active is None:
                cls._active = FrontEnd()
                cls._active._install()
            return cls._active

    @classmethod
    def add(cls, sink: Any) -> None:
        """Hand calls to this recorder from now on."""
        with cls._guard:
            front = cls.install()
            front._has_gpu = device.is_available()  # not in a fork server: a fork breaks what it would start
            front.sinks += (sink,)

    @classmethod
    def remove(cls, sink: Any) -> None:
        """Stop; the last recorder off restores torch."""
        with cls._guard:
            front = cls._active
            if front is None or sink not in front.sinks:
                return
            front._look()
            front.sinks = tuple(other for other in front.sinks if other is not sink)
            cls.restore()

    @classmethod
    def restore(cls) -> None:
        """Put back what was there, unless a recorder is on."""
        with cls._guard:
            if cls._active is not None and not cls._active.sinks:
                front, cls._active = cls._active, None
                front._undo.close()

    @classmethod
    def look(cls) -> None:
        """Let every recorder note which of the oldest asynchronous calls are over."""
        if cls._active is not None:
            cls._active._look()

    def _install(self) -> None:
        put(self._undo, dist.Work, "wait", self.watch_waits(dist.Work.wait))
        library = torch.library.Library("c10d", "IMPL")
        for operation in operations.OPERATIONS:
            packet = getattr(torch.ops.c10d, operation.operator, None)
            if packet is not None:
                kernel = self._operator(packet.default, operation)
                library.impl(operation.operator, kernel, "BackendSelect", with_keyset=True)
        functional = torch.library.Library("_c10d_functional", "IMPL")
        kernel = self._wait_tensor(torch.ops._c10d_functional.wait_tensor.default)
        functional.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)
        self._undo.callback(library._destroy)
        self._undo.callback(functional._destroy)
        tap_groups(self, self._undo)
        tap_shared_memory(self, self._undo)

    def _operator(self, op: Any, operation: operations.Operation) -> Callable[..., Any]:
        """Make the kernel of one operator: it records the call and passes it on."""
        arguments = [argument.name for argument in op._schema.arguments]
        group_at = arguments.index("process_group")
        root_at = next((i for i, name in enumerate(arguments) if name in ("dst", "src", "root_rank")), None)
        tag_at = arguments.index("tag") if "tag" in arguments else None
        reduction_at = arguments.index("reduce_op") if "reduce_op" in arguments else None
        async_at = arguments.index("async_op") if "async_op" in arguments else len(arguments)
        work_is_last = len(op._schema.returns) > 1
        passes_on, key = op._handle.redispatch_boxed, torch._C.DispatchKey.BackendSelect
        here = sys._getframe
        unbox_group, unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox

        def kernel(keys: Any, *args: Any) -> Any:
            group, frame = unbox_group(args[group_at]), here().f_back
            if type(group) is Unmoved:
                return passes_on(keys.remove(key), *args)
            peer = -1 if root_at is None else args[root_at]
            if root_at is not None and not 0 <= peer < group.size():
                raise operations.refused_peer(operation.op, peer, group.size(), frame)
            reduction = "" if reduction_at is None else operations.reduction_of(frame)
            terms = operations.Terms(peer, 0 if tag_at is None else args[tag_at], reduction)
            tokens = self.begin(operation, group, args, terms, frame)
            try:
                result = passes_on(keys.remove(key), *args)
            except BaseException:
                self.close(tokens, FAILED)
                raise
            work = result[-1] if work_is_last else result
            waits_itself = len(args) > async_at and not args[async_at]
            self.follow(operation, None if work is None else unbox_work(work), tokens, args, waits_itself)
            return result

        return kernel

    def begin(
        self, operation: operations.Operation, group: Any, args: Any, terms: operations.Terms, frame: FrameType | None
    ) -> list[Token]:
        """Hand a call that is about to be made to the recorders that are on."""
        data = args[operation.data] if operation.data >= 0 else ()
        if type(data) is list and len(data) == 1 and type(data[0]) is Tensor:
            data = data[0]
        for index in operation.raw:
            tensors = data if index == operation.data else args[index]
            if type(tensors) is not Tensor or not operations.is_dense_block(tensors):
                operations.refuse_layouts(operation.op, tensors, frame)
        if operation.op in ("send", "recv") and terms.peer == group.rank():
            operations.refuse_itself(operation.op, group, frame)
        if operation.op == "all_to_all":
            terms = operations.Terms(splits=operations.splits_of(args, group.size()))
        if self._unwaited:
            self._look()
        site = find_site(frame)
        aside = threading.get_ident() != self._main and not blocks_rank()
        return [sink.call(operation, group, data, terms, site, aside) for sink in self.sinks]

    def follow(
        self, operation: operations.Operation, work: Any, tokens: list[Token], args: Any, waits_itself: bool
    ) -> None:
        """Remember the Work of a call until the program waits for it, or until it is seen to be over."""
        if work is None:  # over when it returned
            self.close(tokens, DONE)
            return
        self._live[work] = tokens
        if self._has_gpu and operation.op not in ("send", "recv"):
            self._collectives.add(work)
        if operation.op in ("send", "recv"):
            if len(self._live) > MAX_UNWAITED:
                self._forget(next(iter(self._live)))
        elif not waits_itself:
            self._unwaited.append(weakref.ref(work))
            first = next(operations.tensors_in(args[0]), None)
            if first is not None and first.layout is torch.strided:
                address = first.data_ptr()
                self._works[address], self._addresses[work] = work, address
            if len(self._unwaited) > MAX_UNWAITED:
                self._forget(self._unwaited.popleft()())

    def _forget(self, work: Any) -> list[Token]:
        """Drop a Work (and so its tensors), and return its rows."""
        if self._addresses:
            address = self._addresses.pop(work, None)
            if address is not None and self._works.get(address) is work:
                del self._works[address]
        self._collectives.discard(work)
        return self._live.pop(work, [])

    def close(self, tokens: list[Token], state: int) -> None:
        """Note that a call is over, DONE or FAILED."""
        for writer, number in tokens:
            writer.end(number, state)

    def wait(self, tokens: Iterable[Token], state: int) -> None:
        """Note that the rank waits for a call from now on, or for one that was over (`RecordWriter.wait`)."""
        for writer, number in tokens:
            writer.wait(number, state)

    def _look(self) -> None:
        """Note which of the oldest asynchronous calls are over.

        gloo's sends and receives cannot be asked; they end when the program waits for them.
        """
        while self._unwaited:
            try:
                oldest = self._unwaited.popleft()
            except IndexError:  # a different thread looked too
                return
            work = oldest()
            if work is None or work not in self._live:  # the program has waited for it
                continue
            if not work.is_completed():
                self._unwaited.appendleft(oldest)
                return
            self._over[work] = tokens = self._forget(work)
            self.close(tokens, DONE)

    def watch_waits(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Work.wait: here a rank stands still, and here a call's end is known exactly.

        On nccl only a stream of the GPU waits: the rank goes on, and the call is followed until it is seen to be over.
        """
        live, over, main, thread = self._live, self._over, self._main, threading.get_ident

        def wait(work: Any, *args: Any, **named: Any) -> Any:
            tokens = live.get(work)
            if tokens is None:
                self.wait(over.pop(work, ()) if work is not None else (), DONE)
                return real(work, *args, **named)
            begun = WAITING if thread() == main or blocks_rank() else ASIDE
            self.wait(tokens, begun)
            state = FAILED
            try:
                result = real(work, *args, **named)
                state = DONE
            finally:
                if state == DONE and work in self._collectives and not work.is_completed():
                    self.wait(tokens, ISSUED)
                    self._unwaited.append(weakref.ref(work))
                else:
                    self.close(self._forget(work), state)
            return result

        return wait

    def _wait_tensor(self, op: Any) -> Callable[..., Any]:
        passes_on, key = op._handle.redispatch_boxed, torch._C.DispatchKey.BackendSelect
        wait = self.watch_waits(lambda work, keys, tensor: passes_on(keys, tensor))

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            address = tensor.data_ptr() if tensor.layout is torch.strided else -1
            return wait(self._works.get(address), keys.remove(key), tensor)

        return kernel


# Methods of the group: the operators' own names, and newer ones. What a rank contributes stands where it stands in the
# operator's arguments. No argument is "raw": this backend reads and writes tensors that lie scattered in memory.
NEWER = {name: f"{old}_" for old, name in OTHER_NAMES.items()} | {"recv_anysource": "recv_any_source_"}
_BY_OPERATOR = {operation.operator: operation for operation in operations.OPERATIONS}
_NAMES = {operator.removesuffix("_"): operator for operator in _BY_OPERATOR} | NEWER
METHODS = tuple(
    _BY_OPERATOR[operator]._replace(operator=name, raw=())
    for name, operator in _NAMES.items()
    if name in vars(SharedGroup)
)


def put(undo: contextlib.ExitStack, place: Any, name: str, value: Any) -> None:
    """Set an attribute of a class or module until `undo` closes."""
    undo.callback(setattr, place, name, vars(place)[name])  # as it stands there: C++'s would not bind otherwise
    setattr(place, name, value)


def tap_shared_memory(front: Any, undo: contextlib.ExitStack) -> None:
    """Report every call of a shared-memory group to the process's one tap, `front`."""
    for operation in METHODS:
        name = operation.operator
        put(undo, SharedGroup, name, _method(front, operation, getattr(SharedGroup, name)))
    put(undo, SharedWork, "wait", untraced(front.watch_waits(SharedWork.wait)))


def _method(front: Any, operation: operations.Operation, real: Callable[..., Any]) -> Callable[..., Any]:
    is_pair = operation.op in ("send", "recv")

    @functools.wraps(real)
    def method(group: SharedGroup, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        args = with_options(operation.operator, args, named)
        opts = args[-1]
        terms = operations.terms_of(operation, args, opts)
        if terms.peer >= group.size():
            raise operations.refused_peer(operation.op, terms.peer, group.size(), frame)
        is_waiting = not is_pair and not getattr(opts, "asyncOp", True)
        tokens = front.begin(operation, group, args, terms, frame)
        if is_waiting:
            front.wait(tokens, WAITING if threading.get_ident() == front._main or blocks_rank() else ASIDE)
        try:
            work = real(group, *args)
        except BaseException:
            front.close(tokens, FAILED)
            raise
        if is_waiting:
            front.close(tokens, DONE)
        else:
            front.follow(operation, work, tokens, args if operation.data >= 0 else ((),), False)
        return work

    return untraced(method)


def tap_groups(front: FrontEnd, undo: contextlib.ExitStack) -> None:
    """Tell recorders of which ranks, and at which line, a group is "begun", "made" or "left": ranks wait there."""
    make, destroy = c10d._new_group_with_tag, c10d.destroy_process_group

    def tell(event: str, what: str = "") -> None:
        for sink in front.sinks:
            sink.group(event, what)

    def note(event: str, ranks: Any) -> None:
        site = find_site(sys._getframe(2))
        tell(event, f"{'of all ranks' if ranks is None else sorted(ranks)} at {site[0]}:{site[1]}")

    @functools.wraps(make)
    def new(ranks: Any = None, *args: Any, **named: Any) -> Any:
        if named.get("use_local_synchronization"):  # then only its members meet
            return make(ranks, *args, **named)
        note("begun", ranks)
        try:
            return make(ranks, *args, **named)
        finally:
            tell("made")

    @functools.wraps(destroy)
    def leave(group: Any = None) -> Any:
        if group is None or group in c10d._world.pg_group_ranks:  # what is not a group here is torch's to refuse
            is_all = group is None or group is dist.group.WORLD
            note("left", None if is_all else dist.get_process_group_ranks(group))
        return destroy(group)

    put(undo, c10d, "_new_group_with_tag", new)
    for place in (c10d, dist):
        put(undo, place, "destroy_process_group", leave)
