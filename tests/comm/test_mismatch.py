"""Calls that do not fit are told before results are handed out, also when they end at once with a wrong number."""

import re

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks


def halves(rank):
    x = torch.ones(4, dtype=torch.float16 if rank == 0 else torch.bfloat16)
    dist.all_reduce(x)
    return x


def reductions_of_a_reduce(rank):
    x = torch.ones(4)
    dist.reduce(x, 0, dist.ReduceOp.PRODUCT if rank == 0 else dist.ReduceOp.SUM)
    return x


def order(rank):
    a, b = torch.ones(2, 3), torch.ones(6)
    for x in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(x)
    return a


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (halves, r"float16\[4\].*bfloat16\[4\]"),
        (reductions_of_a_reduce, r"float32\[4\], product, group .*float32\[4\], group"),
        (order, r"float32\[2, 3\].*float32\[6\]"),
    ],
)
def test_a_mismatch_that_ends_at_once_is_told(fn, says):
    with (
        Ranks(2, timeout_s=60) as ranks,
        pytest.raises(RankError, match=f"(?s)ranks of group .* do not make the same call.*{says}") as caught,
    ):
        ranks.run(lambda: fn(dist.get_rank()))
    assert "test_mismatch.py:" in str(caught.value)


def test_what_fits_passes():
    def fits(again):
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.ones(4)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            dist.all_reduce(x, op) if rank else dist.all_reduce(x, op=op)  # by place and by name
        splits = [[1, 2], [3, 4]]  # row r: what rank r sends to each
        dist.all_to_all_single(
            torch.empty(splits[0][rank] + splits[1][rank]),
            torch.ones(sum(splits[rank])),
            output_split_sizes=[row[rank] for row in splits],
            input_split_sizes=splits[rank],
        )
        for turn in range(size):  # ranks take turns in two lines of code
            if turn == rank:
                dist.broadcast(x, src=turn)
            else:
                dist.broadcast(torch.empty(4), src=turn)
        gathered = [None] * size
        dist.all_gather_object(gathered, "a" * (1 + 30 * rank))
        return x[0].item() + again

    with Ranks(2, timeout_s=60) as ranks:
        for again in range(2):
            assert ranks.run(fits, again) == [2.0 + again] * 2


def test_a_rank_that_the_group_lacks_is_refused():
    def past_the_end():
        if dist.get_rank() == 1:
            dist.send(torch.ones(2), dst=2)

    with (
        Ranks(2, timeout_s=60) as ranks,
        pytest.raises(RankError, match=r"send at .*test_mismatch.py:\d+ names rank 2: there is no such rank"),
    ):
        ranks.run(past_the_end)


def test_a_message_to_oneself_is_refused_with_the_line():
    def sends():
        group = dist.new_group([1, 0])
        if dist.get_rank() == 1:
            dist.isend(torch.ones(2), 1, group=group)

    def receives():
        if dist.get_rank() == 1:
            dist.irecv(torch.ones(2), 1).wait()

    def fits():
        x = torch.full((2,), float(dist.get_rank()))
        for root in range(2):  # a root is its own peer
            dist.broadcast(x, src=root)
        return x[0].item()

    for fn, says in ((sends, "send at .* is to this rank itself"), (receives, "recv at .* is from this rank itself")):
        with Ranks(2, timeout_s=60) as ranks, pytest.raises(RankError, match=says) as caught:
            ranks.run(fn)
        assert re.search(r"rank 1: \w+ at .*test_mismatch.py:\d+ is .*keep the tensor", str(caught.value))
    with Ranks(2, timeout_s=60) as ranks:
        assert ranks.run(fits) == [0.0, 0.0]


def test_new_group_on_one_rank_is_named():
    def alone():
        if dist.get_rank() == 0:
            dist.new_group([0, 1])

    def in_a_circle():
        dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
        dist.barrier()

    for fn, says in ((alone, "rank 1 has returned without it"), (in_a_circle, "rank 1 has not called it")):
        with Ranks(2, timeout_s=60) as ranks, pytest.raises(RankError, match="deadlock: ") as caught:
            ranks.run(fn)
        number = 1 if fn is alone else 2
        words = rf"rank 0 waits in dist.new_group #{number} \[0, 1\] at .*test_mismatch.py:\d+: {says}"
        assert re.search(words, str(caught.value)), str(caught.value)
