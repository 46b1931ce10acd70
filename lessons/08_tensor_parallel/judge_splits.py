"""Name what is wrong with heads that are dealt out, and with a sequence that is joined and summed apart again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_08 import cases
from distlab_lesson_08.judges import ACTIVATION, is_times, judge_way, reduce_bytes, same, total
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, over_budget, sent_line
from distlab.grading.values import compare, describe


def own_heads(num_heads: int, num_shared: int, num_ranks: int, rank: int) -> Tensor:
    """Return the right rows."""
    size = cases.HEAD_SIZE
    sections = cases.head_weight(num_heads, num_shared).split([n * size for n in (num_heads, num_shared, num_shared)])
    return torch.cat([section.chunk(num_ranks)[rank] for section in sections])


def judge_heads(evidence: Evidence) -> Iterator[Fault]:
    """Each rank's queries, keys and values, of whole heads that belong together; an error where they do not divide."""
    for (num_heads, num_shared, n), row in zip(cases.HEAD_CASES, evidence.results[0], strict=True):
        asked = f"{num_heads} heads, {num_shared} of keys and values, {n} rank{'s' * (n > 1)}"
        for rank, got in enumerate(row):
            what = f"{asked}: rank {rank}"
            if num_heads % n or num_shared % n:
                fault = _judge_error(got, what)
            elif isinstance(got, tuple):
                fault = Fault("raised", f"{what}: {got[0]}: {got[1]}")
            else:
                fault = _judge_rows(got, (num_heads, num_shared, n, rank), what)
            if fault is not None:
                yield fault
                return


def _judge_error(got: Any, what: str) -> Fault | None:
    if isinstance(got, tuple) and got[0] == "ValueError":
        return None
    if isinstance(got, tuple):
        return Fault("no clear error", f"{what}: the heads do not divide; expected a ValueError, got {got[0]}")
    text = f"{what}: the heads do not divide, and it returns {describe(got)}; some ranks would have heads of others"
    return Fault("no error", f"{text}, or none. Raise ValueError, on every rank alike")


def _judge_rows(got: Any, case: tuple[int, int, int, int], what: str) -> Fault | None:
    num_heads, num_shared, n, rank = case
    weight, size = cases.head_weight(num_heads, num_shared), cases.HEAD_SIZE
    want = own_heads(*case)
    if same(got, want):
        return None
    if n > 1 and same(got, weight.chunk(n)[rank]):
        text = f"{what} has part {rank} of the rows cut as one piece: rank 0 gets queries and no values"
        return Fault("cut as one piece", f"{text}, and training goes on, with a worse loss. Cut queries, keys, values")
    queries, keys, values = weight.split([num * size for num in (num_heads, num_shared, num_shared)])
    if n > 1 and same(got, torch.cat([queries.chunk(n)[rank], keys, values])):
        text = f"{what} has all keys and values: grouped heads are shared out like the queries that read them"
        return Fault("keys not shared out", text)
    dealt = [part.view(-1, size, cases.HIDDEN)[rank::n].flatten(0, 1) for part in (queries, keys, values)]
    if n > 1 and same(got, torch.cat(dealt)):
        text = f"{what} has every {n}. head; rank r has heads r A/t to (r+1) A/t, so that"
        return Fault("heads dealt out", f"{text} the output layer's columns and the grouped keys are its own")
    if isinstance(got, Tensor) and n > 1 and same(got, torch.cat([p[rank::n] for p in (queries, keys, values)])):
        return Fault("heads cut through", f"{what} has every {n}. row: a head's {size} rows belong together")
    if isinstance(got, Tensor) and got.shape == want.shape and same(got.sort(0).values, want.sort(0).values):
        text = f"{what} has its heads' rows in another order"
        return Fault("order of rows", f"{text}; expected its queries, then its keys, then its values")
    thirds = [part.chunk(n)[rank] for part in weight.chunk(3)]
    if num_shared != num_heads and same(got, torch.cat(thirds)):
        text = f"{what}: three equal sections were cut, but queries have {num_heads} heads and keys {num_shared}"
        return Fault("equal sections", f"{text}: split by [A d, K d, K d]")
    return compare(got, want, f"{what}'s rows", n)


def budget_heads(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    refused = sum(bool(a % n or k % n) for a, k, n in cases.HEAD_CASES)
    return [f"{len(cases.HEAD_CASES) - refused} cases, grouped heads among them; {refused} refused: heads left over"]


def judge_sequence(evidence: Evidence) -> Iterator[Fault]:
    """All-gather forward and reduce-scatter backward, and the reverse: together the bytes of two all-reduces."""
    n, length = evidence.world_size, cases.POSITIONS // evidence.world_size

    def all_of(purpose: str, size: int) -> list[Tensor]:
        return [cases.sequence_of(rank, purpose, size) for rank in range(n)]

    joined = torch.cat(all_of("own", length))
    back = total(all_of("gradient of the whole", cases.POSITIONS)).split(length)
    added = total(all_of("partial", cases.POSITIONS)).split(length)
    gradient = torch.cat(all_of("gradient of the part", length))
    for rank, result in enumerate(evidence.results):
        if "pair" in result:
            yield Fault("returned", f"rank {rank}: expected two functions, got {describe(result['pair'])}")
            return
        fault = _named_sequence(result, rank, n) if n > 1 else None
        gather, scatter = f"the first function on rank {rank}", f"the second function on rank {rank}"
        fault = fault or judge_way(result["gather"], (joined, back[rank]), gather, n)
        fault = fault or judge_way(result["scatter"], (added[rank], gradient), scatter, n)
        if fault is not None:
            yield fault
            return
    wanted = 4 * (n - 1) / n * ACTIVATION
    fault = over_budget(evidence, wanted, "two all-gathers and two reduce-scatters")
    if fault is None:
        return
    if calls(evidence, 0, "all_reduce"):
        text = f"{fault.message}: an all-reduce sums all positions on every rank, and all but 1/{n} of them are thrown"
        fault = Fault("all-reduce", f"{text} away; scatter_sum is the half that you need")
    yield fault


def _named_sequence(result: dict[str, Any], rank: int, n: int) -> Fault | None:
    length, gather, scatter = cases.POSITIONS // n, result["gather"], result["scatter"]
    if all(isinstance(way["out"], Tensor) for way in (gather, scatter)):
        longer = (len(gather["out"]) * n, len(scatter["out"])) == (length, cases.POSITIONS * n)
        if longer:
            text = "the first makes a sequence shorter and the second makes it longer; the first takes the place of f"
            return Fault("swapped", f"{text}: it joins what the ranks hold. Return them the other way round")
    own = cases.sequence_of(rank, "gradient of the whole", cases.POSITIONS).split(length)[rank]
    all_own = total([cases.sequence_of(r, "gradient of the whole", cases.POSITIONS) for r in range(n)])
    if gather["went"] and same(gather["grad"], own):
        text = f"rank {rank}: backward of the first keeps the own positions of this rank's gradient, without a sum"
        text += ": the other ranks worked with these positions too; sum over ranks, then keep the own"
        return Fault("not summed back", text)
    if gather["went"] and same(gather["grad"], all_own.split(length)[rank] / n):
        text = f"rank {rank}: backward of the first gives the mean over ranks"
        return Fault("mean not sum", f"{text}; each rank has a part of one gradient, and parts are added up")
    if same(scatter["out"], cases.sequence_of(rank, "partial", cases.POSITIONS).split(length)[rank]):
        text = f"rank {rank}: the second keeps its positions of its own partial result; the output is the ranks' sum"
        return Fault("not summed", text)
    partial = cases.sequence_of(rank, "gradient of the part", length)
    alone = torch.zeros(cases.POSITIONS, *partial.shape[1:], dtype=partial.dtype)
    alone[rank * length : (rank + 1) * length] = partial
    if scatter["went"] and same(scatter["grad"], alone):
        text = f"rank {rank}: backward of the second has zeros for the others' positions: every rank's part of the"
        return Fault("not joined back", f"{text} work made all positions, so it needs all gradients; all-gather them")
    every = torch.cat([cases.sequence_of(r, "gradient of the part", length) for r in range(n)])
    if scatter["went"] and is_times(scatter["grad"], every, n):
        text = f"rank {rank}: backward of the second gives {n} times the gradient: joined on every rank, and added up"
        return Fault("gradient t times", f"{text} as well")
    return None


def budget_sequence(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "f and g with all-reduces")]
