"""Programs on shared memory: random ones compute what they compute on gloo; those of a table get its values."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from collective_programs import backwards, scattered_in_memory
from odd_tensors import results_of_functional_collectives
from random_programs import hold

from distlab.comm import run


def test_random_programs_equal_gloo(shared_ranks, request):
    hold(shared_ranks, 8, request.config.getoption("--hypothesis-seed"))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_random_programs_equal_gloo(shared_ranks, request):
    hold(shared_ranks, 200, request.config.getoption("--hypothesis-seed"))


def means_of_whole_numbers():
    x = torch.tensor([1, 2, -5]) * (dist.get_rank() + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist()


def uneven_exchange():
    n, me = dist.get_world_size(), dist.get_rank()
    gives, takes = [(me + 1) * (s + 1) for s in range(n)], [(s + 1) * (me + 1) for s in range(n)]
    source = torch.full((sum(gives), 2), float(me))
    output = torch.empty(sum(takes), 2)
    dist.all_to_all_single(output, source, takes, gives)
    return output[:, 0].tolist() == [float(s) for s, count in enumerate(takes) for _ in range(count)]


def complex_values():
    z = torch.full((3,), complex(1, dist.get_rank()))
    other = z.clone()
    dist.all_reduce(z)
    gathered = [torch.empty(3, dtype=torch.complex64) for _ in range(2)]
    dist.all_gather(gathered, other)
    return z.tolist(), gathered[1].tolist()


def many_tags_in_reverse():
    """More messages than a ring holds are open at once, both ways, and received in a different order."""
    me, other, fits = dist.get_rank(), 1 - dist.get_rank(), []
    for numel in (3, 40_000):
        works = [dist.isend(torch.full((numel,), 1000.0 * me + tag), other, tag=tag) for tag in range(100)]
        for tag in [*range(99, 49, -1), *range(50)]:
            x = torch.empty(numel)
            dist.recv(x, other, tag=tag)
            fits.append(x.unique().tolist() == [1000.0 * other + tag])
        for work in works:
            work.wait()
    return all(fits) and backwards(60, 100_000)  # of two pieces each; all together ten times what a ring holds


def from_anyone():
    """A receive from anyone says from whom, and keeps each sender's order."""
    n, me, found = dist.get_world_size(), dist.get_rank(), []
    if me:
        for k in range(3):
            dist.send(torch.tensor([me, k]), 0)
        return "sent"
    for _ in range(3 * (n - 1)):
        x = torch.empty(2, dtype=torch.int64)
        found.append((dist.recv(x), *x.tolist()))
    return sorted(found, key=lambda one: one[0])


def send_to_a_late_receiver():
    """A send is over when a receive has taken it."""
    if dist.get_rank() == 0:
        work = dist.isend(torch.ones(3), 1)
        time.sleep(0.3)
        before = work.is_completed()
        dist.barrier()
        work.wait()
        return before, work.is_completed()
    dist.barrier()
    x = torch.zeros(3)
    dist.recv(x, 0)
    return x.tolist()


def computes_meanwhile():
    """Nobody waits, and yet the messages arrive: a thread of the group moves them on."""
    me, x = dist.get_rank(), torch.full((2_000_000,), float(dist.get_rank()))
    work = dist.isend(x, 1) if me == 0 else dist.irecv(x, 0)
    deadline = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = work.is_completed()
    work.wait()
    return arrived, x[-1].item()


def early_and_late():
    """An asynchronous call returns before the others come: rank 1 comes when rank 0's call has returned."""
    x, store = torch.ones(200_000), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["has returned"])
    work = dist.all_reduce(x, async_op=True)
    was_over = dist.get_rank() == 0 and work.is_completed()
    store.set("has returned", "yes")
    work.wait()
    return was_over, work.is_success(), x[0].item()


def futures():
    """A work has a future before and after its end."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 10)
    over = dist.all_reduce(torch.ones(1), async_op=True)
    over.wait()
    return doubled.wait().tolist(), over.get_future().wait()[0].item(), work.result()[0].tolist()


def sequel_of_a_call():
    """What is done at a call's end makes a second call and waits for it, as torch's hook for PowerSGD does."""

    def again(future):
        total = future.value()[0]
        return dist.all_reduce(total, async_op=True).get_future().wait()[0] * 10

    return dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).wait().tolist()


def on_two_threads():
    """Two groups, each called from a thread of its own, in an order that differs between the ranks."""
    groups, totals = [dist.new_group(), dist.new_group()], [0.0, 0.0]

    def count(k):
        for _ in range(30):
            x = torch.tensor([1.0 + k])
            dist.all_reduce(x, group=groups[k])
            totals[k] += x.item()

    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    threads = [threading.Thread(target=count, args=(k,)) for k in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


@pytest.mark.parametrize(
    ("program", "on_ranks"),
    [
        (means_of_whole_numbers, [[1, 3, -7]] * 2),  # a mean loses what is behind the point
        (uneven_exchange, [True] * 3),
        (scattered_in_memory, [[]] * 3),
        (results_of_functional_collectives, [[[6.0], [3.0], [3.0]]] * 2),
        (complex_values, [([2 + 1j] * 3, [1 + 1j] * 3)] * 2),
        (many_tags_in_reverse, [True] * 2),
        (from_anyone, [[(rank, rank, k) for rank in (1, 2) for k in range(3)], "sent", "sent"]),
        (send_to_a_late_receiver, [(False, True), [1.0] * 3]),
        (computes_meanwhile, [(True, 0.0)] * 2),
        (early_and_late, [(False, True, 2.0)] * 2),
        (futures, [([20.0] * 3, 2.0, [2.0] * 3)] * 2),
        (sequel_of_a_call, [[40.0] * 3] * 2),
        (sequel_of_a_call, [[10.0] * 3]),
        (on_two_threads, [[60.0, 120.0]] * 2),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_program_gets_these_values(shared_ranks, program, on_ranks):
    assert shared_ranks(len(on_ranks)).run(program) == on_ranks


def test_a_rank_that_leaves_at_once_has_told_which_messages_it_took():
    assert run(backwards, 2, args=(1500, 1, True), timeout_s=200, backend="shared") == [True] * 2
