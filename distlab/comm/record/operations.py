"""What each call of torch.distributed is: its plain name, which argument holds the data, and what it costs.

torch reaches a backend through about twenty operators (`c10d::allreduce_`, ...). The table names them for torch 2.11 to
2.15; a name that a version lacks is left out when the recorder starts.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.comm.nodes.wire import ring_bytes as ring_bytes
from distlab.comm.p2p import require_sendable
from distlab.comm.shared_memory.collectives import COMBINE
from distlab.comm.where.frames import find_site, is_internal

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_REDUCTIONS = {  # torch's own members by identity: to ask one of them for its name takes microseconds
    id(getattr(dist.ReduceOp, name)): name.lower() for name in COMBINE
}


class Operation(NamedTuple):
    """One operator of torch.distributed.

    Attributes:
        operator: its name in the `c10d` library.
        op: its plain name.
        data: which argument is what the rank contributes, or -1.
        raw: arguments whose memory the backend reads or writes as it lies; not the lists that it copies first.
    """

    operator: str
    op: str
    data: int
    raw: tuple[int, ...]


class Terms(NamedTuple):
    """What a call says about the ranks and the way in which they meet.

    Attributes:
        peer: the root or the other end, as a rank of the group; -1 where there is none.
        tag: of a send or a receive.
        reduction: how values are combined, such as "max"; "" where they are not.
        splits: of an all_to_all: how many elements go to each rank, and come from each (`splits_of`).
    """

    peer: int = -1
    tag: int = 0
    reduction: str = ""
    splits: tuple[tuple[int, ...], ...] = ()


OPERATIONS = tuple(
    Operation(operator, op, int(data), tuple(map(int, raw.split())))
    for operator, op, data, raw in csv.reader(Path(__file__).with_suffix(".csv").read_text("utf-8").splitlines())
)


def terms_of(operation: Operation, args: tuple[Any, ...], opts: Any) -> Terms:
    """Return what a call of a method of a group in shared memory says."""
    if operation.op == "send" or operation.operator == "recv":
        return Terms(args[1], args[2])
    if operation.op == "recv":
        return Terms(-1, args[1])
    peer = getattr(opts, "rootRank", -1) if operation.op in _ROOTED else -1
    if operation.op not in ("all_reduce", "reduce", "reduce_scatter"):
        return Terms(peer)
    return Terms(peer, 0, name_of_reduction(opts.reduceOp) if hasattr(opts, "reduceOp") else "sum")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tensor, or of lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for item in value:
            yield from tensors_in(item)


def splits_of(args: Sequence[Any], size: int) -> tuple[tuple[int, ...], ...]:
    """Return how many elements an all_to_all gives to each rank and takes from each; () where they are named."""
    if len(args) < 2 or (isinstance(args[0], torch.Tensor) and len(args) < 4):
        return ()
    output, source = args[:2]
    if not isinstance(output, torch.Tensor):
        return tuple([tensor.numel() for tensor in source]), tuple([tensor.numel() for tensor in output])
    at = 2 if type(args[2]) is list else 3  # an operator has the group before its sizes
    return _parts(source.shape, args[at + 1], size), _parts(output.shape, args[at], size)


def _parts(shape: Sequence[int], sizes: Sequence[int], size: int) -> tuple[int, ...]:
    each = math.prod(shape[1:])
    return tuple([count * each for count in sizes or [(shape[0] if shape else 0) // size] * size])


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Return the payload of a tensor; of a sparse one, its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return num_bytes_of(tensor._indices()) + num_bytes_of(tensor._values())
    return tensor.numel() * tensor.element_size()


def describe_shapes(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtype and shape of the first tensor, and how many more there are."""
    if not tensors:
        return ""
    first = f"{str(tensors[0].dtype).removeprefix('torch.')}{list(tensors[0].shape)}"
    return first if len(tensors) == 1 else f"{first} and {len(tensors) - 1} more"


def reduction_of(frame: FrameType | None) -> str:
    """Return how a call combines values ("sum", "max"), as torch's own Python function was told.

    The operator gets it as an object of C++ that does not tell. C++ code that calls by itself (DDP) adds.
    """
    while frame is not None and (file := frame.f_code.co_filename).startswith(_TORCH):
        if file.startswith(_DISTRIBUTED):
            named = frame.f_locals
            given = named.get("op", named.get("reduceOp"))
            if given is not None:
                return name_of_reduction(given)
        frame = frame.f_back
    return "sum"


def name_of_reduction(given: Any) -> str:
    """Return the plain name of a ReduceOp, such as "sum"."""
    named = getattr(given, "op", given)
    return _REDUCTIONS.get(id(named)) or str(getattr(named, "name", named)).rpartition(".")[2].lower()


def _who(op: str, frame: FrameType | None) -> str:
    site = find_site(frame)
    return f"rank {dist.get_rank()}: {op} at {site[0]}:{site[1]}"


def refused_peer(op: str, peer: int, size: int, frame: FrameType | None) -> ValueError:
    """Return the error of a call that names a rank which its group lacks: gloo would crash, or wait without end."""
    words = f"names rank {peer}: there is no such rank, the group has ranks 0 to {size - 1}"
    return ValueError(f"{_who(op, frame)} {words}")


def refuse_itself(op: str, group: Any, frame: FrameType | None) -> None:
    """Refuse a message of a rank to itself, which gloo cannot carry and NCCL can; a ValueError says what to do."""
    if "nccl" not in dist.get_backend(group):
        words = f"is {'to' if op == 'send' else 'from'} this rank itself: a message needs two ranks; "
        words += "keep the tensor, or a copy of it, and leave the message out here"
        raise ValueError(f"{_who(op, frame)} {words}")


def is_dense_block(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is one block in the order of its elements."""
    return tensor.layout is torch.strided and tensor.is_contiguous()


def refuse_layouts(op: str, tensors: Any, frame: FrameType | None) -> None:
    """Refuse, by a ValueError, tensors whose memory is not one dense block in order: gloo would read wrong numbers.

    What torch itself hands over (sparse gradients in DDP) is torch's business and passes.
    """
    for tensor in tensors_in(tensors):
        if not is_dense_block(tensor) and not is_internal(frame):
            require_sendable(tensor, _who(op, frame))
