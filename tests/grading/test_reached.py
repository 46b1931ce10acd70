"""Whose numbers reached whom is read from the recorded calls, and what never came is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distlab.comm import Ranks
from distlab.grading import Evidence, load_lesson
from distlab.grading.causes.reached import flow, not_reached
from distlab.grading.check import examine


def chain(rank_from: int) -> None:
    """Hand a number from rank to rank, from `rank_from` on."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    number = torch.ones(1)
    if rank > rank_from:
        dist.recv(number, rank - 1)
    if rank_from <= rank < last:
        dist.send(number, rank + 1)


def from_the_last() -> None:
    dist.broadcast(torch.ones(1), dist.get_world_size() - 1)


def only_a_barrier() -> None:
    dist.barrier()


@pytest.mark.parametrize(
    ("program", "pairs"),
    [
        (lambda: chain(0), {(0, 1), (0, 2), (1, 2)}),
        (from_the_last, {(2, 0), (2, 1)}),
        (lambda: dist.all_reduce(torch.ones(1)), {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}),
        (lambda: dist.reduce(torch.ones(1), 1), {(0, 1), (2, 1)}),
        (only_a_barrier, set()),
    ],
    ids=["chain", "broadcast", "all_reduce", "reduce", "barrier"],
)
def test_numbers_flow_where_calls_bring_them(program, pairs: set[tuple[int, int]]) -> None:
    with Ranks(3, record=True, timeout_s=60) as ranks:
        results = ranks.run(program)
        assert flow(Evidence(3, results, ranks.records())) == pairs


def test_what_never_came_is_named() -> None:
    whole, some = frozenset({(0, 1), (2, 0), (2, 1)}), frozenset({(0, 1), (2, 1)})
    words = not_reached(some, whole, [0, 1], 8)
    assert "in 8 drawn calls nothing went from rank 2 to rank 0, directly or through others" in words
    assert not_reached(whole, whole, [0, 1], 8) == ""
    assert not_reached(some, whole, [1], 8) == ""


def forward_all(stage, inputs, num_microbatches, like):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    outputs, leaving = [], []
    for i in range(num_microbatches):
        x = inputs[i] if rank == 0 else torch.empty_like(like)
        if rank > 0:
            dist.recv(x, rank - 1)
        y = stage(x).detach()
        if rank < last:
            leaving.append(dist.isend(y, rank + 1))
        outputs.append(y if rank == last else torch.zeros_like(like) + i)
    for work in leaving:
        work.wait()
    return outputs


def test_outputs_that_never_come_back_are_told_so() -> None:
    report = examine(load_lesson("09.repair").exercise("09.repair"), forward_all, worlds=(2,), seed=3)
    assert report.verdict == "wrong"
    assert "nothing went from rank 1 to rank 0, directly or through others" in report.message
