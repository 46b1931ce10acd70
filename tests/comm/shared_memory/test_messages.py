"""Sends and receives: tags, order, any source, sizes beyond a ring, many at once, and what a send's end means."""

import time

import torch
import torch.distributed as dist
from collective_programs import backwards

from distlab.comm import run


def many_tags_in_reverse(num_elements):
    me, other = dist.get_rank(), 1 - dist.get_rank()
    works = [dist.isend(torch.full((num_elements,), 1000.0 * me + tag), other, tag=tag) for tag in range(200)]
    got = []
    for tag in [*range(199, 99, -1), *range(100)]:
        x = torch.empty(num_elements)
        dist.recv(x, other, tag=tag)
        got.append(x.unique().tolist() == [1000.0 * other + tag])
    for work in works:
        work.wait()
    last = torch.ones(1)
    dist.all_reduce(last)
    return all(got) and last.item() == 2


def test_any_number_of_messages_may_be_received_in_a_different_order(shared_ranks):
    for num_elements in (3, 40_000):
        assert shared_ranks(2).run(many_tags_in_reverse, num_elements) == [True, True]
    for count, numel in ((200, 100_000), (1500, 1)):  # of two pieces each, and all together ten times what a ring holds
        assert shared_ranks(2).run(backwards, count, numel) == [True] * 2


def test_a_rank_that_leaves_at_once_has_told_which_messages_it_took():
    assert run(backwards, 2, args=(1500, 1, True), timeout_s=60, backend="shared") == [True] * 2


def from_anyone():
    n, me = dist.get_world_size(), dist.get_rank()
    if me:
        for k in range(3):
            dist.send(torch.tensor([me, k]), 0)
        return None
    found = []
    for _ in range(3 * (n - 1)):
        x = torch.empty(2, dtype=torch.int64)
        source = dist.recv(x)
        found.append((source, *x.tolist()))
    return found


def test_a_receive_from_anyone_says_from_whom_and_keeps_each_senders_order(shared_ranks):
    found = shared_ranks(3).run(from_anyone)[0]
    assert all(source == sender for source, sender, _ in found)
    for sender in (1, 2):
        assert [k for source, _, k in found if source == sender] == [0, 1, 2]


def around():
    n, me, found = dist.get_world_size(), dist.get_rank(), []
    for numel, dtype in ((0, torch.float32), (1, torch.int8), (1000, torch.bfloat16), (3_000_001, torch.float32)):
        mine, theirs = torch.arange(numel).to(dtype) + me, torch.empty(numel, dtype=dtype)
        to_right = dist.P2POp(dist.isend, mine, (me + 1) % n)
        from_left = dist.P2POp(dist.irecv, theirs, (me - 1) % n)
        for work in dist.batch_isend_irecv([to_right, from_left]):
            work.wait()
        found.append(torch.equal(theirs, torch.arange(numel).to(dtype) + (me - 1) % n))
    return found


def test_messages_around_the_ranks_smaller_and_larger_than_a_ring_buffer(shared_ranks):
    assert shared_ranks(3).run(around) == [[True] * 4] * 3


def send_to_a_late_receiver():
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


def test_a_send_is_over_when_a_receive_has_taken_it(shared_ranks):
    assert shared_ranks(2).run(send_to_a_late_receiver) == [(False, True), [1.0] * 3]


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


def test_messages_travel_while_nobody_waits_for_them(shared_ranks):
    assert shared_ranks(2).run(computes_meanwhile) == [(True, 0.0)] * 2


def between_collectives():
    me, found = dist.get_rank(), []
    for k in range(50):
        x, y = torch.tensor([float(k)]), torch.tensor([-1.0])
        work = dist.isend(x, 1) if me == 0 else dist.irecv(y, 0)
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        work.wait()
        found.append(total.item() == 2 and (me == 0 or y.item() == k))
    return all(found)


def test_messages_and_collectives_of_one_group_do_not_disturb_each_other(shared_ranks):
    assert shared_ranks(2).run(between_collectives) == [True] * 2
