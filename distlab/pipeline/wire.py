"""The messages of one rank in one step: receives posted early, sends that no action waits for.

A receive that is posted when its message is needed makes the message wait for the receiver. So the next receives of
each pair of ranks are always posted ahead: while a stage computes, its next input arrives. A send is started and left
alone; its tensor is kept until the plan says that the receiver has used it.

Between two ranks messages arrive in the order of the plan. On nccl a message blocks those behind it on its
communicator, and what goes up may wait for what comes down; there each direction of each pair of ranks gets a
communicator of its own, so that the plan's order of each pair is the only one that counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm.p2p import PendingCalls, Receive, Send, group_rank, needs_batches, start
from distlab.pipeline.route import Route
from distlab.pipeline.shapes import TensorKind, ValueLayout
from distlab.plan import Action
from distlab.trace import SpanWriter

AHEAD = 2  # receives posted and not yet used, for each rank that sends here: one to be used, one on its way

Channels = Mapping[tuple[int, int], ProcessGroup]


def open_channels(stage_to_rank: Sequence[int], group: ProcessGroup | None = None, *, device: torch.device) -> Channels:
    """Make, where the backend is nccl, a communicator for each direction between ranks with neighbouring stages.

    Directions that share no rank share a communicator, so a chain of any length needs four. All ranks of the group call
    this with the same stages; on other backends there is nothing to do.
    """
    if not needs_batches(torch.empty(0, device=device), group):
        return {}
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    busy: list[set[int]] = []  # ranks of each communicator
    colours: dict[tuple[int, int], int] = {}
    for a, b in dict.fromkeys(
        edge for x, y in zip(stage_to_rank, stage_to_rank[1:], strict=False) if x != y for edge in ((x, y), (y, x))
    ):
        colour = next((index for index, ranks in enumerate(busy) if not {a, b} & ranks), len(busy))
        if colour == len(busy):
            busy.append(set())
        busy[colour] |= {a, b}
        colours[a, b] = colour
    # Torch names a group that only its members make by a hash. A group that is made again after `close()` gets the same
    # name, finds the old addresses in the store, and hangs. So members make it alone only where they are not all ranks.
    alone = len(members) < dist.get_world_size()
    groups = [dist.new_group(members, use_local_synchronization=alone) for _ in busy]
    for made in groups:  # nccl sets a communicator up at its first call, for which it wants all its ranks
        dist.all_reduce(torch.zeros(1, device=device), group=made)
    return {edge: groups[colour] for edge, colour in colours.items()}


class Wire:
    """Sends and receives of this rank, by the actions of its route.

    Args:
        route: this rank's part of the schedule.
        layouts: what each stage makes, as all ranks agreed.
        group: ranks of the pipeline.
        device: where received tensors lie.
        channels: of `open_channels`.
        spans: draws each send (handing it over) and each receive (the time that this rank waited for it).

    Cost: each hand-over between ranks is one message for each of its tensors, of that tensor's bytes: B s h elements
        for activations [B, s, h], and as many back for their gradients.
    """

    def __init__(
        self,
        route: Route,
        layouts: Sequence[ValueLayout],
        group: ProcessGroup | None,
        *,
        device: torch.device,
        channels: Channels,
        spans: SpanWriter | None = None,
    ) -> None:
        self._route, self._layouts = route, layouts
        self._group, self._channels, self._spans = group, channels, spans
        self.device = device
        self._rank = group_rank(group)
        self._coming = {peer: deque(receives) for peer, receives in route.incoming.items()}  # not posted yet
        self._posted: dict[int, int] = dict.fromkeys(route.incoming, 0)  # posted and not used
        self._arriving: dict[Action, tuple[PendingCalls, list[Tensor]]] = {}
        self._leaving: dict[Action, PendingCalls] = {}
        self._alive: dict[Action, Sequence[Tensor]] = {}
        for peer in self._coming:
            self._post_ahead(peer)

    def kinds(self, message: Action) -> tuple[TensorKind, ...]:
        """Return the kinds of the tensors that a send or receive carries."""
        maker = message.stage - (1 if message.kind in ("RECV_F", "SEND_B") else 0)  # whose output it is, or belongs to
        layout = self._layouts[maker]
        return layout.kinds if message.kind.endswith("F") else layout.with_gradient

    def post(self, receive: Action) -> None:
        """Start a receive, and those before it, unless they were started ahead already."""
        peer = self._route.peer(receive)
        while receive in self._coming[peer]:
            self._post_next(peer)

    def take(self, receive: Action) -> list[Tensor]:
        """Wait for a message and return its tensors; the next receive is started first."""
        self.post(receive)
        peer = self._route.peer(receive)
        pending, tensors = self._arriving.pop(receive)
        self._posted[peer] -= 1
        self._post_ahead(peer)
        with self._span(receive, "receive", tensors):
            pending.wait_received()
        for send in self._route.settled.get(receive, ()):
            self._settle(send)
        return tensors

    def send(self, send: Action, tensors: Sequence[Tensor]) -> None:
        """Start a send and go on; the tensors must not be written to until it is over.

        Shapes: tensors of the kinds that ranks agreed on.
        """
        peer = self._route.peer(send)
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        with self._span(send, "send", tensors):
            group, to = self._channel(self._rank, peer), self._number(peer)
            self._leaving[send] = start(*(Send(tensor, to) for tensor in tensors), group=group)
        self._alive[send] = tensors

    def finish(self) -> None:
        """Wait until everything is sent."""
        for send in list(self._leaving):
            self._settle(send)

    def _settle(self, send: Action) -> None:
        pending = self._leaving.pop(send, None)
        if pending is not None:
            pending.wait()
            del self._alive[send]

    def _post_ahead(self, peer: int) -> None:
        while self._coming[peer] and self._posted[peer] < AHEAD:
            self._post_next(peer)

    def _post_next(self, peer: int) -> None:
        receive = self._coming[peer].popleft()
        tensors = [torch.empty(kind.shape, dtype=kind.dtype, device=self.device) for kind in self.kinds(receive)]
        group, from_ = self._channel(peer, self._rank), self._number(peer)
        pending = start(*(Receive(tensor, from_) for tensor in tensors), group=group)
        self._arriving[receive] = (pending, tensors)
        self._posted[peer] += 1

    def _channel(self, sender: int, receiver: int) -> ProcessGroup | None:
        return self._channels.get((sender, receiver), self._group)

    def _number(self, peer: int) -> int:
        """Return a rank's number in the channels, whose ranks torch sorts."""
        if not self._channels:
            return peer
        members = dist.get_process_group_ranks(self._group if self._group is not None else dist.group.WORLD)
        return sorted(members).index(members[peer])

    def _span(self, action: Action, lane: str, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if self._spans is None:
            return nullcontext()
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._spans.span(
            str(action), action.kind, lane=lane, num_bytes=num_bytes, stage=action.stage, microbatch=action.microbatch
        )
