"""agree is silent when equal, and says the same words on every rank when not; what fails on one rank fails on all."""

import re

import pytest
import torch.distributed as dist

from distlab.comm import agree, recorded
from distlab.comm.together import place_in, together


def words(values: list, group_ranks: list[int] | None = None) -> str:
    """What agree says on this rank; "" when it is content."""
    group = dist.new_group(group_ranks) if group_ranks is not None else None
    if group_ranks is not None and dist.get_rank() not in group_ranks:
        return ""
    try:
        agree(values[dist.get_rank()], group, what="bucket sizes")
    except ValueError as error:
        return str(error)
    return ""


EQUAL = [3, None, [1, [2.5, True]], {"b": 1, "a": [None, "ä"]}, (1, 2), "", "!", float("nan")]
LONG = {"layers": [{"width": 64, "name": "x" * 40} for _ in range(50)]}
OTHER = {"layers": [*LONG["layers"][:30], {"width": 65, "name": "x" * 40}, *LONG["layers"][31:]]}
DIFFERENT = (
    ([[25, 1], [25], [25, 1]], r"ranks 0, 2 have \[25, 1\]; rank 1 has \[25\]"),
    ([LONG, OTHER, LONG], r'ranks 0, 2 have \.\.\..*"width": 64.*\.\.\.; rank 1 has .*"width": 65'),
    (["x" * 400, "x" * 400, "x" * 400 + "y"], r'ranks 0, 1 have \.\.\.x*"\.\.\.; rank 2 has \.\.\.x*y"'),
)


def test_equal_values_agree_and_different_ones_are_named_on_every_rank(ranks):
    said = ranks(3).run(all_words, [[value] * 3 for value in EQUAL] + [[{"a": 1, "b": 2}, {"b": 2, "a": 1}] * 2])
    assert said == [[""] * (len(EQUAL) + 1)] * 3
    told, *others = ranks(3).run(all_words, [values for values, _ in DIFFERENT])
    assert others == [told] * 2
    for text, (_, rule) in zip(told, DIFFERENT, strict=True):
        assert re.search(f"ranks disagree on bucket sizes: {rule}", text), text
        assert text.endswith(". Pass the same on every rank")
        assert len(text) < 800


def all_words(cases: list) -> list[str]:
    return [words(values) for values in cases]


def test_a_value_that_json_cannot_hold_is_refused_on_every_rank(ranks):
    for said in zip(*ranks(3).run(all_words, [[1, {1, 2}, 1], [{1, 2}] * 3]), strict=True):
        assert len(set(said)) == 1
        assert "cannot be compared (Object of type set is not JSON serializable)" in said[0]
        assert "bucket sizes on rank" in said[0]


def test_a_group_names_its_global_ranks(ranks):
    told = "ranks disagree on bucket sizes: rank 1 has 1; rank 3 has 2. Pass the same on every rank"
    assert ranks(4).run(words, [0, 1, 0, 2], [1, 3]) == ["", told, "", told]


def cost(values: list) -> tuple[tuple[str, ...], int]:
    with recorded() as seen:
        words(values)
    rank = dist.get_rank()
    return seen.records.ops(rank), seen.records.payload_bytes(rank)


def test_cost_is_one_gather_of_40_bytes_when_equal_and_two_when_not(ranks):
    big = "x" * 10_000
    assert ranks(2).run(cost, [big, big]) == [(("all_gather",), 40)] * 2
    assert ranks(2).run(cost, [big, big + "y"]) == [(("all_gather",) * 2, 40 + len(big) + 3)] * 2


FAILURES = [  # the exception, on which ranks; what every rank raises
    (ValueError, (1,), ValueError, "cannot start: rank 1: it is broken"),
    (ValueError, (0, 2), ValueError, "cannot start: rank 0, 2: it is broken"),
    (OSError, (2,), RuntimeError, "cannot start: rank 2: it is broken"),
    (RuntimeError, (0,), LookupError, "cannot start: rank 0: it is broken"),
    (KeyError, (1,), RuntimeError, "cannot start: rank 1: KeyError: 'it is broken'"),
]


@pytest.mark.on_ranks(3)
def test_a_failure_on_one_rank_is_raised_on_all():
    rank = dist.get_rank()

    def fail(kind, *ranks):
        def action():
            if rank in ranks:
                raise kind("it is broken")
            return rank

        return action

    for kind, ranks, raised, text in FAILURES:
        with pytest.raises(raised) as caught:
            together(fail(kind, *ranks), what="start", failure=LookupError if raised is LookupError else RuntimeError)
        assert caught.value.args[0] == text
    group = dist.new_group([1, 2])
    if rank:
        with pytest.raises(ValueError, match="cannot start: rank 2: it is broken"):  # the global rank, not the group's
            together(fail(ValueError, 2), group, what="start")
    assert together(lambda: rank * 10, what="count") == [0, 10, 20]


def test_one_process_alone_needs_no_group():
    assert (place_in(None), together(lambda: 3, what="count")) == ((0, 1), [3])
