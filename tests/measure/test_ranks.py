"""What is the same on every rank: the result of one rank, means and largest values, the moment when all begin."""

import time

import pytest
import torch
import torch.distributed as dist

from distlab.comm import recorded
from distlab.measure import on_first_rank
from distlab.measure.machine.ranks import OtherProcesses, Starter, largest_over_ranks, mean_over_ranks

CPU = torch.device("cpu")


def on_three():
    rank, asked = dist.get_rank(), []

    def refuse():
        raise ValueError(f"rank {rank} cannot")

    made = on_first_rank(lambda: asked.append(rank) or {"made by": rank, "shape": (2, 3)})
    with pytest.raises(ValueError, match="rank 0 cannot"):
        on_first_rank(refuse)
    own = [float(rank), 3.0 - rank]
    return made, asked, mean_over_ranks(own, CPU), largest_over_ranks(own, CPU)


def test_one_rank_makes_it_and_means_and_largest_values_are_the_same_on_every_rank(ranks):
    made = {"made by": 0, "shape": (2, 3)}
    found = ranks(3).run(on_three)
    assert found == [(made, [0] * (rank == 0), [1.0, 2.0], [2.0, 3.0]) for rank in range(3)]


def sent():
    others = OtherProcesses()
    with recorded() as seen:
        mean_over_ranks([1.0, 2.0, 3.0], CPU)
        largest_over_ranks([1.0, 2.0], CPU)
        taken = others.taken()
    return taken, [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def test_one_call_of_8_bytes_per_value(ranks):
    """And a reading of other processes is one small all-reduce and one broadcast, the same on every rank."""
    (taken, calls), second = ranks(2).run(sent)
    assert (taken, calls) == second
    assert calls == [("all_reduce", 24), ("all_reduce", 16), ("all_reduce", 8), ("broadcast", 8)]
    assert taken >= 0.0


def begin_twice():
    starter, rank, moments = Starter(CPU), dist.get_rank(), []
    with recorded() as seen:
        for _ in range(2):
            time.sleep(0.02 * rank)  # the last one comes late: no rank begins without it
            come = time.perf_counter()
            begin = starter.begin()
            moments.append((come, begin, time.perf_counter()))
    return moments, [(call.op, call.num_bytes) for call in seen.records.calls(rank)]


def test_all_ranks_begin_at_one_moment_that_lies_ahead_of_the_last_one(ranks):
    found = ranks(3).run(begin_twice)
    for places in zip(*(moments for moments, _ in found), strict=True):
        begins = [begin for _, begin, _ in places]
        assert max(begins) - min(begins) < 1e-6  # one machine, one clock
        assert begins[0] > max(come for come, _, _ in places)
        assert all(left >= begin for _, begin, left in places)
    assert [calls for _, calls in found] == [[("barrier", 0), ("all_reduce", 16)] * 2] * 3
