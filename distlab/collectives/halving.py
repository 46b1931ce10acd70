"""Halving and doubling: as few bytes as a ring in as few steps as a tree.

Reduce-scatter by recursive halving: exchange halves of the tensor with the rank half the group away, and add. Then
exchange quarters with the rank a quarter away, and so on. Each step halves the part that a rank has to add up.
All-gather by recursive doubling does these steps in reverse order. Both need a power of two. With any other number of
ranks the first few form pairs: the odd rank of a pair gives its tensor to the even one and waits for the result.

In every Cost below n is the number of ranks, p the largest power of two <= n, and r this rank. S_c is the bytes of
chunk c of n chunks (see `chunks.py`), and S their sum. The first n - p pairs (0, 1), (2, 3), ... act as one rank each:
the even one, which owns both chunks. S_own is the bytes of its one or two chunks. "Odd of a pair" ranks are folded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.collectives.chunks import Flat, Reduction, cut, flatten, prepare
from distlab.comm.p2p import Receive, Send, exchange


def halving_doubling_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum"
) -> torch.Tensor:
    """Reduce over all ranks in place; every rank ends with the same bits.

    Shapes: any shape, 0-dim and empty too; contiguous; returns `tensor`.
    Cost: where n is a power of two, 2 log2(n) steps and 2 (n-1)/n S bytes sent per rank (exactly: S - S_r halving, and
        doubling the sums of the blocks that hold r, of 1, 2, ..., n/2 chunks). Otherwise 2 log2(p) + 2 steps: a folded
        rank sends S, its partner S more than the formula for p ranks, with blocks cut from the n chunks.
    Error: each element is added up by one rank, in a fixed order, and copied by all others: equal bits on all ranks,
        and bit for bit again. Floating point is added pairwise: about log2(n) roundings.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005,
        section 4.5; the fold as there.
    """
    flat, reduction = prepare(tensor, group, op, "halving_doubling_all_reduce")
    plan = _plan(flat)
    _fold_in(flat, plan, reduction, group)
    _halve(flat, plan, reduction, group)
    _double(plan, group)
    _to_folded(flat.values, plan, group)
    return tensor


def halving_reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum"
) -> torch.Tensor:
    """Reduce over all ranks by recursive halving, leaving each rank with its own chunk of the result.

    Shapes: as `ring_reduce_scatter`: tensor of L elements -> this rank's chunk of about L/n, a view into `tensor`,
        whose rest holds partial sums afterwards.
    Cost: log2(n) steps, S - S_r bytes sent per rank, where n is a power of two. Otherwise log2(p) + 2 steps: a folded
        rank sends S; its partner S - S_own, and the folded rank's chunk; all others S - S_r.
    Error: as `halving_doubling_all_reduce`; the chunk is bitwise what that puts there.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    """
    flat, reduction = prepare(tensor, group, op, "halving_reduce_scatter")
    plan = _plan(flat)
    _fold_in(flat, plan, reduction, group)
    _halve(flat, plan, reduction, group)
    _to_folded(plan.chunks[plan.folded_rank], plan, group)
    return plan.chunks[flat.rank]


def doubling_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Fill a tensor in place from the ranks' chunks by recursive doubling.

    Shapes: as `ring_all_gather`: tensor of L elements of which this rank has filled its chunk; returns `tensor`.
    Cost: where n is a power of two, log2(n) steps, in which r sends the blocks of 1, 2, ..., n/2 chunks that hold it:
        (n-1)/n S where n divides L. Otherwise log2(p) + 2 steps: a folded rank sends S_r; its partner S, in addition
        to the blocks of 1, 2, ..., p/2 ranks' chunks.
    Error: exact: bytes are copied.

    Raises:
        ValueError: before any message, see `chunks.flatten`.
    """
    flat = flatten(tensor, group, "doubling_all_gather")
    plan = _plan(flat)
    _to_partner(plan.chunks[plan.folded_rank], plan, group)
    _double(plan, group)
    _to_folded(flat.values, plan, group)
    return tensor


class _Plan(NamedTuple):
    """Where a rank stands among the p that halve and double.

    Attributes:
        values: the whole row.
        chunks: its n chunks, one per rank.
        place: this rank's place among the p; a folded rank has its partner's.
        ranks: the rank at each place.
        bounds: place q owns elements bounds[q] to bounds[q + 1]: one chunk, or the two of a pair.
        partner: the other rank of this rank's pair, or None.
        folded: whether this rank only hands in and waits.
    """

    values: torch.Tensor
    chunks: list[torch.Tensor]
    place: int
    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    partner: int | None
    folded: bool

    @property
    def folded_rank(self) -> int:
        """The folded rank of this rank's pair; this rank where it is in none."""
        rank = self.ranks[self.place]
        return rank if self.partner is None else rank + 1

    def owned_by(self, first: int, last: int) -> torch.Tensor:
        """Return the chunks of places first to last - 1: neighbours own neighbouring chunks, so they are one block."""
        return self.values[self.bounds[first] : self.bounds[last]]


def _plan(flat: Flat) -> _Plan:
    n, rank = flat.num_ranks, flat.rank
    num_places = 1 << (n.bit_length() - 1)
    num_pairs = n - num_places
    ranks = (*range(0, 2 * num_pairs, 2), *range(2 * num_pairs, n))
    chunks = cut(flat.values, n)
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.numel())
    bounds = (*(starts[r] for r in ranks), starts[-1])
    in_pair = rank < 2 * num_pairs
    place = rank // 2 if in_pair else rank - num_pairs
    return _Plan(flat.values, chunks, place, ranks, bounds, rank ^ 1 if in_pair else None, in_pair and rank % 2 == 1)


def _fold_in(flat: Flat, plan: _Plan, reduction: Reduction, group: dist.ProcessGroup | None) -> None:
    """Add the folded ranks' tensors to their partners', so that p ranks hold everything."""
    if plan.partner is None:
        return
    received = plan.values if plan.folded else torch.empty_like(plan.values)
    _to_partner(received, plan, group)
    if not plan.folded:
        reduction.combine(flat.values, received)


def _to_partner(tensor: torch.Tensor, plan: _Plan, group: dist.ProcessGroup | None) -> None:
    """Move a tensor from the folded rank of a pair to its partner."""
    if plan.partner is not None:
        exchange(Send(tensor, plan.partner) if plan.folded else Receive(tensor, plan.partner), group=group)


def _to_folded(tensor: torch.Tensor, plan: _Plan, group: dist.ProcessGroup | None) -> None:
    """Move a tensor from the partner to the folded rank of a pair."""
    if plan.partner is not None:
        exchange(Receive(tensor, plan.partner) if plan.folded else Send(tensor, plan.partner), group=group)


def _swap(send: torch.Tensor, receive: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    exchange(Receive(receive, peer), Send(send, peer), group=group)


def _halve(flat: Flat, plan: _Plan, reduction: Reduction, group: dist.ProcessGroup | None) -> None:
    """Reduce until each place holds the result of what it owns."""
    if plan.folded:
        return
    distance = len(plan.ranks) // 2
    scratch = torch.empty_like(plan.values) if distance else plan.values
    while distance:
        peer = plan.place ^ distance
        mine = plan.owned_by(*_block(plan.place, distance))
        theirs = plan.owned_by(*_block(peer, distance))
        received = scratch[: mine.numel()]
        _swap(theirs, received, plan.ranks[peer], group)
        reduction.combine(mine, received)
        distance //= 2
    reduction.finish(plan.owned_by(plan.place, plan.place + 1), flat.num_ranks)


def _double(plan: _Plan, group: dist.ProcessGroup | None) -> None:
    """Exchange ever larger blocks until each place holds all of them."""
    if plan.folded:
        return
    distance = 1
    while distance < len(plan.ranks):
        peer = plan.place ^ distance
        mine = plan.owned_by(*_block(plan.place, distance))
        theirs = plan.owned_by(*_block(peer, distance))
        _swap(mine, theirs, plan.ranks[peer], group)
        distance *= 2


def _block(place: int, size: int) -> tuple[int, int]:
    """Return the aligned block of `size` places that holds `place`."""
    first = place // size * size
    return first, first + size
