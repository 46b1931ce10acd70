"""Census: ranks tell each other what became of their gradients, in the steps in which something did.

A rank that finds a fault and raises at once leaves the others waiting for a bucket that never comes. So it goes on to
the end of the step and says by one flag that it has something to tell; where any rank's flag is up, all ranks exchange
one code a parameter, come to the same judgement, and raise the same error, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.clip import NotFiniteError

USED, UNUSED, NOT_FINITE, SPARSE, TWICE = range(5)


class Census(NamedTuple):
    """What all ranks said of one step.

    Attributes:
        codes: [rank][parameter] in the order of the buckets.
        complaints: [rank] sentences on what no code covers.
    """

    codes: list[list[int]]
    complaints: list[list[str]]

    def ranks_with(self, code: int, parameter: int) -> list[int]:
        """Return the ranks that gave this code to a parameter."""
        return [rank for rank, row in enumerate(self.codes) if row[parameter] == code]

    def all_unused(self, parameter: int) -> bool:
        """Return whether no rank used a parameter."""
        return all(row[parameter] == UNUSED for row in self.codes)


def take_census(
    codes: Sequence[int], complaints: list[str], device: torch.device, group: ProcessGroup | None
) -> Census:
    """Exchange codes and complaints; every rank of the group calls this, or none.

    Cost: one all-gather of P + 1 bytes a rank; where a rank has a complaint, also the sentences.
    """
    num_ranks = dist.get_world_size(group)
    mine = torch.tensor([*codes, bool(complaints)], dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(gathered, mine, group=group)
    rows = [row.tolist() for row in gathered]
    sentences: list[list[str]] = [[] for _ in range(num_ranks)]
    if any(row[-1] for row in rows):
        dist.all_gather_object(sentences, complaints, group=group)
    return Census([row[:-1] for row in rows], sentences)


def judge(census: Census, names: Sequence[str], *, unused: str, step: int) -> RuntimeError | None:
    """Return the error that every rank must raise, or None.

    Args:
        census: what all ranks said.
        names: of the parameters, in the census's order.
        unused: whether a parameter without a gradient is an "error".
        step: number of the step, for the text.
    """
    texts = _complaints(census)
    for code, what, advice in (
        (
            SPARSE,
            "got a sparse gradient, and buckets hold dense ones",
            "Build the layer with sparse=False",
        ),
        (
            TWICE,
            "got a second gradient before synchronize()",
            "Call synchronize() after each backward, or run all but the last backward inside `with no_sync():`",
        ),
        (
            UNUSED,
            "got no gradient on some rank of the group",
            'Use them in the loss on every rank, freeze them with requires_grad_(False), or pass unused="zeros"',
        ),
    ):
        found = _found(census, names, code) if code != UNUSED or unused == "error" else []
        if found:
            texts.append(f"{_count(found, 'parameter')} {what}: {'; '.join(found)}. {advice}")
    found = _found(census, names, NOT_FINITE)
    if not found:
        return RuntimeError(" Also: ".join(texts)) if texts else None
    text = f"step {step}: not finite (NaN or infinite) {_count(found, 'gradient')}: {'; '.join(found)}"
    return NotFiniteError(" Also: ".join([f"{text}. Skip the update, or lower the learning rate", *texts]))


def _count(found: list[str], noun: str) -> str:
    return f"{len(found)} {noun}{'s' if len(found) > 1 else ''}"


def _found(census: Census, names: Sequence[str], code: int) -> list[str]:
    found = []
    for parameter, name in enumerate(names):
        ranks = census.ranks_with(code, parameter)
        if ranks:
            found.append(f"{name} (rank {', '.join(map(str, ranks))})")
    return found


def _complaints(census: Census) -> list[str]:
    holders: dict[str, list[int]] = {}
    for rank, sentences in enumerate(census.complaints):
        for sentence in sentences:
            holders.setdefault(sentence, []).append(rank)
    return [f"{sentence} (rank {', '.join(map(str, ranks))})" for sentence, ranks in holders.items()]
