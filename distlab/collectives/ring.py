"""The ring: how n ranks add up their tensors while each one sends only to its neighbour.

Every rank holds a tensor of S bytes, and all want the sum. Read from top to bottom:

1. `naive_ring_all_reduce` passes whole tensors around: right, but (n-1) S bytes per rank, more with every rank added.
2. `plain_ring_all_reduce` cuts the tensor into n chunks. All chunks travel at once, each on its own part of the ring,
   so every link is busy all the time. A rank sends less than 2 S bytes, for any n.
3. `ring_all_reduce` is the same ring, made fast: a chunk travels in pieces, so that a rank adds up one piece while
   the next is on its way (`_run`).

The first half of an all-reduce is useful alone (`ring_reduce_scatter`), and so is the second (`ring_all_gather`).
`DataParallel(module, hook=RingAllReduce())` averages gradients over this ring in place of torch's all_reduce, so that
every message can be followed to the wire.

In every Cost below S_c is the size of chunk c in bytes (see `chunks.py`; the sum of all S_c is S), n the number of
ranks, and r this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distlab.blocks.gradient_hook import GradientBucket
from distlab.collectives.chunks import Flat, Reduction, check_piece_bytes, check_root, cut, flatten, num_pieces, prepare
from distlab.comm.p2p import PendingCalls, Receive, Send, exchange, needs_batches, start

# Large enough that the cost of one message vanishes, small enough to stay in a cache while it is added up.
PIECE_BYTES = 4 << 20


def naive_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks in place by passing whole tensors around the ring: the version to improve on.

    Shapes: any shape; contiguous; returns `tensor`.
    Cost: (n-1) S bytes sent per rank, n-1 steps: eight ranks send seven tensors each.
    Error: whole numbers are exact. Floating point sums differ in the last bits *between ranks*, because each rank
        adds up in a different order: replicas trained on them drift apart.

    Raises:
        ValueError: see `chunks.flatten`.
    """
    flat, reduction = prepare(tensor, group, "sum", "naive_ring_all_reduce")
    after, before = _neighbours(flat)
    travelling = flat.values.clone()
    for _ in range(flat.num_ranks - 1):
        received = torch.empty_like(travelling)
        exchange(Receive(received, before), Send(travelling, after), group=group)
        reduction.combine(flat.values, received)
        travelling = received
    return tensor


def plain_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over all ranks in place, one chunk per step: the ring as textbooks draw it.

    Chunk c starts at rank c+1 and goes around once, every rank adding its own part, until rank c has the whole sum
    (reduce-scatter). Then the sums go around once more, and every rank keeps a copy (all-gather).

    Shapes: any shape; contiguous; returns `tensor`.
    Cost: 2 S - S_r - S_(r+1) bytes sent per rank, which is 2 (n-1)/n S where n divides the length; 2 (n-1) steps.
    Error: as `ring_all_reduce`.

    Raises:
        ValueError: see `chunks.flatten`.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009, section 3.
    """
    flat, reduction = prepare(tensor, group, "sum", "plain_ring_all_reduce")
    rank, n = flat.rank, flat.num_ranks
    after, before = _neighbours(flat)
    chunks = cut(flat.values, n)
    received = torch.empty_like(chunks[0])  # the first chunk is never shorter than a different one
    # Reduce-scatter: what I send has my part added; what I receive lacks only mine and later ranks'.
    for step in range(n - 1):
        own = chunks[(rank - step - 2) % n]
        into = received[: own.numel()]
        exchange(Receive(into, before), Send(chunks[(rank - step - 1) % n], after), group=group)
        reduction.combine(own, into)
    # All-gather: finished chunks, starting with the one that ended here.
    for step in range(n - 1):
        exchange(Receive(chunks[(rank - step - 1) % n], before), Send(chunks[(rank - step) % n], after), group=group)
    return tensor


def ring_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum", piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Reduce over all ranks in place; every rank ends with the same bits.

    Shapes: any shape, 0-dim and empty too; contiguous; returns `tensor`. `op` is sum, mean, max, min or prod.
    Cost: 2 S - S_r - S_(r+1) bytes sent per rank, which is 2 (n-1)/n S where n divides the length; 2 (n-1) steps of
        k = ceil(S_0 / piece_bytes) messages each, empty chunks unsent. Memory: at most two pieces.
    Error: whole numbers are exact (they wrap as torch's do). Floating point: chunk c is added up once, in the order
        c+1, c+2, ..., c, rounding to the dtype at each step, and all others copy that sum. So all ranks end with
        equal bits, and the same input gives the same bits again; a different number of ranks or torch's own all-reduce
        adds in a different order and differs by at most about n roundings.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    Source: Patarasuk and Yuan, 2009, section 3; cut into pieces as NCCL does.
    """
    flat, reduction = prepare(tensor, group, op, "ring_all_reduce")
    check_piece_bytes(piece_bytes, flat, "ring_all_reduce")
    _run(flat, [*_reduce_scatter_steps(flat), *_all_gather_steps(flat)], reduction, piece_bytes, group)
    return tensor


def ring_reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum", piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Reduce over all ranks, leaving each rank with its own chunk of the result.

    Shapes: tensor of L elements (any shape, contiguous) -> this rank's chunk, a row of L/n elements that is a view
        into `tensor` (the first L % n ranks have one more). The rest of `tensor` holds partial sums afterwards.
    Cost: S - S_r bytes sent per rank, which is (n-1)/n S where n divides L; n-1 steps.
    Error: as `ring_all_reduce`: the chunk is bitwise what `ring_all_reduce` puts there.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    """
    flat, reduction = prepare(tensor, group, op, "ring_reduce_scatter")
    check_piece_bytes(piece_bytes, flat, "ring_reduce_scatter")
    return _run(flat, _reduce_scatter_steps(flat), reduction, piece_bytes, group)[flat.rank]


def ring_all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Fill a tensor in place from the ranks' chunks: each rank passes in its own chunk, filled, and gets the others'.

    Shapes: tensor of L elements (any shape, contiguous), of which this rank has filled its chunk (as
        `ring_reduce_scatter` cuts it); returns `tensor`, whole and equal on every rank.
    Cost: S - S_(r+1) bytes sent per rank, which is (n-1)/n S where n divides L; n-1 steps.
    Error: exact: bytes are copied.

    Raises:
        ValueError: before any message, see `chunks.flatten`.
    """
    flat = flatten(tensor, group, "ring_all_gather")
    check_piece_bytes(piece_bytes, flat, "ring_all_gather")
    _run(flat, _all_gather_steps(flat), None, piece_bytes, group)
    return tensor


def ring_broadcast(
    tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Copy the root's tensor to every rank along a chain, piece by piece, so that all links carry data at once.

    Shapes: any shape; contiguous; the same on all ranks; returns `tensor`. `root` is a rank of the group.
    Cost: S bytes sent per rank, none by the last of the chain; k + n - 2 steps for k = ceil(S / piece_bytes) pieces,
        so about S / bandwidth however many ranks there are (a tree needs log2(n) times that), but n-1 latencies.
    Error: exact: bytes are copied.

    Raises:
        ValueError: before any message, see `chunks.flatten`; a root outside the group.
    """
    flat = flatten(tensor, group, "ring_broadcast")
    check_root(root, flat, "ring_broadcast")
    check_piece_bytes(piece_bytes, flat, "ring_broadcast")
    n = flat.num_ranks
    place = (flat.rank - root) % n
    after, before = _neighbours(flat)
    pieces = cut(flat.values, num_pieces(flat.values, piece_bytes))
    started: list[PendingCalls] = []
    for index in range(len(pieces) + 1 if n > 1 else 0):
        operations: list[Send | Receive] = []
        if place > 0 and index < len(pieces):
            operations.append(Receive(pieces[index], before))
        if place < n - 1 and index > 0:
            operations.append(Send(pieces[index - 1], after))
        started.append(start(*operations, group=group))
        started[-1].wait_received()
    for pending in started:
        pending.wait()
    return tensor


def _neighbours(flat: Flat) -> tuple[int, int]:
    return (flat.rank + 1) % flat.num_ranks, (flat.rank - 1) % flat.num_ranks


class _Step(NamedTuple):
    """One step of a ring on one rank.

    Attributes:
        send: number of the chunk that goes to the rank after this one.
        receive: number of the chunk that comes from the rank before this one.
        reduces: whether what comes is combined with this rank's own values, or else replaces them.
    """

    send: int
    receive: int
    reduces: bool


def _reduce_scatter_steps(flat: Flat) -> list[_Step]:
    """Each chunk goes around once, and every rank adds its part: chunk c starts at rank c + 1 and ends at rank c."""
    rank, n = flat.rank, flat.num_ranks
    return [_Step((rank - 1 - step) % n, (rank - 2 - step) % n, reduces=True) for step in range(n - 1)]


def _all_gather_steps(flat: Flat) -> list[_Step]:
    """Each finished chunk goes around once, and every rank keeps a copy: chunk c starts at rank c."""
    rank, n = flat.rank, flat.num_ranks
    return [_Step((rank - step) % n, (rank - 1 - step) % n, reduces=False) for step in range(n - 1)]


def _run(
    flat: Flat, steps: list[_Step], reduction: Reduction | None, piece_bytes: int, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Run the steps of a ring, the reducing ones first, with each chunk cut into k pieces; return the chunks.

    What a step sends is what the step before received, piece by piece. So the k pieces of a step can be on their way at
    once, while the step before still ends. Receives are posted two ahead: one fills while a different one is added up.

    A finished chunk may arrive in memory that this rank once sent from: it can only be finished after that old value
    was received and added up elsewhere, so nothing is overwritten too early.
    """
    after, before = _neighbours(flat)
    chunks = cut(flat.values, flat.num_ranks)
    k = num_pieces(chunks[0], piece_bytes)
    pieces = [cut(chunk, k) for chunk in chunks]
    leaving = [piece for step in steps for piece in pieces[step.send]]
    own = [piece for step in steps for piece in pieces[step.receive]]
    num_reduced = k * sum(step.reduces for step in steps)
    # A batch ends when all of it has ended, so there message t is sent and received in the same batch everywhere.
    receives_ahead, sends_ahead = (min(2, k),) * 2 if needs_batches(flat.values, group) else (2, k)
    scratch = [torch.empty_like(pieces[0][0]) for _ in range(min(receives_ahead, num_reduced))]
    arriving = [scratch[at % receives_ahead][: own[at].numel()] for at in range(num_reduced)] + own[num_reduced:]
    started: list[PendingCalls] = []
    receiving: list[PendingCalls] = []

    def post(receives: list[torch.Tensor], sends: list[torch.Tensor]) -> None:
        messages = [Receive(tensor, before) for tensor in receives]
        started.append(start(*messages, *(Send(tensor, after) for tensor in sends), group=group))
        if receives:
            receiving.append(started[-1])

    first_receives, first_sends = arriving[:receives_ahead], leaving[:sends_ahead]
    for at in range(max(len(first_receives), len(first_sends))):
        post(first_receives[at : at + 1], first_sends[at : at + 1])
    for at, mine in enumerate(own):
        receiving[at].wait_received()
        if reduction is not None and at < num_reduced:
            reduction.combine(mine, arriving[at])
            if at >= num_reduced - k:  # the last reducing step: the piece is finished
                reduction.finish(mine, flat.num_ranks)
        receive, send = at + receives_ahead, at + sends_ahead
        post(arriving[receive : receive + 1], leaving[send : send + 1])
    for pending in started:
        pending.wait()
    return chunks


class RingAllReduce:
    """A gradient hook that sums each bucket by `ring_all_reduce`.

    The ring is a loop of sends and receives on the caller's thread. So it runs when data parallelism waits for the
    bucket, after backward: nothing overlaps, unlike torch's all_reduce, which has threads or streams of its own.

    Cost: per bucket of S bytes what `ring_all_reduce` sends: 2 S - S_r - S_(r+1) bytes per rank.
    Error: as `ring_all_reduce`. Gradients are divided by the number of ranks before they are summed, so that a sum of
        float16 gradients does not overflow where their mean does not.
    """

    def start(self, bucket: GradientBucket, group: dist.ProcessGroup | None) -> _RingToRun:
        """Remember the bucket; its ring runs in `wait`."""
        return _RingToRun(bucket.buffer, group)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a ring remembers nothing between steps."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state.

        Raises:
            ValueError: the state has entries, so a different hook saved it.
        """
        if state_dict:
            raise ValueError(
                f"expected an empty state, got {sorted(state_dict)}: a different hook saved it: build that one"
            )


class _RingToRun(NamedTuple):
    """A bucket whose ring has not run yet."""

    buffer: torch.Tensor
    group: dist.ProcessGroup | None

    def wait(self) -> None:
        """Run the ring: afterwards the buffer holds the mean over ranks."""
        self.buffer.div_(dist.get_world_size(self.group))
        ring_all_reduce(self.buffer, self.group)
