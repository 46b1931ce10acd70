"""Watch what no operator of torch tells: calls of groups in shared memory, and where groups are made and destroyed."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distlab.comm.record.file import ASIDE, DONE, FAILED, WAITING
from distlab.comm.record.operations import OPERATIONS, Operation, Terms, name_of_reduction, refused_peer
from distlab.comm.shared_memory.group import SharedGroup
from distlab.comm.shared_memory.work import SharedWork, untraced
from distlab.comm.where.frames import blocks_rank, find_site

# Methods of the group: the operators' own names, and newer ones. What a rank contributes stands where it stands in the
# operator's arguments. No argument is "raw": this backend reads and writes tensors that lie scattered in memory.
NEWER = {
    "all_gather_single": "_allgather_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "all_to_all_single": "alltoall_base_",
    "recv_anysource": "recv_any_source_",
}
_BY_OPERATOR = {operation.operator: operation for operation in OPERATIONS}
_NAMES = {operator.removesuffix("_"): operator for operator in _BY_OPERATOR} | NEWER
METHODS = tuple(
    _BY_OPERATOR[operator]._replace(operator=name, raw=())
    for name, operator in _NAMES.items()
    if name in vars(SharedGroup)
)
_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def tap_shared_memory(front: Any) -> Callable[[], None]:
    """Report every call of a shared-memory group to the process's one tap, `front`; return what undoes this."""
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


def _method(front: Any, operation: Operation, real: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method of one operation: it records the call and passes it on."""
    is_pair = operation.op in ("send", "recv")
    main = threading.main_thread().ident

    @functools.wraps(real)
    def method(group: SharedGroup, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        opts = named.get("opts", args[-1] if args else None)
        terms = _terms(operation, args, opts)
        if terms.peer >= group.size():
            raise refused_peer(operation.op, terms.peer, group.size(), frame)
        is_waiting = not is_pair and not getattr(opts, "asyncOp", True)
        tokens = front.begin(operation, group, args, terms, frame)
        if is_waiting:
            state = WAITING if threading.get_ident() == main or blocks_rank() else ASIDE
            for writer, number in tokens:
                writer.wait(number, state)
        try:
            work = real(group, *args, **named)
        except BaseException:
            front.close(tokens, FAILED)
            raise
        if is_waiting:
            front.close(tokens, DONE)
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


def tap_groups(tell: Callable[..., None]) -> Callable[[], None]:
    """Tell at which line a group is made or destroyed, as ranks wait for each other there; return what undoes this.

    Args:
        tell: called with "begun", "made" or "left", and the members and the line.
    """
    make, destroy = c10d._new_group_with_tag, c10d.destroy_process_group

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

    def put(new_group: Any, destroy_group: Any) -> None:
        c10d._new_group_with_tag = new_group
        c10d.destroy_process_group = dist.destroy_process_group = destroy_group

    put(new, leave)
    return functools.partial(put, make, destroy)
