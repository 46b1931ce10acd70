"""Ranks that reach one collective from different lines: told where two are exchanged, never where that is meant."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.comm import RankError, Ranks
from distlab.comm.record.swapped import place_of


def in_branches(rank):
    """A root has a line of its own, call after call."""
    for _ in range(3):
        if rank == 0:
            dist.broadcast(torch.ones(4), src=0)
        else:
            dist.broadcast(torch.empty(4), src=0)


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


def other_roots(rank):
    """In turn, each rank gives what it has."""
    for turn in range(dist.get_world_size()):
        (give if turn == rank else take)(turn)


def give(root):
    dist.broadcast(torch.ones(4), src=root)


def take(root):
    dist.broadcast(torch.empty(4), src=root)


class Buckets:
    """What is left over is sent by another function than what a hook sends; all ranks keep the order of buckets."""

    def ready(self):
        dist.all_reduce(torch.ones(4))

    def rest(self):
        dist.all_reduce(torch.ones(4))


def in_hooks_or_after(rank):
    """Of two buckets alike the second starts in a hook where its parameters were used, else after backward."""
    buckets = Buckets()
    for step in range(4):
        buckets.ready()
        buckets.ready() if step % 2 == rank % 2 else buckets.rest()


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


NO_EXCHANGE = [in_branches, take_turns, wait_in_turn, own_lines, other_roots]
NO_EXCHANGE += [in_hooks_or_after, in_backward_or_after]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fn", NO_EXCHANGE)
def test_ranks_may_reach_a_call_from_different_lines(fn, world_size):
    with Ranks(world_size, timeout_s=60) as ranks:
        ranks.run(lambda: fn(dist.get_rank()))


def turned_round(rank):
    """The outer two of three calls change places."""
    calls = [sum_a, sum_b, sum_c]
    for call in reversed(calls) if rank == 1 else calls:
        call(torch.ones(4))


def sum_a(x):
    dist.all_reduce(x)


def sum_b(x):
    dist.all_reduce(x)


def sum_c(x):
    dist.all_reduce(x)


def in_a_group(rank):
    group = dist.new_group([0, 2])
    if rank != 1:
        for call in (sum_in, add_in) if rank else (add_in, sum_in):
            call(group)


def sum_in(group):
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    work.wait()


def add_in(group):
    dist.all_reduce(
        torch.ones(4),
        group=group,
    )


@pytest.mark.parametrize(("fn", "numbers"), [(turned_round, "#1 and #3"), (in_a_group, "#1 and #2")])
def test_an_exchange_is_told_before_results_are_handed_out(fn, numbers):
    with Ranks(3, timeout_s=60) as ranks, pytest.raises(RankError, match=f"in another order, calls {numbers}:") as told:
        ranks.run(lambda: fn(dist.get_rank()))
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce #1 (float32[4], group" in str(told.value)
    assert str(told.value).count("test_swapped.py:") >= 4


def test_a_place_is_known_by_function_text_and_branch():
    first, second = (place_of(f"{__file__}:{take_turns.__code__.co_firstlineno + line}") for line in (4, 6))
    assert first.text == "dist.all_reduce(torch.ones(4))"
    assert first.function == second.function
    assert first.branches != second.branches
    assert place_of("?:0") is None
    assert place_of(f"{__file__}.nothing:3") is None
