"""The one sentence about ranks of a group that do not make the same call, whoever finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RULE = "every rank must make a group's collectives in the same order, with equal shape, dtype, root and ReduceOp"


def not_the_same(members: Sequence[int], calls: Mapping[int, object], number: int | None = None) -> str:
    """Say which ranks of a group call what.

    Args:
        members: global ranks of the group.
        calls: by global rank, the call in words; None where a rank has not come.
        number: of the call in the group, where it is known.
    """
    at = "" if number is None else f", at their call #{number}"
    lines = [
        f"  rank {rank} has not called it yet" if c is None else f"  rank {rank}: {c}" for rank, c in calls.items()
    ]
    return "\n".join([f"the ranks of group {list(members)} do not make the same call{at}:", *lines, RULE])
