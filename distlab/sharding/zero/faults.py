"""What went wrong with gradients, told to all ranks at once, so that all raise the same error and none hangs.

A rank that found a fault and raised alone would leave the others waiting in the next call. So every rank enters what
became of its gradients in a table of codes by parameters, one all-reduce (the maximum) makes one table of all, and each
rank comes to the same judgement. Which ranks they were is asked only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.clip import NotFiniteError
from distlab.sharding.zero.shard_bucket import MOVED, NOT_FINITE, SPARSE, TWICE, UNUSED, USED, ShardBucket

NUM_CODES = 6
TEXTS = {
    SPARSE: ("got a sparse gradient, and buckets hold dense ones", "Build the layer with sparse=False"),
    TWICE: (
        "got a second gradient before synchronize()",
        "Call synchronize() after each backward, or run all but the last backward inside `with no_sync():`",
    ),
    MOVED: (
        "left the buckets: the parameter's memory was replaced since construction",
        "Move or convert the module first (.to(), .half(), load_state_dict with assign=True), and shard it then",
    ),
    UNUSED: (
        "got no gradient on some rank of the group",
        'Use them in the loss on every rank, freeze them with requires_grad_(False), or pass unused="zeros"',
    ),
    NOT_FINITE: ("has a mean gradient that is not finite (NaN or infinite)", "Skip the update, or lower the rate"),
}


def find_faults(
    buckets: Sequence[ShardBucket], group: ProcessGroup | None, *, unused: str, step: int
) -> RuntimeError | list[list[bool]]:
    """Learn from all ranks what became of the gradients; every rank of the group calls this.

    Returns the error that every rank must raise, or for each bucket which parameters any rank used.

    Cost: one all-reduce of 6 bytes a parameter; where something is wrong, an all-gather of names.
    """
    codes = [code for bucket in buckets for code in bucket.codes]
    table = torch.zeros(NUM_CODES, len(codes), dtype=torch.uint8)
    table[torch.tensor(codes), torch.arange(len(codes))] = 1
    device = buckets[0].whole.device if dist.get_backend(group) == "nccl" else table.device
    table = table.to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    seen = table.cpu()
    wrong = [code for code in TEXTS if (code != UNUSED or unused == "error") and bool(seen[code].any())]
    if wrong:
        return _judge(wrong, codes, [name for bucket in buckets for name in bucket.names], group=group, step=step)
    used = seen[[USED, SPARSE, TWICE, MOVED, NOT_FINITE]].any(dim=0).tolist()
    ends = [len(bucket.parameters) for bucket in buckets]
    return [used[sum(ends[:index]) : sum(ends[: index + 1])] for index in range(len(buckets))]


def _judge(
    wrong: Sequence[int], codes: Sequence[int], names: Sequence[str], *, group: ProcessGroup | None, step: int
) -> RuntimeError:
    """Name what is wrong, where, and what to do."""
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(rows, list(codes), group=group)
    texts = []
    for code in wrong:
        found = []
        for parameter, name in enumerate(names):
            ranks = [rank for rank, row in enumerate(rows) if row[parameter] == code]
            if ranks:  # a shard's owner finds what is not finite, whoever it came from
                where = "" if code == NOT_FINITE else f" (rank {', '.join(map(str, ranks))})"
                found.append(f"{name}{where}")
        what, advice = TEXTS[code]
        noun = "1 parameter" if len(found) == 1 else f"{len(found)} parameters"
        texts.append(f"{noun} {what}: {'; '.join(found)}. {advice}")
    kind = NotFiniteError if NOT_FINITE in wrong else RuntimeError
    return kind(f"rank {dist.get_rank(group)}: step {step}: {' Also: '.join(texts)}")
