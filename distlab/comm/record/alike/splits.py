"""What an all_to_all gives and takes: rank i's gift to rank j must be as large as what rank j takes from rank i.

The amounts may differ between ranks, so they are not part of a call's fingerprint. They stand in its text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from distlab.comm.record.read import call_of, group_ranks

_SPLITS = re.compile(r", gives \[([\d, ]*)\], takes \[([\d, ]*)\]")


def splits_text(gives: Sequence[int], takes: Sequence[int]) -> str:
    """Return what the text of a call says: elements for each rank of the group, and from each."""
    return f", gives {list(gives)}, takes {list(takes)}"


@functools.lru_cache(maxsize=1024)
def splits_in(text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Read the amounts back from the text of a call; None where it has none."""
    found = _SPLITS.search(text)
    if found is None:
        return None
    gives, takes = (tuple(int(count) for count in part.split(",") if count.strip()) for part in found.groups())
    return gives, takes


def unfit_splits(rows: NDArray[Any], ranks: Sequence[int], names: Mapping[int, list[str]]) -> str:
    """Say where ranks whose all_to_all calls meet give other amounts than are taken; "" where all fit."""
    members = group_ranks(names[ranks[0]][rows[0]["group"]])
    splits = {rank: splits_in(names[rank][row["what"]]) for rank, row in zip(ranks, rows, strict=True)}
    wrong = []
    for source in ranks:
        for destination in ranks:
            given, taken = splits[source], splits[destination]
            if given is None or taken is None or not len(given[0]) == len(taken[1]) == len(members):
                continue
            sent, expected = given[0][members.index(destination)], taken[1][members.index(source)]
            if sent != expected:
                wrong.append(
                    f"  rank {source} gives rank {destination} {sent} elements, and rank {destination} takes "
                    f"{expected} from it"
                )
    if not wrong:
        return ""
    head = f"the ranks of group {list(members)} give other amounts than are taken, at their call #{rows[0]['seq']}:"
    lines = [f"  rank {rank}: {call_of(rank, row, names[rank])}" for rank, row in zip(ranks, rows, strict=True)]
    lines += [f"  rank {rank} has not called it yet" for rank in members if rank not in ranks]
    rule = "let what rank i gives rank j be what rank j takes from rank i: send the counts first where they vary"
    return "\n".join([head, *wrong, *lines, rule])
