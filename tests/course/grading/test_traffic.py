"""Bytes, calls and steps are counted from what ranks really did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.collectives import ring_all_reduce
from distlab.comm import Ranks
from distlab.course.grading import Evidence
from distlab.course.grading.diagnosis.memory import peak_bytes
from distlab.course.grading.diagnosis.traffic import (
    calls,
    in_megabytes,
    native_collectives,
    num_calls,
    order,
    over_budget,
    sent_bytes,
    sent_line,
)

SIZE = 120  # float64: 960 bytes


def ring() -> None:
    ring_all_reduce(torch.ones(SIZE, dtype=torch.float64))


def native() -> None:
    dist.all_reduce(torch.ones(SIZE, dtype=torch.float64))
    dist.barrier()


def whole_to_next() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(SIZE, dtype=torch.float64)
    for _ in range(2):
        sending = dist.isend(tensor, (rank + 1) % n)
        dist.recv(torch.empty_like(tensor), (rank - 1) % n)
        assert sending is not None
        sending.wait()


def evidence_of(ranks: Callable[[int], Ranks], fn: Callable[[], Any], n: int) -> Evidence:
    pool = ranks(n)
    return Evidence(n, pool.run(fn), pool.records())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ring_sends_what_a_ring_needs(ranks: Callable[[int], Ranks], n: int) -> None:
    seen = evidence_of(ranks, ring, n)
    wanted = 2 * (n - 1) / n * SIZE * 8
    assert [sent_bytes(seen, rank) for rank in range(n)] == [wanted] * n
    assert native_collectives(seen) == ()
    assert over_budget(seen, wanted, "a ring") is None
    assert (
        sent_line(seen, wanted, "a ring") == f"sent {in_megabytes(wanted)} a rank (a ring needs {in_megabytes(wanted)})"
    )


def test_native_collectives_count_as_rings_and_are_named(ranks: Callable[[int], Ranks]) -> None:
    seen = evidence_of(ranks, native, 3)
    assert sent_bytes(seen, 1) == 2 * 2 / 3 * SIZE * 8
    assert native_collectives(seen) == ("all_reduce",)
    assert order(seen, 0) == ["all_reduce", "barrier"]
    assert num_calls(seen) == 6
    assert num_calls(seen, "all_reduce") == 3
    assert num_calls(seen, "all_reduce", rank=2) == 1


def test_whole_tensors_are_over_budget(ranks: Callable[[int], Ranks]) -> None:
    seen = evidence_of(ranks, whole_to_next, 3)
    fault = over_budget(seen, SIZE * 8, "one pass")
    assert fault is not None
    assert fault.code == "too many bytes"
    assert fault.message == "right result, but 1.9 kB sent per rank where one pass needs 960 bytes"
    assert over_budget(seen, 2 * SIZE * 8, "two passes") is None
    assert len(calls(seen, 0, "send")) == 2


def test_no_calls_are_no_bytes(ranks: Callable[[int], Ranks]) -> None:
    seen = evidence_of(ranks, dist.get_rank, 2)
    assert order(seen, 0) == []
    assert over_budget(seen, 0, "nothing") is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (3e6, "3.0 MB"), (12.04e9, "12040.0 MB")],
)
def test_bytes_in_words(num_bytes: float, text: str) -> None:
    assert in_megabytes(num_bytes) == text


def test_peak_counts_what_lives_at_once() -> None:
    x = torch.ones(1000)

    def one_after_the_other(tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            tensor = tensor + 1
        return tensor

    def all_at_once(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor + i for i in range(5)]

    result, peak = peak_bytes(one_after_the_other, x)
    assert torch.equal(result, x + 5)
    assert peak == 2 * 4000
    assert peak_bytes(all_at_once, x)[1] == 5 * 4000


def test_views_and_arguments_cost_nothing() -> None:
    x = torch.ones(1000)
    assert peak_bytes(lambda tensor: tensor.view(10, 100)[3].t(), x)[1] == 0
    assert peak_bytes(lambda tensor: tensor.mul_(2), x)[1] == 0
    assert peak_bytes(lambda: None)[1] == 0


def test_backward_is_counted() -> None:
    x = torch.ones(1000, requires_grad=True)
    _, peak = peak_bytes(lambda tensor: tensor.exp().sum().backward(), x)
    assert x.grad is not None
    assert peak >= 2 * 4000
