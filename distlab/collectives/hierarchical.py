"""Two levels: much traffic over the fast links inside a machine, little over the slow ones between machines.

Eight GPUs of a machine talk to each other ten times as fast as to the next machine. So the ranks of a machine first
reduce among themselves, each ending with a chunk. Only chunks then cross the network: rank i of each machine meets
rank i of all others. At last the machine's ranks gather the chunks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.collectives.chunks import check_piece_bytes, prepare
from distlab.collectives.ring import PIECE_BYTES, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from distlab.comm.p2p import group_rank


def hierarchical_all_reduce(
    tensor: torch.Tensor,
    local_group: dist.ProcessGroup | None,
    cross_group: dist.ProcessGroup | None,
    *,
    op: str = "sum",
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor:
    """Reduce over all machines' ranks in place: reduce-scatter inside, all-reduce across, all-gather inside.

    The groups are those of a mesh of machines x ranks (`mesh_groups`): a rank's local group is its machine, its cross
    group the ranks with the same place on the other machines. Every machine has the same number of ranks.

    Shapes: any shape, 0-dim and empty too; contiguous; returns `tensor`.
    Cost: with g ranks per machine, m machines, S_c the bytes of chunk c of g chunks, i this rank's place on its
        machine, and X_d the bytes of part d of chunk i cut into m, c this rank's place in the cross group: inside
        2 S - S_i - S_(i+1) bytes sent per rank, across 2 S_i - X_c - X_(c+1), which is 2 (g-1)/g S inside and
        2 (m-1)/m S/g across where all divides. A flat ring sends 2 (gm-1)/(gm) S, all of it over the slow links
        where machines meet. Steps: 2 (g-1) inside and 2 (m-1) across, instead of 2 (gm-1).
    Error: each element is added up once, first inside each machine, then across, and copied: equal bits on all ranks,
        and bit for bit again. The order differs from a flat ring's, and so does the rounding. The mean divides twice.

    Raises:
        ValueError: before any message, see `chunks.prepare`; or groups that share more ranks than this one.
    Source: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018, section 4.3.
    """
    flat, _ = prepare(tensor, local_group, op, "hierarchical_all_reduce")
    check_piece_bytes(piece_bytes, flat, "hierarchical_all_reduce")
    _check_groups(local_group, cross_group)
    chunk = ring_reduce_scatter(tensor.detach(), local_group, op=op, piece_bytes=piece_bytes)
    ring_all_reduce(chunk, cross_group, op=op, piece_bytes=piece_bytes)
    ring_all_gather(tensor.detach(), local_group, piece_bytes=piece_bytes)
    return tensor


def _check_groups(local_group: dist.ProcessGroup | None, cross_group: dist.ProcessGroup | None) -> None:
    group_rank(cross_group)
    rank = dist.get_rank()
    local, cross = dist.get_process_group_ranks(local_group), dist.get_process_group_ranks(cross_group)
    both = sorted(set(local) & set(cross))
    if both != [rank]:
        raise ValueError(
            f"rank {rank}: local group {local} and cross group {cross} share ranks {both}, so values would be added "
            f"twice; they must meet in rank {rank} alone, as the two axes of a mesh do"
        )
