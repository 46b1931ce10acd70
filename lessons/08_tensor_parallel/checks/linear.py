"""A rank's part of a linear layer, and of the fused layer of whole heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab_lesson_08.checks.shared import HIDDEN
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

CUT_CASES = (("column", 2), ("row", 2), ("column", 3), ("row", 4), ("column", 1), ("row", 1))
HEAD_CASES = ((4, 4, 2), (6, 2, 2), (12, 4, 4), (6, 3, 3), (4, 4, 1), (6, 6, 4), (4, 2, 4))  # heads, of keys, ranks
HEAD_SIZE = 2


def _cut_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    full = seeded(-1, 12, 24, purpose="linear"), seeded(-1, 12, purpose="linear bias")
    return {f"{kind}, {t} ranks": (*full, kind, t) for kind, t in CUT_CASES}


def use_cut(fn: Callable[..., Any], weight: Tensor, bias: Tensor, kind: str, num_ranks: int) -> dict[str, Any]:
    """Return every rank's part; a row layer's bias counts once, on whichever rank: None and zeros are none."""
    found, biases = dict[str, Any](), []
    memory = {whole.untyped_storage().data_ptr() for whole in (weight, bias)}
    for rank in range(num_ranks):
        got = fn(weight, bias, kind, num_ranks, rank)
        if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], Tensor):
            return {f"rank {rank}": got}
        (own, own_bias), parts = got, [part for part in got if isinstance(part, Tensor)]
        is_own = own.untyped_storage().nbytes() <= own.numel() * own.element_size()
        is_own &= memory.isdisjoint(part.untyped_storage().data_ptr() for part in parts)
        found[f"rank {rank}"] = {"weight": own, "weight and bias have memory of their own": is_own}
        if kind == "column":
            found[f"rank {rank}"]["bias"] = own_bias
        elif own_bias is not None and not (isinstance(own_bias, Tensor) and not own_bias.any()):
            biases.append(own_bias)
    return found if kind == "column" else found | {"number of ranks with a bias": len(biases), "biases": biases}


def _head_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    cases = {}
    for heads, shared, ranks in HEAD_CASES:
        weight = seeded(-1, (heads + 2 * shared) * HEAD_SIZE, HIDDEN, purpose=f"{heads} {shared}")
        for one in range(ranks):
            cases[f"{heads} heads, {shared} of keys and values, rank {one} of {ranks}"] = (
                weight,
                heads,
                shared,
                ranks,
                one,
            )
    return cases


def use_heads(
    fn: Callable[..., Any], weight: Tensor, num_heads: int, num_shared: int, num_ranks: int, rank: int
) -> Any:
    """Return the rows; where heads do not divide, how that was refused."""
    if num_heads % num_ranks == 0 and num_shared % num_ranks == 0:
        return fn(weight, num_heads, num_shared, num_ranks, rank)
    try:
        fn(weight, num_heads, num_shared, num_ranks, rank)
    except Exception as error:
        return type(error).__name__
    return "no error"


drive_cut = Cases(_cut_cases, use_cut)
drive_heads = Cases(_head_cases, use_heads)


def budget_cut(evidence: Evidence) -> list[str]:
    """Say what a rank holds."""
    return [f"{len(CUT_CASES)} cases; a rank holds 1/t of the weight, in memory of its own"]


def budget_heads(evidence: Evidence) -> list[str]:
    """Say what was asked."""
    refused = sum(bool(a % n or k % n) for a, k, n in HEAD_CASES)
    return [f"{len(HEAD_CASES) - refused} cases, grouped heads among them; {refused} refused: heads left over"]


_BIAS = "bias.clone() if rank == 0 else None"
_ONCE = "the ranks' results are added up, and so the bias counts more than once; return None on all ranks but one"
_SECTION, _SECTIONS = "section.chunk(num_ranks)[rank]", "for section in sections]"
_JOINED = f"torch.cat([{_SECTION} {_SECTIONS})"

WRONG_CUT = (
    Mutant(
        "turned",
        "column and row swapped",
        "torch keeps [output features, input features]: a column of the papers' X A is a row of `weight`",
    )
    .edit("(num_ranks, 0)", "(num_ranks, -1)")
    .edit("(num_ranks, 1)", "(num_ranks, 0)"),
    Mutant("bias everywhere", "bias on every rank", _ONCE, 1, 34).without(" if rank == 0 else None"),
    Mutant("two have the bias", "bias on two ranks", _ONCE, 1, 34).edit("if rank == 0", "if rank < 2"),
    Mutant("bias in parts", "bias cut", "a row layer's ranks make all output features: one adds it whole").edit(
        _BIAS, "bias.chunk(num_ranks)[rank].clone()"
    ),
    Mutant(
        "bias shared",
        "bias divided",
        "the bias is divided: each part gets the whole gradient, so that it learns t times as fast; one rank has it "
        "whole",
    ).edit(_BIAS, "bias / num_ranks"),
    Mutant("bias nowhere", "bias nowhere", "no rank has the bias: one rank, such as rank 0, has all of it").edit(
        _BIAS, "None"
    ),
    Mutant("bias not cut", "bias not cut", "a column layer's bias is whole: cut it as the weight's dim 0").edit(
        "bias.chunk(num_ranks)[rank].clone()", "bias.clone()"
    ),
    Mutant("views", "a view of the whole", "a view keeps the whole tensor in memory; clone it").edit(
        ".clone()", "", times=4
    ),
    Mutant(
        "full layer",
        "whole layer",
        "a full layer has taken the place of its part: all ranks hold and compute all of it",
        1,
        38,
    ).body("return weight.clone(), bias.clone()"),
    Mutant("wrong part", "wrong part", "a rank has the part of a different rank: chunk(t)[rank]").edit(
        "(num_ranks, 0)[rank]", "(num_ranks, 0)[-1 - rank]"
    ),
    Mutant("every other", "dealt out", "features are dealt out one by one: rank r has the r-th piece, chunk(t)[rank]")
    .edit("weight.chunk(num_ranks, 0)[rank]", "weight[rank::num_ranks]")
    .edit("bias.chunk(num_ranks)[rank]", "bias[rank::num_ranks]")
    .edit("weight.chunk(num_ranks, 1)[rank]", "weight[:, rank::num_ranks]"),
    Mutant("float64 written down", "dtype", "take the dtype from the argument").edit(
        'if kind == "column":', 'weight, bias = weight.double(), bias.double()\nif kind == "column":'
    ),
)
WRONG_HEADS = (
    Mutant(
        "one piece",
        "cut as one piece",
        "the rows are cut as one piece: rank 0 gets queries and no values, and training goes on, with a worse loss; "
        "cut "
        "queries, keys and values",
        1,
        36,
    ).edit(_JOINED, "weight.chunk(num_ranks)[rank]"),
    Mutant("all keys", "keys not shared out", "it has all keys and values: share them out like the queries").edit(
        _JOINED, "torch.cat([sections[0].chunk(num_ranks)[rank], *sections[1:]])"
    ),
    Mutant(
        "dealt out",
        "heads dealt out",
        "heads are dealt out one by one; rank r has heads r A/t to (r+1) A/t, as the output layer's columns have",
    ).edit(_SECTION, "section.view(-1, size, weight.shape[1])[rank::num_ranks].flatten(0, 1)"),
    Mutant("rounded down", "no error", "the heads do not divide: raise ValueError, on every rank alike")
    .edit("if num_heads % num_ranks or num_shared % num_ranks:", "if False:")
    .edit(_SECTION, "section[: len(section) // size // num_ranks * size * num_ranks].chunk(num_ranks)[rank]"),
    Mutant("keys not looked at", "no error", "keys and values do not divide: raise ValueError there too").edit(
        "if num_heads % num_ranks or num_shared % num_ranks:", "if num_heads % num_ranks:"
    ),
    Mutant(
        "thirds", "equal sections", "the sections are not equal, for keys have fewer heads: [A d, K d, K d]", 1, 36
    ).edit("weight.split([num_heads * size, num_shared * size, num_shared * size])", "weight.chunk(3)"),
    Mutant("rows dealt out", "heads cut through", "rows are dealt out one by one: a head's belong together").edit(
        _SECTION, "section[rank::num_ranks]"
    ),
    Mutant("values first", "order of rows", "the order is wrong: queries, then keys, then values").edit(
        _SECTIONS, "for section in sections[::-1]]"
    ),
    Mutant("an assertion", "no clear error", "where heads do not divide a ValueError is asked").edit(
        "raise ValueError(", "raise AssertionError("
    ),
    Mutant("rank 0's", "values", "in the place of").edit("(num_ranks)[rank]", "(num_ranks)[0]"),
    Mutant("heads of two rows", "raised", "split").edit("len(weight) // (num_heads + 2 * num_shared)", "2"),
    Mutant("size", "size", "a head has len(weight) // (A + 2 K) rows: keys and values have K heads", 1)
    .edit("(num_heads + 2 * num_shared)", "(3 * num_heads)")
    .edit(
        "weight.split([num_heads * size, num_shared * size, num_shared * size])",
        "weight.tensor_split([num_heads * size, (num_heads + num_shared) * size])",
    ),
    Mutant("two pieces", "two pieces", "keys and values are cut as one piece: rank 0 has keys and no values", 1).edit(
        "num_shared * size, num_shared * size]", "2 * num_shared * size]"
    ),
)
