"""An all_to_all whose amounts do not fit is told with them, by rank and line; one that fits passes."""

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks
from distlab.comm.record.operations import splits_given, splits_of

GIVES = [[1, 0, 3], [2, 2, 2], [0, 0, 1]]  # row i: rows that rank i gives to each


def exchange(gives, rank, width):
    mine, takes = gives[rank], [row[rank] for row in GIVES]
    output, source = torch.empty(sum(takes), width), torch.ones(sum(mine), width)
    dist.all_to_all_single(output, source, takes, mine)


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_uneven_amounts_that_fit_pass(backend):
    def run(width):
        exchange(GIVES, dist.get_rank(), width)
        dist.all_to_all_single(torch.empty(3), torch.ones(3))  # even, by its shape

    with Ranks(3, timeout_s=60, backend=backend) as ranks:
        for width in (1, 4):
            ranks.run(run, width)


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_amounts_that_do_not_fit_are_told_in_elements(backend):
    def run():
        exchange([[1, 0, 2], *GIVES[1:]], dist.get_rank(), 4)

    with Ranks(3, timeout_s=60, backend=backend) as ranks, pytest.raises(RankError) as told:
        ranks.run(run)
    text = str(told.value)
    assert "rank 0 gives rank 2 8 elements, and rank 2 takes 12 from it" in text
    assert "rank 0: all_to_all #1 (float32[3, 4], gives [4, 0, 8], takes [4, 8, 0], group [0, 1, 2]) at" in text
    assert text.count("test_splits.py:") >= 3


def test_amounts_of_lists_and_of_even_parts():
    outputs, inputs = [torch.empty(1), torch.empty(2, 3)], [torch.empty(4), torch.empty(0)]
    assert splits_of(inputs, splits_given((outputs, inputs)), 2) == ((4, 0), (1, 6))
    output, source = torch.empty(4, 5), torch.empty(2, 5)
    for args in ((output, source, None, [], []), (output, source, [], [], None)):  # an operator's, a method's
        assert splits_of([source], splits_given(args), 2) == ((5, 5), (10, 10))
    uneven = (torch.empty(0, 5), torch.empty(3, 5), [0, 0], [1, 2], None)
    assert splits_of([uneven[1]], splits_given(uneven), 2) == ((5, 10), (0, 0))
