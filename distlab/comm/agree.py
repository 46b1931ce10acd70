"""Check that every rank has the same value, before a difference becomes a hang or a wrong number; say who differs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # loaded where it is needed: `import distlab.comm` loads this file, and should not load torch
    import torch
    import torch.distributed as dist

MAX_SHOWN = 300
RULE = "every rank must make a group's collectives in the same order, with equal shape, dtype, root and ReduceOp"


def agree(value: object, group: dist.ProcessGroup | None = None, *, what: str = "value") -> None:
    """Make sure that every rank of the group passes the same value; every rank calls this, or none.

    The value is anything JSON holds: numbers, text, None, lists and dicts of them; tuples count as lists. No pickle
    travels.

    Cost: one all-gather of 40 bytes per rank; a second one, of the values, only when they differ.

    Raises:
        ValueError: on every rank, when ranks differ or one has a value that JSON cannot hold; the text names the ranks
            and the values.
    """
    import torch.distributed as dist

    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"!{error}"  # no JSON text begins with "!"; tell the other ranks, or they would wait forever
    data = text.encode()
    mine = hashlib.sha256(data).digest() + len(data).to_bytes(8, "big")
    everyone = all_gather_bytes(mine, group)
    if text[0] != "!" and all(other == mine for other in everyone):
        return
    longest = max(int.from_bytes(other[32:], "big") for other in everyone)
    texts = [other.rstrip(b"\0").decode() for other in all_gather_bytes(data.ljust(longest, b"\0"), group)]
    raise ValueError(_explain(texts, dist.get_process_group_ranks(group), what))


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Device whose tensors this group moves: the current GPU for nccl, the CPU for anything else."""
    import torch

    from distlab.comm.device import current

    return current() if torch.distributed.get_backend(group) == "nccl" else torch.device("cpu")


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of every rank of the group, by one all-gather; all ranks give equally many."""
    import torch
    import torch.distributed as dist

    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [tensor.cpu().numpy().tobytes() for tensor in gathered]


def _explain(texts: list[str], names: list[int], what: str) -> str:
    """Say which ranks have which value, of a long value what stands around the first difference.

    `names`: the global ranks of the group's members, which are what a user knows.
    """
    refused = [(name, text[1:]) for name, text in zip(names, texts, strict=True) if text.startswith("!")]
    if refused:
        rank, reason = refused[0]
        return f"{what} on rank {rank} cannot be compared ({reason}); pass numbers, text, lists and dicts only"
    holders: dict[str, list[int]] = {}
    for name, text in zip(names, texts, strict=True):
        holders.setdefault(text, []).append(name)
    start = max(0, len(os.path.commonprefix(list(holders))) - MAX_SHOWN // 2)
    parts = [
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} "
        + (text if len(text) <= MAX_SHOWN else f"...{text[start : start + MAX_SHOWN]}...")
        for text, ranks in holders.items()
    ]
    return f"ranks disagree on {what}: {'; '.join(parts)}. Pass the same on every rank"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 0, 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(names) != 1)} {', '.join(names)}"


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
