"""agree is silent when equal, and says the same words on every rank when not; what fails on one rank fails on all."""

import pytest
import torch.distributed as dist

from distlab.comm import RankError, Ranks, agree, recorded
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


@pytest.mark.parametrize(
    "value", [3, "text", None, [1, [2.5, True]], {"b": 1, "a": [None, "ä"]}, (1, 2), "", "!", float("nan")]
)
def test_equal_values_agree(ranks, value):
    assert ranks(3).run(words, [value] * 3) == [""] * 3


def test_order_of_keys_does_not_matter(ranks):
    assert ranks(2).run(words, [{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [""] * 2


def test_different_values_are_named_on_every_rank(ranks):
    expected = "ranks disagree on bucket sizes: ranks 0, 2 have [25, 1]; rank 1 has [25]. Pass the same on every rank"
    assert ranks(3).run(words, [[25, 1], [25], [25, 1]]) == [expected] * 3


def test_the_place_of_the_difference_is_named_in_long_values(ranks):
    long = {"layers": [{"width": 64, "name": "x" * 40} for _ in range(50)]}
    other = {"layers": [*long["layers"][:30], {"width": 65, "name": "x" * 40}, *long["layers"][31:]]}
    said = ranks(2).run(words, [long, other])
    assert (
        said
        == [
            'ranks disagree on bucket sizes at ["layers"][30]["width"]: rank 0 has 64; rank 1 has 65. '
            "Pass the same on every rank"
        ]
        * 2
    )


def test_keys_that_only_one_rank_has_and_awkward_names(ranks):
    filler = "x" * 400
    first, second = {"a][b": {'k"': 1}, "f": filler}, {"a][b": {'k"': 1, "new": [1]}, "f": filler}
    said = ranks(2).run(words, [first, second])
    assert said[0] == said[1]
    longer = ranks(2).run(words, [[filler], [filler, 2]])
    assert "at [1]: rank 0 has nothing there; rank 1 has 2" in longer[0]
    assert 'at ["a][b"]["new"]: rank 0 has nothing there; rank 1 has [1]' in said[0]


def test_a_value_that_json_cannot_hold_is_refused_on_every_rank(ranks):
    for values in ([1, {1, 2}, 1], [{1, 2}] * 3):
        said = ranks(3).run(words, values)
        assert len(set(said)) == 1
        assert "cannot be compared (Object of type set is not JSON serializable)" in said[0]
        assert "bucket sizes on rank" in said[0]


def test_a_group_names_its_global_ranks(ranks):
    said = ranks(4).run(words, [0, 1, 0, 2], [1, 3])
    assert said[0] == said[2] == ""
    assert (
        said[1]
        == said[3]
        == ("ranks disagree on bucket sizes: rank 1 has 1; rank 3 has 2. Pass the same on every rank")
    )


def cost(values: list) -> tuple[tuple[str, ...], int]:
    with recorded() as seen:
        words(values)
    rank = dist.get_rank()
    return seen.records.ops(rank), seen.records.payload_bytes(rank)


def test_cost_is_one_gather_of_40_bytes_when_equal_and_two_when_not(ranks):
    big = "x" * 10_000
    assert ranks(2).run(cost, [big, big]) == [(("all_gather",), 40)] * 2
    assert ranks(2).run(cost, [big, big + "y"]) == [(("all_gather",) * 2, 40 + len(big) + 3)] * 2


def test_an_uncaught_disagreement_is_told_as_every_rank_s_error():
    with Ranks(2, echo=False) as pool, pytest.raises(RankError, match="ranks disagree on shape: rank 0 has 0; rank 1"):
        pool.run(lambda: agree(dist.get_rank(), what="shape"))


def outcomes():
    rank = dist.get_rank()
    results = together(lambda: rank * 10, what="count")

    def fail(kind, *ranks):
        def action():
            if rank in ranks:
                raise kind("it is broken")
            return rank

        return action

    texts = {}
    for name, kind, ranks, raised in (
        ("one", ValueError, (1,), ValueError),
        ("two", ValueError, (0, 2), ValueError),
        ("world", OSError, (2,), RuntimeError),
        ("other", RuntimeError, (0,), LookupError),
        ("key", KeyError, (1,), RuntimeError),
        ("end", EOFError, (2,), RuntimeError),
    ):
        failure = {} if raised is not LookupError else {"failure": LookupError}
        with pytest.raises(raised) as caught:
            together(fail(kind, *ranks), what="start", **failure)
        texts[name] = caught.value.args[0]
    group = dist.new_group([1, 2])
    if rank:
        with pytest.raises(ValueError, match="cannot start: rank 2: it is broken"):  # the global rank, not the group's
            together(fail(ValueError, 2), group, what="start")
    return results, texts


def test_a_failure_on_one_rank_is_raised_on_all(ranks):
    for results, texts in ranks(3).run(outcomes):
        assert results == [0, 10, 20]
        assert texts == {
            "one": "cannot start: rank 1: it is broken",
            "two": "cannot start: rank 0, 2: it is broken",
            "world": "cannot start: rank 2: it is broken",
            "other": "cannot start: rank 0: it is broken",
            "key": "cannot start: rank 1: KeyError: 'it is broken'",
            "end": "cannot start: rank 2: EOFError: it is broken",
        }


def test_one_process_alone_needs_no_group():
    assert place_in(None) == (0, 1)
    assert together(lambda: 3, what="count") == [3]
    with pytest.raises(ValueError, match="cannot count: rank 0: invalid literal"):
        together(lambda: int("no"), what="count")
