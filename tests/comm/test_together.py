"""What fails on one rank fails on all, with one text that names the ranks."""

import pytest
import torch.distributed as dist

from distlab.comm.together import place_in, together


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
