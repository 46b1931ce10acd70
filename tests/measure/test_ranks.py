"""What is the same on every rank: the result of one rank, and means and largest values over ranks."""

import pytest


def on_one_of_three():
    import torch.distributed as dist

    from distlab.measure import on_first_rank

    rank = dist.get_rank()
    asked = []

    def make():
        asked.append(rank)
        return {"made by": rank, "shape": (2, 3)}

    def refuse():
        raise ValueError(f"rank {rank} cannot")

    found = on_first_rank(make)
    with pytest.raises(ValueError, match="rank 0 cannot"):
        on_first_rank(refuse)
    return found, asked


def test_one_rank_makes_it_and_all_have_it(ranks):
    first, second, third = ranks(3).run(on_one_of_three)
    made = {"made by": 0, "shape": (2, 3)}
    assert first == (made, [0])
    assert second == third == (made, [])


def over_ranks():
    import torch
    import torch.distributed as dist

    from distlab.measure.machine.ranks import largest_over_ranks, mean_over_ranks

    own = [float(dist.get_rank()), 3.0 - dist.get_rank()]
    cpu = torch.device("cpu")
    return [mean_over_ranks(own, cpu), largest_over_ranks(own, cpu)]


def test_means_and_largest_values_are_the_same_on_every_rank(ranks):
    assert ranks(3).run(over_ranks) == [[[1.0, 2.0], [2.0, 3.0]]] * 3


def sent():
    import torch

    from distlab.comm import recorded
    from distlab.measure.machine.ranks import largest_over_ranks, mean_over_ranks

    with recorded() as seen:
        mean_over_ranks([1.0, 2.0, 3.0], torch.device("cpu"))
        largest_over_ranks([1.0, 2.0], torch.device("cpu"))
    return [(call.op, call.num_bytes) for call in seen.records.calls(torch.distributed.get_rank())]


def test_one_call_of_8_bytes_per_value(ranks):
    assert ranks(2).run(sent) == [[("all_reduce", 24), ("all_reduce", 16)]] * 2


def begin_twice():
    import time

    import torch
    import torch.distributed as dist

    from distlab.comm import recorded
    from distlab.measure.machine.ranks import Starter

    starter, rank = Starter(torch.device("cpu")), dist.get_rank()
    moments = []
    with recorded() as seen:
        for _ in range(2):
            time.sleep(0.02 * rank)  # the last one comes late: no rank begins without it
            come = time.perf_counter()
            begin = starter.begin()
            moments.append((come, begin, time.perf_counter()))
    return moments, [(call.op, call.num_bytes) for call in seen.records.calls(rank)]


def test_all_ranks_begin_at_one_moment_that_lies_ahead_of_the_last_one(ranks):
    first, second, third = ranks(3).run(begin_twice)
    for places in zip(first[0], second[0], third[0], strict=True):
        begins = [begin for _, begin, _ in places]
        assert max(begins) - min(begins) < 1e-6  # one machine, one clock
        assert begins[0] > max(come for come, _, _ in places)
        assert all(left >= begin for _, begin, left in places)
    assert first[1] == second[1] == third[1] == [("barrier", 0), ("all_reduce", 16)] * 2
