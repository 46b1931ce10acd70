"""Run something on every rank; where it fails on one rank, fail on all ranks with the same text.

Without this, a rank that raises leaves the others waiting in their next collective call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

Result = TypeVar("Result")


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the group and the group's size; (0, 1) where there are no other ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def together(
    action: Callable[[], Result],
    group: ProcessGroup | None = None,
    *,
    what: str,
    failure: type[Exception] = RuntimeError,
) -> list[Result]:
    """Run an action on every rank and return the results of all ranks; every rank of the group calls this.

    Args:
        action: may raise any exception; one all-gather takes its pickled result to all ranks.
        group: the ranks.
        what: what the ranks do, for the text of errors: "cannot {what}: rank 1: ...".
        failure: raised on every rank for any other exception than a ValueError.

    Raises:
        ValueError: on every rank, when the action raised ValueError on any rank; the text names the ranks.
    """
    outcome: tuple[str, Any]
    try:
        outcome = "done", action()
    except ValueError as error:
        outcome = "refused", str(error)
    except Exception as error:  # whatever it is: a rank that left here would leave the others waiting
        is_of_the_world = isinstance(error, OSError | RuntimeError)
        outcome = "failed", str(error) if is_of_the_world else f"{type(error).__name__}: {error}"
    _, world_size = place_in(group)
    outcomes: list[tuple[str, Any]] = [outcome] * world_size
    names = [0]
    if world_size > 1:
        dist.all_gather_object(outcomes, outcome, group=group)
        names = dist.get_process_group_ranks(group)
    for kind, raised in (("refused", ValueError), ("failed", failure)):
        ranks: dict[str, list[str]] = {}
        for name, (its_kind, text) in zip(names, outcomes, strict=True):
            if its_kind == kind:
                ranks.setdefault(text, []).append(str(name))
        if ranks:
            texts = [f"rank {', '.join(who)}: {text}" for text, who in ranks.items()]
            raise raised(f"cannot {what}: {'; '.join(texts)}")
    return [result for _, result in outcomes]
