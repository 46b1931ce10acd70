"""Tell whether ranks that failed can go on together: whether what they had begun to say to each other is finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from distlab.comm.record.read import Records


def is_settled(records: Records, ranks: Collection[int]) -> bool:
    """Return whether the ranks' calls are all over, every message was received, and every collective was made by all.

    `ranks` are those that had a job; the others' calls belong to an earlier one. In doubt the answer is no.
    """
    made: dict[int, Counter[tuple[tuple[int, ...], str]]] = {rank: Counter() for rank in ranks}
    under_way = 0
    for rank in ranks:
        if rank not in records.by_rank or records.dropped(rank):
            return False
        for call in records.calls(rank):
            if call.state != "done":
                return False
            if call.op in ("send", "recv"):
                under_way += 1 if call.op == "send" else -1
            else:
                made[rank][call.group, call.op] += 1
    for count in made.values():
        for (group, op), number in count.items():
            if any(made.get(other, Counter())[group, op] != number for other in group):
                return False
    return under_way == 0
