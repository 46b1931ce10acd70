"""What torch says of a process group holds here too: forms of its methods, time limits, profiles, works, lists."""

import gc
import json
from collections import Counter
from datetime import timedelta
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import recorded
from distlab.profile.kineto import events_of, read_rank

MAX, LIMIT = dist.ReduceOp.MAX, timedelta(seconds=30)


def halves(count=2):
    return [torch.zeros(1) for _ in range(count)]


FORMS = {  # of a group's method, with a tensor of a rank; what it writes otherwise
    "allreduce": lambda g, t, o: g.allreduce(t),
    "allreduce, op": lambda g, t, o: g.allreduce([t], MAX),
    "allreduce, named": lambda g, t, o: g.allreduce(t, op=MAX, timeout=LIMIT),
    "broadcast, root": lambda g, t, o: g.broadcast(t, 1, LIMIT),
    "broadcast, no root": lambda g, t, o: g.broadcast([t]),
    "reduce": lambda g, t, o: g.reduce(t if g.rank() else t.clone(), root=1, op=MAX),  # gloo writes on all ranks
    "allgather": lambda g, t, o: g.allgather([o], [t]),
    "allgather, plain": lambda g, t, o: g.allgather(o, t, LIMIT),
    "gather": lambda g, t, o: g.gather(o if g.rank() == 1 else [], t, root=1),
    "scatter": lambda g, t, o: g.scatter(t, o if g.rank() == 1 else [], root=1),
    "reduce_scatter": lambda g, t, o: g.reduce_scatter(t, [o[0] + t, o[1] + 2 * t], op=MAX),
    "alltoall": lambda g, t, o: g.alltoall(o, [t, 2 * t]),
    "alltoall_base": lambda g, t, o: g.alltoall_base(o[2], torch.cat([t, t]), [], []),
    "_allgather_base": lambda g, t, o: g._allgather_base(o[2], t),
    "_reduce_scatter_base": lambda g, t, o: g._reduce_scatter_base(t, o[2] + t),
    "send, recv": lambda g, t, o: g.send([t], 1, 7) if g.rank() == 0 else g.recv([t], 0, tag=7),
    "barrier": lambda g, t, o: g.barrier(LIMIT),
}


def in_all_forms(backend):
    group, found = dist.new_group(backend=backend), {}
    with recorded() as seen:
        for name, call in FORMS.items():
            t, outputs = torch.tensor([group.rank() + 1.0]), halves()
            call(group, t, [*outputs, torch.zeros(2)] if "base" in name else outputs).wait()
            found[name] = [t, *outputs]
    return found, Counter(seen.records.ops(dist.get_rank()))


def overlapping(backend):
    """Tensors of one call that stand twice, alias or overlap, also of a size that goes in several pieces."""
    me, n, group, found = dist.get_rank(), dist.get_world_size(), dist.new_group(backend=backend), {}
    for size in (6, 300_000):
        x, found[size] = torch.arange(float(size)) + 10 * me, []
        views, twice, aliases, one, over = x.clone(), x.clone(), x.clone(), torch.zeros(size), torch.zeros(size + 2)
        with catch_warnings():
            simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced([views[: size // 2], views[size // 2 - 1 :]], group=group)
            dist.all_reduce_coalesced([twice, twice], group=group)
            dist.all_reduce_coalesced([aliases, aliases.view(2, -1), aliases.detach()], group=group)
        dist.all_gather([one] * n, x, group=group)
        over[2:] = x
        rest = [torch.zeros(size) for _ in range(n - 1)]
        dist.all_gather([over[:size], *rest], over[2:], group=group)
        inputs = [x + r for r in range(n)]
        dist.reduce_scatter(inputs[0], inputs, group=group)
        found[size] += [views, twice, aliases, one, *rest, inputs[0]]
    return found


def on_both(program):
    return program("gloo"), program("shared")


@pytest.mark.parametrize(("program", "world_size"), [(in_all_forms, 2), (overlapping, 3)])
def test_forms_of_methods_and_overlapping_tensors_do_what_they_do_on_gloo(shared_ranks, program, world_size):
    for there, here in shared_ranks(world_size).run(on_both, program):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


def exchanged_in_place():
    """An all-to-all into its input, an all-gather of a different place, a scatter into a part, in which gloo races."""
    me, n, right = dist.get_rank(), dist.get_world_size(), []
    for size in (2, 200_000):
        x, whole = torch.arange(float(n * size + 1)) + me, torch.zeros(n * size)
        expected, other = torch.empty(n * size), (me + 1) % n
        dist.all_to_all_single(expected, x[:-1].clone())
        dist.all_to_all_single(x[1:], x[:-1])
        whole[other * size : (other + 1) * size] = me + 1
        dist.all_gather_single(whole, whole[other * size : (other + 1) * size])
        parts = [torch.full((size,), 5.0 + r) for r in range(n)]
        dist.scatter(parts[-1], parts if me == 0 else None, 0)
        right += [torch.equal(x[1:], expected), whole.view(n, -1)[:, 0].tolist() == [1.0, 2.0, 3.0]]
        right.append(parts[-1].unique().tolist() == [5.0 + me])
    return right


def works_let_go():
    """C++ waits for works that Python has dropped: what a tensor is registered with, and DDP's join."""
    me, told = dist.get_rank(), []
    x = torch.ones(3)
    _register_work(x, dist.all_reduce(x, async_op=True))
    gc.collect()
    torch.ops._c10d_functional.wait_tensor(x)
    boxed = dist.all_reduce(x, async_op=True).boxed()
    for _ in range(300):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    work = dist.Work.unbox(boxed)
    told += [work.wait(), work.get_future().wait()[0].tolist()]
    for divide in (True, False):
        net = DistributedDataParallel(torch.nn.Linear(5, 5, bias=False))
        with net.join(divide_by_initial_world_size=divide):
            for _ in range(2 + me):
                net(torch.ones(1, 5)).sum().backward()
        told.append(next(net.parameters()).grad[0, 0].item())
    return told


def test_works_live_on_and_what_is_read_is_read_before_anything_is_written(shared_ranks):
    assert shared_ranks(3).run(exchanged_in_place) == [[True] * 6] * 3
    told = shared_ranks(2).run(works_let_go)
    assert [one[:2] for one in told] == [[True, [4.0] * 3]] * 2
    assert told[1][2:] == [1.5, 3.0]  # of three steps the last is made alone: divided by 2, or by 1


def late(me, call, group):
    if me:
        dist.distributed_c10d._get_default_store().wait([f"given up {group.group_name}"])
        return ""
    try:
        call(group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.distributed_c10d._get_default_store().set(f"given up {group.group_name}", "yes")
    return "no error"


def limits():
    me, half = dist.get_rank(), timedelta(seconds=0.5)
    calls = [
        lambda g: dist.barrier(group=g, timeout=half),
        lambda g: g.allreduce(torch.ones(1), timeout=half).wait(),
        lambda g: (_set_pg_timeout(half, g), dist.all_reduce(torch.ones(1), group=g)),
        lambda g: (g.set_timeout(half), dist.recv(torch.ones(1), 1, group=g)),
    ]
    with catch_warnings():
        simplefilter("error")
        return [late(me, call, dist.new_group(timeout=timedelta(seconds=40))) for call in calls]


def test_limits_of_one_call_and_those_that_are_set_later_hold(shared_ranks):
    told, others = shared_ranks(2).run(limits)
    assert others == [""] * 4
    assert all("imed out waiting 500 ms for rank 1" in text for text in told), told


def profiled(path):
    model, x = DistributedDataParallel(torch.nn.Linear(8, 8)), torch.ones(4, 8)
    with torch.profiler.profile(record_shapes=True) as profile, recorded() as seen:
        model(x).sum().backward()
        dist.all_reduce(x)
        dist.broadcast(x, 0, async_op=True).wait()
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    profile.export_chrome_trace(str(path))
    document = json.loads(path.read_text())
    trace = read_rank(events_of(document, document["traceEvents"]), dist.get_rank(), 2)
    calls = [(span.kind, span.num_bytes) for span in trace if span.lane == "communication"]
    with CommDebugMode() as counts:
        dist.all_reduce(x)
    operators = {event.name for event in profile.events() if event.name.startswith("c10d::")}
    return calls, operators, counts.get_total_counts(), seen.records.ops(dist.get_rank())


def test_profilers_and_modes_see_the_calls_with_their_bytes_and_the_recorder_none_twice(shared_ranks, tmp_path):
    for rank, found in enumerate(shared_ranks(2).run(lambda: profiled(tmp_path / str(dist.get_rank())))):
        calls, operators, count, recorded_ops = found
        message = "recv" if rank else "send"
        assert calls == [("all_reduce", 288), ("all_reduce", 128), ("broadcast", 128), (message, 128)]
        assert {"c10d::allreduce_", "c10d::broadcast_"} <= operators
        assert count == 1
        assert recorded_ops == ("all_reduce", "all_reduce", "broadcast", message)
