"""Trees: few steps, for tensors so small that the number of steps is all that counts.

A ring needs n-1 steps before the last rank has heard of the first. In a tree the number of ranks that know doubles in
every step, so log2(n) steps are enough: 10 instead of 1,023 for 1,024 ranks. The price: a binomial tree's root sends
the whole tensor log2(n) times, and most ranks' links idle. `double_tree_all_reduce` repairs that with two trees that
each carry half of the tensor, in pieces.

In every Cost below S is the tensor's size in bytes, n the number of ranks, and v a rank's place, (rank - root) mod n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.collectives.chunks import Flat, Reduction, check_piece_bytes, check_root, cut, flatten, num_pieces, prepare
from distlab.comm.p2p import PendingCalls, Receive, Send, start

PIECE_BYTES = 1 << 20


def tree_broadcast(tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Copy the root's tensor to every rank down a binomial tree.

    Shapes: any shape; contiguous; the same on all ranks; returns `tensor`. `root` is a rank of the group.
    Cost: ceil(log2 n) steps. Place v sends S bytes to each v + 2^j < n with 2^j below v's lowest set bit; the root to
        every 2^j < n, which is ceil(log2 n) S bytes; odd places nothing.
    Error: exact: bytes are copied.

    Raises:
        ValueError: before any message, see `chunks.flatten`; a root outside the group.
    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    flat = flatten(tensor, group, "tree_broadcast")
    check_root(root, flat, "tree_broadcast")
    _broadcast(flat, root, group)
    return tensor


def tree_reduce(
    tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None, *, op: str = "sum"
) -> torch.Tensor:
    """Reduce over all ranks up a binomial tree; the root alone gets the result.

    Shapes: any shape; contiguous; returns `tensor`, in place; on other ranks than the root it holds partial sums.
    Cost: S bytes sent per rank, none by the root; ceil(log2 n) steps.
    Error: whole numbers are exact; floating point is added pairwise, always in the same order.

    Raises:
        ValueError: before any message, see `chunks.prepare`; a root outside the group.
    Source: Thakur, Rabenseifner and Gropp, 2005.
    """
    flat, reduction = prepare(tensor, group, op, "tree_reduce")
    check_root(root, flat, "tree_reduce")
    _reduce(flat, root, reduction, group)
    return tensor


def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum") -> torch.Tensor:
    """Reduce over all ranks in place: up a binomial tree to rank 0, then down again.

    Shapes: any shape; contiguous; returns `tensor`.
    Cost: 2 ceil(log2 n) steps; S bytes up (except for rank 0), and down what `tree_broadcast` sends: rank 0 sends
        ceil(log2 n) S bytes, odd ranks S.
    Error: every rank copies rank 0's sum, so all end with equal bits; repeats bit for bit. Floating point is added
        pairwise, which rounds about log2(n) times where a ring rounds n-1 times.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    """
    flat, reduction = prepare(tensor, group, op, "tree_all_reduce")
    _reduce(flat, 0, reduction, group)
    _broadcast(flat, 0, group)
    return tensor


def double_tree_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum", piece_bytes: int = PIECE_BYTES
) -> torch.Tensor:
    """Reduce over all ranks in place up and down two binary trees that carry half of the tensor each.

    In one binary tree half of the ranks are leaves, which send little. The second tree is built so that its leaves
    are the first one's inner ranks, so that together every link is used in both directions.

    Shapes: any shape; contiguous; returns `tensor`.
    Cost: per tree, with its half H of the tensor: H bytes up (except for its root), and H bytes down to each of its at
        most two children; together at most about 2 S per rank, as in a ring, in about 2 log2(n) + 2 k steps where a
        ring takes 2 (n-1): k = ceil(S / (2 piece_bytes)) pieces of a half, one message per piece and edge.
    Error: as `tree_all_reduce`.

    Raises:
        ValueError: before any message, see `chunks.prepare`.
    Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009,
        in NCCL's form. Here all pieces go up before the first goes down.
    """
    flat, reduction = prepare(tensor, group, op, "double_tree_all_reduce")
    check_piece_bytes(piece_bytes, flat, "double_tree_all_reduce")
    halves = cut(flat.values, 2)
    k = num_pieces(halves[0], piece_bytes)
    links = [_links(parents, flat.rank) for parents in double_tree(flat.num_ranks)]
    # Both trees, piece by piece, in the same order on every rank: a rank waits only for what was started already.
    work = [
        (link, piece)
        for pieces in zip(*(cut(half, k) for half in halves), strict=True)
        for link, piece in zip(links, pieces, strict=True)
    ]
    scratch = [torch.empty_like(piece) for _, piece in work[:1] for _ in range(2)]
    started: list[PendingCalls] = []
    for link, piece in work:
        parts = [memory[: piece.numel()] for memory, _ in zip(scratch, link.children, strict=False)]
        receives = [Receive(part, child) for part, child in zip(parts, link.children, strict=True)]
        start(*receives, group=group).wait()
        for part in parts:
            reduction.combine(piece, part)
        if link.parent is None:
            reduction.finish(piece, flat.num_ranks)
        else:
            started.append(start(Send(piece, link.parent), group=group))
    for link, piece in work:
        if link.parent is not None:
            start(Receive(piece, link.parent), group=group).wait()
        started.append(start(*(Send(piece, child) for child in link.children), group=group))
    for pending in started:
        pending.wait()
    return tensor


def double_tree(num_ranks: int) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Return two binary trees as each rank's parent (None at the root).

    In the first, odd ranks are leaves. The second is the first one mirrored (an even number of ranks) or shifted by
    one (an odd number). So its inner ranks are the first one's leaves, except for one rank of an odd number.

    Source: NCCL, src/graph/trees.cc.
    """
    first = tuple(_parent(rank, num_ranks) for rank in range(num_ranks))
    if num_ranks % 2 == 0:
        mirrored = (first[num_ranks - 1 - rank] for rank in range(num_ranks))
        return first, tuple(None if up is None else num_ranks - 1 - up for up in mirrored)
    shifted = (first[rank - 1] for rank in range(num_ranks))
    return first, tuple(None if up is None else (up + 1) % num_ranks for up in shifted)


class _Links(NamedTuple):
    parent: int | None
    children: tuple[int, ...]


def _links(parents: tuple[int | None, ...], rank: int) -> _Links:
    return _Links(parents[rank], tuple(child for child, parent in enumerate(parents) if parent == rank))


def _parent(rank: int, num_ranks: int) -> int | None:
    """Return the parent in a tree whose level is the lowest set bit: 1, 3, 5, 7 are leaves, 2 and 6 their parents."""
    if rank == 0:
        return None
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    return above if above < num_ranks else rank ^ bit


def _reduce(flat: Flat, root: int, reduction: Reduction, group: dist.ProcessGroup | None) -> None:
    n = flat.num_ranks
    place = (flat.rank - root) % n
    received = torch.empty_like(flat.values) if place % 2 == 0 and place + 1 < n else flat.values
    bit = 1
    while bit < n:
        if place & bit:
            start(Send(flat.values, (place - bit + root) % n), group=group).wait()
            return
        if place + bit < n:
            start(Receive(received, (place + bit + root) % n), group=group).wait()
            reduction.combine(flat.values, received)
        bit <<= 1
    reduction.finish(flat.values, n)


def _broadcast(flat: Flat, root: int, group: dist.ProcessGroup | None) -> None:
    n = flat.num_ranks
    place = (flat.rank - root) % n
    bit = 1
    while bit < n and not place & bit:
        bit <<= 1
    if place:
        start(Receive(flat.values, (place - bit + root) % n), group=group).wait()
    started: list[PendingCalls] = []
    while bit > 1:  # the farthest first: it has the most ranks behind it
        bit >>= 1
        if place + bit < n:
            started.append(start(Send(flat.values, (place + bit + root) % n), group=group))
    for pending in started:
        pending.wait()
