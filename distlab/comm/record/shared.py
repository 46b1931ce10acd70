"""Watch the calls of groups that meet in shared memory: torch's functions call those directly, not its operators."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from distlab.comm.record.call_site import SiteFinder, blocks_rank
from distlab.comm.record.file import ASIDE, DONE, FAILED, WAITING, RecordWriter
from distlab.comm.record.operations import Operation, Terms, name_of_reduction, refuse_peer
from distlab.shared_memory.group import SharedGroup
from distlab.shared_memory.untraced import untraced
from distlab.shared_memory.work import SharedWork

# Methods of the group; what a rank contributes stands where it stands in the operator's arguments. No argument is
# "raw": this backend reads and writes tensors that lie scattered in memory.
METHODS = (
    Operation("allreduce", "all_reduce", 0, ()),
    Operation("allreduce_coalesced", "all_reduce", 0, ()),
    Operation("reduce", "reduce", 0, ()),
    Operation("broadcast", "broadcast", 0, ()),
    Operation("allgather", "all_gather", 1, ()),
    Operation("allgather_coalesced", "all_gather", 1, ()),
    Operation("all_gather_single", "all_gather", 1, ()),
    Operation("all_gather_single_coalesced", "all_gather", 1, ()),
    Operation("_allgather_base", "all_gather", 1, ()),
    Operation("allgather_into_tensor_coalesced", "all_gather", 1, ()),
    Operation("reduce_scatter", "reduce_scatter", 1, ()),
    Operation("reduce_scatter_single", "reduce_scatter", 1, ()),
    Operation("reduce_scatter_single_coalesced", "reduce_scatter", 1, ()),
    Operation("_reduce_scatter_base", "reduce_scatter", 1, ()),
    Operation("reduce_scatter_tensor_coalesced", "reduce_scatter", 1, ()),
    Operation("alltoall", "all_to_all", 1, ()),
    Operation("all_to_all_single", "all_to_all", 1, ()),
    Operation("alltoall_base", "all_to_all", 1, ()),
    Operation("gather", "gather", 1, ()),
    Operation("scatter", "scatter", 0, ()),
    Operation("barrier", "barrier", -1, ()),
    Operation("send", "send", 0, ()),
    Operation("recv", "recv", 0, ()),
    Operation("recv_anysource", "recv", 0, ()),
)
Token = tuple[RecordWriter, int]


class Front(Protocol):
    """What calls are handed to: the process's one tap (`intercept.FrontEnd`)."""

    finder: SiteFinder

    def begin(self, operation: Operation, group: Any, args: Any, terms: Terms, frame: FrameType | None) -> list[Token]:
        """Write down a call that is about to be made."""

    def follow(self, operation: Operation, work: Any, tokens: list[Token], args: Any, waits_itself: bool) -> None:
        """Remember the work of a call until it is over."""

    def watch_waits(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a work's wait."""


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def tap(front: Front) -> Callable[[], None]:
    """Report every call of a shared-memory group to `front`; return a function that undoes this."""
    methods = {operation.operator: getattr(SharedGroup, operation.operator) for operation in METHODS}
    real_wait = SharedWork.wait
    for operation in METHODS:
        setattr(SharedGroup, operation.operator, _method(front, operation, methods[operation.operator]))
    SharedWork.wait = untraced(front.watch_waits(real_wait))  # type: ignore[method-assign]

    def restore() -> None:
        for name, method in methods.items():
            setattr(SharedGroup, name, method)
        SharedWork.wait = real_wait  # type: ignore[method-assign]

    return restore


def _method(front: Front, operation: Operation, real: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method of one operation: it records the call and passes it on."""
    is_pair = operation.op in ("send", "recv")
    main = threading.main_thread().ident

    @functools.wraps(real)
    def method(group: SharedGroup, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        opts = named.get("opts", args[-1] if args else None)
        terms = _terms(operation, args, opts)
        if terms.peer >= group.size():
            refuse_peer(operation.op, terms.peer, group.size(), frame, front.finder)
        is_waiting = not is_pair and not getattr(opts, "asyncOp", True)
        tokens = front.begin(operation, group, args, terms, frame)
        if is_waiting:
            state = WAITING if threading.get_ident() == main or blocks_rank() else ASIDE
            for writer, number in tokens:
                writer.wait(number, state)
        try:
            work = real(group, *args, **named)
        except BaseException:
            for writer, number in tokens:
                writer.end(number, FAILED) if is_waiting else writer.withdraw(number)
            raise
        if is_waiting:
            for writer, number in tokens:
                writer.end(number, DONE)
        else:
            front.follow(operation, work, tokens, args or ((),), False)
        return work

    return untraced(method)


def _terms(operation: Operation, args: tuple[Any, ...], opts: Any) -> Terms:
    if operation.op == "send" or operation.operator == "recv":
        return Terms(args[1], args[2])
    if operation.op == "recv":
        return Terms(-1, args[1])
    peer = getattr(opts, "rootRank", -1) if operation.op in _ROOTED else -1
    if operation.op not in ("all_reduce", "reduce", "reduce_scatter"):
        return Terms(peer)
    return Terms(peer, 0, name_of_reduction(opts.reduceOp) if hasattr(opts, "reduceOp") else "sum")
