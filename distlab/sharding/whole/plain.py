"""An update of whole matrices whose rows lie on ranks, by hand, in both ways; and the same question with one number.

Muon makes the momentum of a matrix orthogonal, and no rank has the whole momentum. `by_everyone` gathers it: every rank
computes every matrix. `by_owners` computes each matrix once: its rows go to the rank that owns it, and the result goes
back. It sends n / 2 times less, too. LARS and LAMB need a single number, the length: no rows travel in `whole_norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.sharding.calls import gather_into

Update = Callable[[Tensor], Tensor]


def by_everyone(rows: Sequence[Tensor], update: Update, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return this rank's rows of `update(matrix)` for each matrix, given its rows of each; every rank computes all.

    Shapes: rows [M/n, N] each -> [M/n, N] each
    Cost: an all-gather for each matrix: with E elements in all, (n-1)/n E sent per rank; all updates on each rank.
    """
    found = []
    for own in rows:
        whole = own.new_empty(dist.get_world_size(group) * len(own), own.shape[1])
        gather_into(whole.view(-1), own.reshape(-1), group)
        found.append(update(whole)[dist.get_rank(group) * len(own) :][: len(own)].to(own.dtype))
    return found


def by_owners(
    rows: Sequence[Tensor], owners: Sequence[int], update: Update, group: ProcessGroup | None = None
) -> list[Tensor]:
    """Return this rank's rows of `update(matrix)` for each matrix, given its rows of each; the owner computes it.

    Shapes: rows [M/n, N] each -> [M/n, N] each
    Cost: two all-to-alls: with E elements in all, 2 (n-1)/n E/n sent in the mean over ranks; an update each once.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    owned = [[at for at, owner in enumerate(owners) if owner == other] for other in range(num_ranks)]
    in_order = [at for its in owned for at in its]
    give = [sum(rows[at].numel() for at in its) for its in owned]  # to each owner
    take = [give[rank]] * num_ranks  # from each rank: its rows of what this one owns
    leaving = torch.cat([rows[at].reshape(-1) for at in in_order])
    arriving = leaving.new_empty(sum(take))
    dist.all_to_all_single(arriving, leaving, take, give, group=group)

    sizes = [rows[at].numel() for at in owned[rank]]
    parts = zip(*(block.split(sizes) for block in arriving.split(take)), strict=True)  # of each matrix: n parts
    made = [update(torch.cat(its).view(-1, rows[at].shape[1])) for its, at in zip(parts, owned[rank], strict=True)]

    back = [one.chunk(num_ranks)[other].reshape(-1).to(leaving.dtype) for other in range(num_ranks) for one in made]
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, torch.cat(back) if back else leaving[:0], give, take, group=group)
    found = dict(zip(in_order, arriving.split([rows[at].numel() for at in in_order]), strict=True))
    return [found[at].view_as(own) for at, own in enumerate(rows)]


def whole_norms(parts: Sequence[Tensor], group: ProcessGroup | None = None) -> Tensor:
    """Return the length of each whole tensor, of which this rank has a part: all that a trust ratio needs.

    Shapes: parts any, P of them -> [P]
    Cost: one all-reduce of P numbers.
    """
    squares = torch.stack([part.detach().square().sum() for part in parts])
    dist.all_reduce(squares, group=group)
    return squares.sqrt()
