"""GradientStatus: what became of each parameter's gradient in a step, and how all ranks hear of it.

A rank that finds a fault and raises alone leaves the others waiting in the next call. So it goes on to the end of the
step. Then all ranks exchange one status per parameter, come to the same judgement, and raise the same error, or none.

Two ways to exchange them: `gather_reports` tells every rank's statuses, for a program that first learns by a flag of
its own whether any rank has something to tell. `find_faults` asks in every step, with one all-reduce.

Symbols: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.blocks.clip import NotFiniteError
from distlab.comm.agree import group_device


class GradientStatus(IntEnum):
    """What became of one parameter's gradient on one rank."""

    USED = 0
    UNUSED = 1  # backward brought none
    NOT_FINITE = 2
    SPARSE = 3
    TWICE = 4  # a second one came when the first might be on the wire
    MOVED = 5  # the parameter does not lie in its bucket any more


USED, UNUSED, NOT_FINITE, SPARSE, TWICE, MOVED = GradientStatus

# By status: what happened, and what to do; in the order in which they are told.
_ROWS = Path(__file__).with_name("faults.txt").read_text(encoding="utf-8").splitlines()
FAULTS = {GradientStatus[name]: (what, advice) for name, what, advice in (row.split(" | ") for row in _ROWS)}
ON_THEIR_WAY = (
    "gradients are on their way between backward() and synchronize(), where nothing may read, change or forget them. "
    "Call synchronize() after backward(), also of a step that you skip; then clip, scale, step or zero_grad(). One "
    "rank's own gradients are there after a backward inside `with no_sync():`"
)
TOUCHED = f"a gradient was replaced or forgotten: {ON_THEIR_WAY}"
COMPLAINS = 2  # in the table of statuses: a rank has sentences to tell


class Reports(NamedTuple):
    """What all ranks said of one step.

    Attributes:
        statuses: [rank][parameter] in the order of the buckets.
        complaints: [rank] sentences on what no status covers.
    """

    statuses: list[list[int]]
    complaints: list[list[str]]

    def error(self, names: Sequence[str], *, unused: str, step: int, of_means: bool = False) -> RuntimeError | None:
        """Return the error that every rank must raise, or None: each fault, its parameters and ranks, and what to do.

        Args:
            names: of the parameters, in the order of `statuses`.
            unused: whether a parameter without a gradient is an "error".
            step: number of the step, for the text.
            of_means: the rank that owns a mean finds what is not finite in it, whichever rank it came from.
        """
        holders: dict[str, list[int]] = {}
        for rank, complaints in enumerate(self.complaints):
            for complaint in complaints:
                holders.setdefault(complaint, []).append(rank)
        texts, kind = [f"{complaint}{_on(ranks)}" for complaint, ranks in holders.items()], RuntimeError
        for status, (what, advice) in FAULTS.items():
            wrong = {
                name: [rank for rank, row in enumerate(self.statuses) if row[parameter] == status]
                for parameter, name in enumerate(names)
            }
            told = [
                name if of_means and status is NOT_FINITE else f"{name}{_on(ranks)}"
                for name, ranks in wrong.items()
                if ranks and (status is not UNUSED or unused == "error")
            ]
            if told:
                count = f"{len(told)} parameter{'s' if told[1:] else ''}"
                texts.append(f"{count} {what}: {'; '.join(told)}. {advice}")
                kind = NotFiniteError if status is NOT_FINITE else kind
        return kind(f"step {step}: {' Also: '.join(texts)}") if texts else None


def gather_reports(statuses: Sequence[int], complaints: list[str], group: ProcessGroup | None = None) -> Reports:
    """Exchange statuses and complaints; every rank of the group calls this, or none.

    Cost: one all-gather of P + 1 bytes per rank; where a rank has a complaint, also the sentences.
    """
    num_ranks = dist.get_world_size(group)
    mine = torch.tensor([*statuses, bool(complaints)], dtype=torch.uint8, device=group_device(group))
    gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(gathered, mine, group=group)
    rows = [row.tolist() for row in gathered]
    sentences: list[list[str]] = [[] for _ in range(num_ranks)]
    if any(row[-1] for row in rows):
        dist.all_gather_object(sentences, complaints, group=group)
    return Reports([row[:-1] for row in rows], sentences)


def find_faults(
    statuses: Sequence[int],
    names: Sequence[str],
    group: ProcessGroup | None = None,
    *,
    unused: str,
    step: int,
    complaints: Sequence[str] = (),
) -> RuntimeError | list[bool]:
    """Learn from all ranks what became of the gradients; every rank of the group calls this in every step.

    Args:
        statuses: of this rank's gradients.
        names: of the parameters.
        group: the ranks.
        unused: whether a parameter without a gradient on some rank is an "error".
        step: number of the step, for the text.
        complaints: sentences on what no status covers.

    Returns:
        The error that every rank must raise, or for each parameter whether any rank used it.

    Cost: one all-reduce of 6 P bytes; where something is wrong, as `gather_reports`.
    """
    table = torch.zeros(len(GradientStatus), len(statuses), dtype=torch.uint8)
    table[torch.tensor(statuses), torch.arange(len(statuses))] = 1
    if complaints:
        table.fill_(COMPLAINS)
    table = table.to(group_device(group))
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    seen = table.cpu()
    wrong = [fault for fault in FAULTS if (fault is not UNUSED or unused == "error") and bool(seen[fault].any())]
    if not wrong:
        used: list[bool] = seen[[one for one in GradientStatus if one is not UNUSED]].any(dim=0).tolist()
        return used
    error = gather_reports(statuses, list(complaints), group).error(names, unused=unused, step=step, of_means=True)
    assert error is not None, "the table has told of it"
    return type(error)(f"rank {dist.get_rank(group)}: {error}")


def _on(ranks: list[int]) -> str:
    return f" (rank {', '.join(map(str, ranks))})"
