"""Many ranks: the first of them combines small tensors for all, and whatever goes wrong is still told by name."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from random_programs import hold

from distlab.comm import RankError, Ranks
from distlab.shared_memory import meeting
from distlab.shared_memory.collectives import collectives

NUM_RANKS = meeting.MANY + 1


@pytest.fixture
def led_ranks() -> Callable[[int], Ranks]:
    """Ranks of which two are many."""
    made: dict[int, Ranks] = {}

    def few_are_many() -> None:
        collectives.MANY = meeting.MANY = 1

    def start(world_size: int) -> Ranks:
        if world_size not in made:
            made[world_size] = Ranks(world_size, backend="shared", timeout_s=120)
            made[world_size].run(few_are_many)
        return made[world_size]

    yield start
    for ranks in made.values():
        ranks.close()


def test_random_programs_of_many_ranks_equal_gloo(led_ranks, request):
    """Sums that are led, between calls of all other kinds."""
    hold(led_ranks, 20, request.config.getoption("--hypothesis-seed"), sizes=(2, 3, 4))


def sums():
    """Return what sums of several lengths are, and how often this rank waited for all others meanwhile."""
    read_all, counts = meeting.Meeting.read_all, [0]

    def counted(self):
        counts[0] += 1
        return read_all(self)

    meeting.Meeting.read_all = counted
    found = []
    try:
        for turn in range(3):
            for length in (0, 1, 64, collectives.LED_BYTES // 4, collectives.LED_BYTES // 4 + 1):
                torch.manual_seed(100 * turn + dist.get_rank())
                tensor = torch.rand(length)
                before = counts[0]
                dist.all_reduce(tensor)
                found.append((tensor, counts[0] - before))
    finally:
        meeting.Meeting.read_all = read_all
    return found


def test_one_rank_reads_all_and_combines_in_the_order_of_ranks():
    with Ranks(NUM_RANKS, backend="shared", timeout_s=120) as ranks:
        of_rank = ranks.run(sums)
    for turn in range(3):
        for place in range(5):
            length = len(of_rank[0][5 * turn + place][0])
            wanted = torch.zeros(length)
            for rank in range(NUM_RANKS):
                torch.manual_seed(100 * turn + rank)
                wanted += torch.rand(length)
            for rank, found in enumerate(of_rank):
                tensor, waits = found[5 * turn + place]
                assert torch.equal(tensor, wanted)
                if place and rank and place < 4:  # the first may finish an earlier call
                    assert waits == 0, (rank, place)


def waited_for():
    """Return for which ranks this one waits in calls in which each needs something of all."""
    seen, waits, n = [], meeting.Meeting._await, dist.get_world_size()

    def noted(self, rank, step):
        seen.append(rank)
        waits(self, rank, step)

    meeting.Meeting._await = noted
    try:
        dist.all_reduce(torch.ones(200_000))
        dist.all_gather([torch.empty(3) for _ in range(n)], torch.ones(3))
        dist.all_to_all_single(torch.empty(n), torch.ones(n))
        dist.barrier()
    finally:
        meeting.Meeting._await = waits
    return set(seen)


def test_of_many_ranks_each_waits_for_all_at_once():
    """It sleeps once, and not once for each rank that comes."""
    with Ranks(NUM_RANKS, backend="shared", timeout_s=120) as ranks:
        assert set().union(*ranks.run(waited_for)) == {meeting._ALL}


def told(how):
    """Return what each rank is told when rank 5 calls something else, ends, or comes too late."""
    group = dist.new_group(timeout=timedelta(seconds=2 if how == "late" else 60))
    dist.all_reduce(torch.ones(4), group=group)
    mine = dist.get_rank() == 5
    if mine and how == "ends":
        os._exit(3)
    if (mine and how == "late") or (dist.get_rank() == 7 and how == "differs, and one is late"):
        time.sleep(4)
    try:
        dist.all_reduce(torch.ones(5 if mine and "differs" in how else 4), group=group)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("differs", "ValueError", "  rank 5: all_reduce float32[5]\n  rank 6: all_reduce float32[4]"),
        (
            "differs, and one is late",
            "ValueError",
            "  rank 5: all_reduce float32[5]\n  rank 6: all_reduce float32[4]\n  rank 7 has not called it yet",
        ),
        ("late", "RuntimeError", "timed out waiting 2000 ms for rank 5 to make its call of all_reduce float32[4]"),
    ],
)
def test_each_of_many_ranks_is_told_which_rank_it_is(how, kind, says):
    with Ranks(NUM_RANKS, backend="shared", timeout_s=120, record=False) as ranks:
        for rank, (name, text) in enumerate(ranks.run(told, how)):
            is_late = "late" in how and rank == (5 if how == "late" else 7)
            assert is_late or (name == kind and says in text), (rank, text)


def test_of_many_ranks_one_that_ended_is_the_cause():
    with pytest.raises(RankError, match=f"rank 5 of {NUM_RANKS} exited with status 3"):
        Ranks(NUM_RANKS, backend="shared", timeout_s=120).run(told, "ends")
