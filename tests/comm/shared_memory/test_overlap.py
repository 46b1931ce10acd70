"""Calls that nobody waits for: they return at once, run in order, and are over when their work says so."""

import threading

import torch
import torch.distributed as dist


def early_and_late():
    """Rank 1 comes when rank 0's call has returned."""
    x, store = torch.ones(200_000), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["has returned"])
    work = dist.all_reduce(x, async_op=True)
    was_over = dist.get_rank() == 0 and work.is_completed()
    store.set("has returned", "yes")
    work.wait()
    return was_over, work.is_success(), x[0].item()


def test_an_asynchronous_call_returns_before_the_others_come(shared_ranks):
    assert shared_ranks(2).run(early_and_late) == [(False, True, 2.0)] * 2


def waits_in_a_different_order():
    tensors = [torch.full((k + 1,), float(k)) for k in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    total = torch.tensor([1.0])
    dist.all_reduce(total)  # behind all of them
    behind = all(work.is_completed() for work in works)
    for work in works[::-1]:
        work.wait()
    return behind, total.item(), [t[0].item() for t in tensors]


def test_calls_run_in_their_order_whatever_the_order_of_waits(shared_ranks):
    for behind, total, values in shared_ranks(2).run(waits_in_a_different_order):
        assert behind
        assert total == 2.0
        assert values == [2.0 * k for k in range(20)]


def futures():
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 10)
    over = dist.all_reduce(torch.ones(1), async_op=True)
    over.wait()
    return doubled.wait().tolist(), over.get_future().wait()[0].item(), work.result()[0].tolist()


def test_a_work_has_a_future_before_and_after_its_end(shared_ranks):
    assert shared_ranks(2).run(futures) == [([20.0] * 3, 2.0, [2.0] * 3)] * 2


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


def test_groups_may_be_called_from_two_threads(shared_ranks):
    assert shared_ranks(2).run(on_two_threads) == [[60.0, 120.0]] * 2


def sequel_of_a_call():
    """What is done at a call's end makes a second call and waits for it, as torch's hook for PowerSGD does."""

    def again(future):
        total = future.value()[0]
        return dist.all_reduce(total, async_op=True).get_future().wait()[0] * 10

    return dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).wait().tolist()


def test_what_is_done_at_a_calls_end_may_wait_for_later_calls(shared_ranks):
    for world_size in (1, 2):
        assert shared_ranks(world_size).run(sequel_of_a_call) == [[10.0 * world_size**2] * 3] * world_size
