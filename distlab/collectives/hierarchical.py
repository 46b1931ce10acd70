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
    Cost: the tensor has S bytes, each of m machines has g ranks. A rank sends 2 (g-1)/g S bytes inside its machine in
        2 (g-1) steps, then 2 (m-1)/m S/g bytes to other machines in 2 (m-1) steps.
        Example: with 8 machines of 8 ranks and 64 MB, a rank sends 112 MB inside and 14 MB across, in 28 steps. A flat
        ring sends 2 (gm-1)/(gm) S = 126 MB per rank in 126 steps, and where machines meet all over the slow links.
        Where S does not divide by g, chunks differ by one element. Rank i of a machine then sends 2 S inside, less
        the bytes of chunk i and of the chunk after it. The same rule holds across for chunk i, cut into m parts.
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
