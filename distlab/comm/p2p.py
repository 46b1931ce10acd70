"""Messages between two ranks: the one place that knows how gloo and nccl differ.

Three facts are hidden here, so that an algorithm only says what goes where:

- Ranks are numbered inside the group. `to=1` is the second rank of the group, whatever its global rank is.
- On gloo a send and a receive are two requests that complete on their own; a caller waits for the receive first,
  because that is the data it needs. On nccl each is a kernel on the same stream, and each waits for its partner. Posted
  one after the other they can block each other, so they are posted as one batch.
- gloo cannot send CUDA tensors. Ranks that share a GPU must use gloo, so there a message goes through the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.comm.agree import agree
from distlab.comm.shared_memory.group import is_shared


class Send(NamedTuple):
    """Send `tensor` to rank `to` of the group."""

    tensor: torch.Tensor
    to: int


class Receive(NamedTuple):
    """Receive into `tensor` from rank `from_` of the group; the sender's message has the same number of bytes."""

    tensor: torch.Tensor
    from_: int


@dataclass(slots=True, eq=False)
class PendingCalls:
    """Messages on their way: wait for what arrives, or for everything.

    A tensor being sent must not be written before `wait()`; a tensor being received must not be read before
    `wait_received()`.
    """

    _receives: list[dist.Work]
    _sends: list[dist.Work]
    _landings: list[tuple[torch.Tensor, torch.Tensor]]

    def wait_received(self) -> None:
        """Wait until everything that this rank receives is in place."""
        for work in self._receives:
            work.wait()
        self._receives = []
        for tensor, landing in self._landings:
            tensor.copy_(landing)
        self._landings = []

    def wait(self) -> None:
        """Wait until everything is received, and everything sent may be overwritten."""
        self.wait_received()
        for work in self._sends:
            work.wait()
        self._sends = []


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this rank's number inside the group.

    Raises:
        ValueError: torch.distributed is not initialised, or this rank is not in the group.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; run this inside distlab.comm.run or process_group()")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that it was given; call this on members only")
    return rank


def start(*operations: Send | Receive, group: dist.ProcessGroup | None = None) -> PendingCalls:
    """Start messages together and return at once.

    Messages between two ranks arrive in the order in which they were started. An empty tensor carries nothing and is
    not sent; both sides know its length. On nccl each start is one batch, and the ranks must start batches that match
    in the same order.

    Raises:
        ValueError: a rank outside the group, this rank itself, a tensor that cannot be sent as it lies in memory, or
            one that is received into while it is sent; nothing has been sent then.
    """
    rank, size = group_rank(group), dist.get_world_size(group)
    for operation in operations:
        _check(operation, rank, size)
    filled = [operation for operation in operations if operation.tensor.numel()]
    if not filled:
        return PendingCalls([], [], [])
    into = [operation.tensor.data_ptr() for operation in filled if isinstance(operation, Receive)]
    if any(isinstance(operation, Send) and operation.tensor.data_ptr() in into for operation in filled):
        raise ValueError(f"rank {rank}: sends and receives in the same memory; receive into a place of its own")
    if needs_batches(filled[0].tensor, group):
        return _start_batch(filled, group)
    return _start_each(filled, group)


def needs_batches(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a start's messages end only all together (nccl), so that starts must pair up between ranks one to one."""
    return _backend(dist.get_backend_config(group), tensor.device.type) == "nccl"


def has_own_halves(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group's own all-gather and reduce-scatter are better than messages: on nccl, and in shared memory."""
    return needs_batches(tensor, group) or is_shared(group)


def can_move_cpu_tensors(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group has a backend for tensors on the CPU: gloo alone, or gloo next to nccl."""
    return "cpu:" in dist.get_backend_config(group)


def exchange(*operations: Send | Receive, group: dist.ProcessGroup | None = None) -> None:
    """Do messages together and wait for all of them: none can block a second one.

    Raises:
        ValueError: as `start`.
    """
    start(*operations, group=group).wait()


def send_receive(
    send: torch.Tensor, to: int, receive: torch.Tensor, from_: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send one tensor and receive a different one at the same time; ranks are those of the group.

    Cost: the bytes of `send`, one step. All ranks of a ring may call this at the same time: no rank waits until its
    message is received before it receives.

    Raises:
        ValueError: as `start`; or the two tensors lie on different devices.
    """
    rank = group_rank(group)
    if send.device != receive.device:
        raise ValueError(
            f"rank {rank}: sends from {send.device} and receives on {receive.device}; put both on one device"
        )
    exchange(Receive(receive, from_), Send(send, to), group=group)


def require_same(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, what: str = "tensor") -> None:
    """Refuse, on every rank, tensors whose shape or dtype differ between ranks.

    A collective cannot see this on its own: a rank knows only its own tensor, and a different length elsewhere is a
    hang, an error deep in the backend or a wrong tail. This asks once; call it when a model is set up or a shape
    changes, not in every step.

    Cost: one all-gather of 40 bytes per rank, as `agree`. It takes longer than a fast small collective.

    Raises:
        ValueError: on every rank, naming the ranks that differ and both values.
    """
    agree({"shape": list(tensor.shape), "dtype": str(tensor.dtype)}, group, what=what)


def require_sendable(tensor: torch.Tensor, who: str) -> None:
    """Refuse a tensor that does not lie in memory as one dense block; `who` begins the message ("rank 2: all_reduce").

    Raises:
        ValueError: sparse, non-contiguous or meta tensors, or no tensor at all.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{who}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{who}: got a sparse tensor of shape {list(tensor.shape)} ({tensor.layout}); expected a dense one: pass "
            ".to_dense(), or send indices and values"
        )
    if not tensor.is_contiguous():
        shape, stride = list(tensor.shape), list(tensor.stride())
        expected = list(torch.empty(shape, device="meta").stride())
        raise ValueError(
            f"{who}: got a non-contiguous tensor of shape {shape}, stride {stride}, whose bytes are not one block; "
            f"expected stride {expected}: call .contiguous(), communicate, and copy back what the call has written"
        )
    if tensor.is_meta:
        raise ValueError(f"{who}: got a meta tensor, which has no data; materialise it first")


def _check(operation: Send | Receive, rank: int, size: int) -> None:
    """Refuse a message that cannot be sent. This runs for every message, so a right one passes quickly."""
    tensor, peer = operation
    receives = isinstance(operation, Receive)
    if not 0 <= peer < size or peer == rank:
        words = "receive from" if receives else "send to"
        why = "itself; copy the tensor" if peer == rank else f"rank {peer}, but the group has ranks 0 to {size - 1}"
        raise ValueError(f"rank {rank}: {words} {why}")
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or not tensor.is_contiguous():
        require_sendable(tensor, f"rank {rank}: {'receive from' if receives else 'send to'} rank {peer}")
    if receives and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"rank {rank}: receive from rank {peer} would overwrite a tensor that requires grad; "
            "pass tensor.detach() or call under torch.no_grad()"
        )


def _start_each(operations: Sequence[Send | Receive], group: dist.ProcessGroup | None) -> PendingCalls:
    """Start requests that complete on their own; tensors of a GPU travel by way of host memory."""
    landings: list[tuple[torch.Tensor, torch.Tensor]] = []
    receives: list[dist.Work] = []
    sends: list[dist.Work] = []
    for operation in operations:
        tensor = operation.tensor
        if isinstance(operation, Receive):
            if not tensor.is_cpu:
                landings.append((tensor.detach(), landing := torch.empty_like(tensor, device="cpu")))
                tensor = landing
            receives.append(started(dist.irecv(tensor, group=group, group_src=operation.from_)))
        else:
            if not tensor.is_cpu:
                tensor = tensor.cpu()  # waits for the kernels that write it
            sends.append(started(dist.isend(tensor, group=group, group_dst=operation.to)))
    return PendingCalls(receives, sends, landings)


def _start_batch(operations: Sequence[Send | Receive], group: dist.ProcessGroup | None) -> PendingCalls:
    batch = []
    for operation in operations:
        tensor = operation.tensor.detach()
        if tensor.is_complex():  # nccl knows no complex numbers: two real ones each
            tensor = torch.view_as_real(tensor)
        call, peer = (dist.isend if isinstance(operation, Send) else dist.irecv), operation[1]
        batch.append(dist.P2POp(call, tensor, group=group, group_peer=peer))
    # nccl returns one request for the whole batch: what is received is there when it is done.
    return PendingCalls(list(dist.batch_isend_irecv(batch)), [], [])


def started(work: dist.Work | None) -> dist.Work:
    """Return the request that torch gave for a call; a rank of the group always gets one."""
    assert work is not None, "only ranks outside the group get no request, and those were refused"
    return work


@lru_cache(maxsize=64)
def _backend(config: str, device: str) -> str:
    """Return the backend that moves tensors of a device type, from a text such as "cpu:gloo,cuda:nccl".

    gloo stands in for CUDA through the CPU.

    Raises:
        ValueError: no backend of the group can move them.
    """
    backends = dict(pair.split(":") for pair in config.split(","))
    if device in backends:
        return backends[device]
    if "cpu" in backends and device == "cuda":
        return backends["cpu"]
    raise ValueError(f"the group's backends ({config}) cannot move {device} tensors; move the tensor or pass a group")
