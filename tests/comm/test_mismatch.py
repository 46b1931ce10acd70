"""Calls that do not fit, or are exchanged, are told before results are handed out; what is meant is left alone."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks
from distlab.comm.record.matching import place_of


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


def test_what_fits_passes(ranks):
    for again in range(2):
        assert ranks(2).run(fits, again) == [2.0 + again] * 2


def a_reduction_that_ends_at_once(rank):
    dist.reduce(torch.ones(4), 0, dist.ReduceOp.SUM if rank else dist.ReduceOp.PRODUCT)


def past_the_end(rank):
    if rank == 1:
        dist.send(torch.ones(2), dst=2)


HERE = r"at .*test_mismatch.py:\d+"
TOLD = {
    a_reduction_that_ends_at_once: rf"not make the same call(?s:.*)float32\[4\], product, .*{HERE}.*\n.*32\[4\], g",
    past_the_end: rf"send {HERE} names rank 2: there is no such rank",
}


@pytest.mark.parametrize("fn", TOLD)
def test_what_does_not_fit_is_told_with_its_line(fn):
    with Ranks(2, timeout_s=200) as ranks, pytest.raises(RankError) as caught:
        ranks.run(lambda: fn(dist.get_rank()))
    assert re.search(TOLD[fn], str(caught.value)), str(caught.value)


GIVES = [[1, 0, 3], [2, 2, 2], [0, 0, 1]]  # row i: rows that rank i gives to each


def exchange(gives, rank, width):
    mine, takes = gives[rank], [row[rank] for row in GIVES]
    output, source = torch.empty(sum(takes), width), torch.ones(sum(mine), width)
    dist.all_to_all_single(output, source, takes, mine)


def test_uneven_amounts_are_told_in_elements_where_they_do_not_fit():
    with Ranks(3, timeout_s=200, backend="gloo") as ranks, pytest.raises(RankError) as told:
        ranks.run(lambda: exchange([[1, 0, 2], *GIVES[1:]], dist.get_rank(), 4))
    text = str(told.value)
    assert "rank 0 gives rank 2 8 elements, and rank 2 takes 12 from it" in text
    assert "rank 0: all_to_all #1 (float32[3, 4], gives [4, 0, 8], takes [4, 8, 0], group [0, 1, 2]) at" in text
    assert text.count("test_mismatch.py:") >= 3


def take_turns(rank):
    """Each rank adds its own in turn, and the others nothing."""
    for turn in range(dist.get_world_size()):
        if turn == rank:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_reduce(torch.zeros(4))


def wait_in_turn(rank):
    """A barrier carries nothing that could be exchanged."""
    for phase in (first_barrier, second_barrier) if rank else (second_barrier, first_barrier):
        phase()


def first_barrier():
    dist.barrier()


def second_barrier():
    dist.barrier()


def own_lines(rank):
    """The same order, from lines of its own on one rank."""
    a, b = torch.ones(4), torch.ones(4)
    if rank == 0:
        dist.all_reduce(a)
        dist.all_reduce(b)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)


SEND = """
def send(counts, *gradient):
    for _ in range(counts[0]):
        dist.all_reduce(torch.ones(4))
"""


def in_backward_or_after(rank):
    """The hooks are a package's, so the user's lines are those of backward and of what sends the rest."""
    package = {"dist": dist, "torch": torch}
    exec(compile(SEND, str(Path(torch.__file__).parent / "hooks.py"), "exec"), package)
    x, counts = torch.ones(4, requires_grad=True), [0]
    x.register_hook(partial(package["send"], counts))
    for step in range(4):
        counts[0] = 2 if step % 2 == rank % 2 else 1
        x.sum().backward()
        package["send"]([2 - counts[0]])


NO_EXCHANGE = [take_turns, wait_in_turn, own_lines, in_backward_or_after]


def test_ranks_may_reach_a_call_from_different_lines(ranks):
    for fn in NO_EXCHANGE:
        ranks(3).run(lambda fn=fn: fn(dist.get_rank()))


def turned_round(rank):
    for call in (sum_b, sum_a) if rank == 1 else (sum_a, sum_b):
        call(torch.ones(4))


def sum_a(x):
    dist.all_reduce(x)


def sum_b(x):
    dist.all_reduce(x)


def in_a_group(rank):
    group = dist.new_group([0, 2])
    if rank != 1:
        for call in (sum_in, add_in) if rank else (add_in, sum_in):
            call(group)


def sum_in(group):
    dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()


def add_in(group):
    dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.parametrize(("fn", "numbers"), [(turned_round, "#1 and #2"), (in_a_group, "#1 and #2")])
def test_an_exchange_is_told_before_results_are_handed_out(fn, numbers):
    with (
        Ranks(3, timeout_s=200) as ranks,
        pytest.raises(RankError, match=f"in a different order, calls {numbers}:") as told,
    ):
        ranks.run(lambda: fn(dist.get_rank()))
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce #1 (float32[4], group" in str(told.value)
    assert str(told.value).count("test_mismatch.py:") >= 4


def test_where_the_lines_above_leave_a_doubt_no_place_is_known(tmp_path):
    source = 'class A:\n    def f(\n        self\n    ):\n        go(1)\n        """\ntext\n"""\n        go(2)\n'
    source += "if x: go(3)\n"
    (tmp_path / "a.py").write_text(source)
    known, after_text, in_a_branch = (place_of(f"{tmp_path / 'a.py'}:{line}") for line in (5, 9, 10))
    assert (known.function[1], known.text, known.is_inner) == (2, "go(1)", True)
    assert after_text is in_a_branch is place_of("?:0") is None
