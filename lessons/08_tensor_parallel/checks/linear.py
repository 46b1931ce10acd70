"""A rank's part of a linear layer, and of the fused layer of whole heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from distlab_lesson_08.checks.shared import DOUBLE, HIDDEN, plain
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant, NotYet
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.traffic import in_megabytes
from distlab.grading.diagnosis.values import compare, describe, same, seeded

CUT_CASES = (("column", 2), ("row", 2), ("column", 3), ("row", 4), ("column", 1), ("row", 1))
HEAD_CASES = ((4, 4, 2), (6, 2, 2), (12, 4, 4), (6, 3, 3), (4, 4, 1), (6, 6, 4), (4, 2, 4))  # heads, of keys, ranks
HEAD_SIZE = 2


def full_linear() -> tuple[Tensor, Tensor]:
    """Return weight and bias of a full layer; both dims can be cut by 2, 3 and 4."""
    return seeded(-1, 12, 24, purpose="linear"), seeded(-1, 12, purpose="linear bias")


def drive_cut(fn: Callable[..., Any]) -> list[list[Any]]:
    """Cut a layer for every rank of each case; say also how much memory stands behind a part."""
    weight, bias = full_linear()
    rows = []
    for kind, num_ranks in CUT_CASES:
        parts = [fn(weight, bias, kind, num_ranks, rank) for rank in range(num_ranks)]
        firsts = [got[0] if isinstance(got, tuple | list) and got else None for got in parts]
        held = [first.untyped_storage().nbytes() if isinstance(first, Tensor) else 0 for first in firsts]
        rows.append([(_copied(got), num_bytes) for got, num_bytes in zip(parts, held, strict=True)])
    return rows


def _copied(got: Any) -> Any:
    return tuple(plain(value) for value in got) if isinstance(got, tuple | list) else got


def judge_cut(evidence: Evidence) -> Iterator[Fault]:
    """Each rank's part of a column and of a row layer, the bias once, nothing whole behind it."""
    full = full_linear()[0]
    for (kind, n), row in zip(CUT_CASES, evidence.results[0], strict=True):
        own_bytes = DOUBLE * full.numel() // n
        for rank, (got, held) in enumerate(row):
            yield from _judge_cut(got, kind, n, rank)
            if n > 1 and held > own_bytes:
                text = (
                    f"right values, but behind the weight of {kind} rank {rank} of {n} lie {in_megabytes(held)}, where"
                )
                text += f" its part has {in_megabytes(own_bytes)}: a view keeps the whole tensor in memory; clone it"
                yield Fault("a view of the whole", text)
        yield from _judge_biases([got[1] for got, _ in row], kind, n)


def _judge_cut(got: Any, kind: str, n: int, rank: int) -> Iterator[Fault]:
    what = f"{kind}, {n} rank{'s' * (n > 1)}, rank {rank}"
    if not isinstance(got, tuple | list) or len(got) != 2:
        yield Fault("returned", f"{what}: expected (weight, bias), got {describe(got)}")
    weight, full = got[0], full_linear()[0]
    dim = ("column", "row").index(kind)
    if n > 1 and same(weight, full):
        text = f"{what} keeps the whole weight: a full layer has taken the place of its part, and {n} ranks hold and"
        yield Fault("whole layer", f"{text} compute all of it {n} times")
    if n > 1 and same(weight, full.chunk(n, 1 - dim)[rank]):
        text = f"{what}: the weight was cut along dim {1 - dim}. torch keeps [output features, input features]:"
        yield Fault("column and row swapped", f"{text} a column of the papers' X A is a row of `weight`")
    for place in range(n):
        if place != rank and same(weight, full.chunk(n, dim)[place]):
            yield Fault("wrong part", f"{what} has the part of rank {place}")
    yield from found(compare(weight, full.chunk(n, dim)[rank], f"{what}: weight", n))


def _judge_biases(biases: Sequence[Any], kind: str, n: int) -> Iterator[Fault]:
    """A column layer's bias is cut; a row layer's counts once, on whichever rank."""
    full = full_linear()[1]
    whole = [rank for rank, bias in enumerate(biases) if same(bias, full)]
    if kind == "row" and len(whole) > 1:
        text = f"row, {n} ranks: ranks {' and '.join(map(str, whole))} add the bias: the results of {n} ranks are added"
        text = f"{text} up, and so the bias counts {len(whole)} times"
        yield Fault("bias on every rank", f"{text}; return None on all ranks but one, such as rank 0")
    for rank, bias in enumerate(biases):
        what = f"{kind}, {n} rank{'s' * (n > 1)}, rank {rank}"
        if kind == "column":
            yield from _judge_column_bias(bias, full, n, rank, what)
        elif rank not in whole and bias is not None and not (isinstance(bias, Tensor) and not bias.any()):
            yield from _judge_row_bias(bias, full, n, rank, what)
    if kind == "row" and not whole:
        text = f"row, {n} rank{'s' * (n > 1)}: no rank has the bias, so the layer has none"
        yield Fault("bias nowhere", f"{text}; one rank, such as rank 0, has all {len(full)} numbers of it")


def _judge_column_bias(bias: Any, full: Tensor, n: int, rank: int, what: str) -> Iterator[Fault]:
    want = full.chunk(n)[rank]
    if n > 1 and same(bias, full):
        text = f"{what} has all {len(full)} numbers of the bias for {len(want)} output features"
        yield Fault("bias not cut", f"{text}; cut it as the weight's dim 0")
    yield from found(compare(bias, want, f"{what}: bias", n))


def _judge_row_bias(bias: Any, full: Tensor, n: int, rank: int, what: str) -> Iterator[Fault]:
    """Say what is wrong with a row layer's bias that is neither whole nor nothing."""
    if n > 1 and same(bias, full / n):
        text = f"{what} has the bias divided by {n}: the sum of all is right now, but each rank's gets the whole"
        yield Fault(
            "bias divided", f"{text} gradient, so that the bias learns {n} times as fast. One rank has it whole"
        )
    if n > 1 and same(bias, full.chunk(n)[rank]):
        text = f"{what} has a part of the bias; a row layer's ranks make all {len(full)} output features"
        yield Fault("bias cut", f"{text}: one rank adds it whole, the others nothing")
    yield from found(compare(bias, full, f"{what}: bias", n))


def budget_cut(evidence: Evidence) -> list[str]:
    """Say what a rank holds."""
    return [f"{len(CUT_CASES)} cases; a rank holds 1/t of the weight, in memory of its own"]


def head_weight(num_heads: int, num_shared: int) -> Tensor:
    """Return the rows of query, key and value."""
    return seeded(-1, (num_heads + 2 * num_shared) * HEAD_SIZE, HIDDEN, purpose=f"{num_heads} {num_shared}")


def drive_heads(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for every rank's heads in each case; an error is written down as its type and text."""
    rows = []
    for num_heads, num_shared, num_ranks in HEAD_CASES:
        row = []
        for rank in range(num_ranks):
            try:
                row.append(plain(fn(head_weight(num_heads, num_shared), num_heads, num_shared, num_ranks, rank)))
            except NotYet:
                raise
            except Exception as error:
                row.append((type(error).__name__, str(error)))
        rows.append(row)
    return rows


def judge_heads(evidence: Evidence) -> Iterator[Fault]:
    """Each rank's queries, keys and values, of whole heads that belong together; an error where they do not divide."""
    for (num_heads, num_shared, n), row in zip(HEAD_CASES, evidence.results[0], strict=True):
        for rank, got in enumerate(row):
            what = f"{num_heads} heads, {num_shared} of keys and values, {n} rank{'s' * (n > 1)}: rank {rank}"
            if num_heads % n or num_shared % n:
                yield from _judge_error(got, what)
            elif isinstance(got, tuple):
                yield Fault("raised", f"{what}: {got[0]}: {got[1]}")
            else:
                yield from _judge_rows(got, (num_heads, num_shared, n, rank), what)


def _judge_error(got: Any, what: str) -> Iterator[Fault]:
    if not isinstance(got, tuple):
        text = f"{what}: the heads do not divide, and it returns {describe(got)}; ranks would have parts of heads"
        yield Fault("no error", f"{text}, or none. Raise ValueError, on every rank alike")
    elif got[0] != "ValueError":
        yield Fault("no clear error", f"{what}: the heads do not divide; expected a ValueError, got {got[0]}")


def _judge_rows(got: Any, case: tuple[int, int, int, int], what: str) -> Iterator[Fault]:
    num_heads, num_shared, n, rank = case
    weight = head_weight(num_heads, num_shared)
    sections = weight.split([num * HEAD_SIZE for num in (num_heads, num_shared, num_shared)])
    want = torch.cat([section.chunk(n)[rank] for section in sections])
    if fault := compare(got, want, f"{what}'s rows", n):
        known = _wrong_rows(weight, sections, n, rank) if n > 1 else ()
        if mistake := known_mistake(got, want, known, what):
            yield mistake
        if isinstance(got, Tensor) and same(got.sort(0).values, want.sort(0).values):
            text = f"{what} has its heads' rows in another order"
            yield Fault("order of rows", f"{text}; expected its queries, then its keys, then its values")
        if same(got, torch.cat([part.chunk(n)[rank] for part in weight.chunk(3)])):
            text = f"{what}: three equal sections were cut, but queries have {num_heads} heads and keys {num_shared}"
            yield Fault("equal sections", f"{text}: split by [A d, K d, K d]")
        yield fault


def _wrong_rows(weight: Tensor, sections: Sequence[Tensor], n: int, rank: int) -> Iterator[tuple[str, Tensor, str]]:
    """Known mistakes: the rows that each gives, and what to say."""
    text = f"has part {rank} of the rows cut as one piece: rank 0 gets queries and no values, and training goes on,"
    yield "cut as one piece", weight.chunk(n)[rank], f"{text} with a worse loss. Cut queries, keys, values"
    text = "has all keys and values: grouped heads are shared out like the queries that read them"
    yield "keys not shared out", torch.cat([sections[0].chunk(n)[rank], *sections[1:]]), text
    dealt = [part.view(-1, HEAD_SIZE, HIDDEN)[rank::n].flatten(0, 1) for part in sections]
    text = f"has every {n}. head; rank r has heads r A/t to (r+1) A/t, so that the output layer's columns and the"
    yield "heads dealt out", torch.cat(dealt), f"{text} grouped keys are its own"
    text = f"has every {n}. row: a head's {HEAD_SIZE} rows belong together"
    yield "heads cut through", torch.cat([part[rank::n] for part in sections]), text


def budget_heads(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    refused = sum(bool(a % n or k % n) for a, k, n in HEAD_CASES)
    return [f"{len(HEAD_CASES) - refused} cases, grouped heads among them; {refused} refused: heads left over"]


_SECTION = "section.chunk(num_ranks)[rank]"
_JOINED = f"torch.cat([{_SECTION} for section in sections])"

WRONG_CUTS = (
    Mutant("turned", "column and row swapped", "[output features, input features]", 1)
    .edit("(num_ranks, 0)", "(num_ranks, -1)")
    .edit("(num_ranks, 1)", "(num_ranks, 0)"),
    Mutant("bias everywhere", "bias on every rank", "counts 2 times", 1, 34).without(" if rank == 0 else None"),
    Mutant("bias in parts", "bias cut", "all 12 output features", 1).edit(
        "bias.clone() if rank == 0 else None", "bias.chunk(num_ranks)[rank].clone()"
    ),
    Mutant("bias shared", "bias divided", "learns 2 times as fast", 1).edit(
        "bias.clone() if rank == 0 else None", "bias / num_ranks"
    ),
    Mutant("views", "a view of the whole", "clone it", 1).edit(".clone()", "", times=4),
    Mutant("full layer", "whole layer", "taken the place of its part", 1, 38).body(
        "return weight.clone(), bias.clone()"
    ),
    Mutant("bias nowhere", "bias nowhere", "no rank has the bias", 1).edit(
        "bias.clone() if rank == 0 else None", "None"
    ),
    Mutant("two have the bias", "bias on every rank", "ranks 0 and 1 add the bias", 1, 34).edit(
        "if rank == 0 else None", "if rank < 2 else None"
    ),
)
WRONG_HEADS = (
    Mutant("one piece", "cut as one piece", "with a worse loss", 1, 36).edit(_JOINED, "weight.chunk(num_ranks)[rank]"),
    Mutant("all keys", "keys not shared out", "like the queries", 1).edit(
        _JOINED, "torch.cat([sections[0].chunk(num_ranks)[rank], *sections[1:]])"
    ),
    Mutant("dealt out", "heads dealt out", "every 2. head", 1).edit(
        _SECTION, "section.view(-1, size, weight.shape[1])[rank::num_ranks].flatten(0, 1)"
    ),
    Mutant("rounded down", "no error", "Raise ValueError", 1)
    .edit("if num_heads % num_ranks or num_shared % num_ranks:", "if False:")
    .edit(_SECTION, "section[: len(section) // size // num_ranks * size * num_ranks].chunk(num_ranks)[rank]"),
    Mutant("thirds", "equal sections", "[A d, K d, K d]", 1, 36).edit(
        "weight.split([num_heads * size, num_shared * size, num_shared * size])", "weight.chunk(3)"
    ),
    Mutant("rows dealt out", "heads cut through", "belong together", 1).edit(_SECTION, "section[rank::num_ranks]"),
    Mutant("values first", "order of rows", "its queries, then its keys", 1).edit(
        "for section in sections]", "for section in sections[::-1]]"
    ),
    Mutant("an assertion", "no clear error", "expected a ValueError", 1).edit(
        "raise ValueError(", "raise AssertionError("
    ),
)
