"""What the recorder sees of real calls, and that it leaves torch as it found it."""

import gc
import inspect
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distlab.comm import Recorder, agree, device, read_records, recorded, run
from distlab.comm.record.intercept import FrontEnd
from distlab.comm.where.frames import main_frame

GATHER_INTO = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER_FROM = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


@pytest.fixture(scope="module", autouse=True)
def _group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def patched():
    """Everything that a front end may change, as it is now."""
    methods = {name: vars(dist.ProcessGroup)[name] for name in vars(dist.ProcessGroup)}
    keys = ("c10d::allreduce_", "c10d::send", "c10d::barrier", "_c10d_functional::wait_tensor")
    kernels = [torch._C._dispatch_has_kernel_for_dispatch_key(key, "BackendSelect") for key in keys]
    return methods, vars(dist.Work)["wait"], kernels


def every_call():
    """Make each kind of collective once, on any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2 * size)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2))
    getattr(dist, GATHER_INTO)(torch.empty(2 * size), torch.ones(2))
    dist.reduce_scatter(torch.empty(2), list(torch.ones(size, 2)))
    getattr(dist, SCATTER_FROM)(torch.empty(2), x)
    dist.all_to_all(list(torch.empty(size, 2)), list(torch.ones(size, 2)))
    dist.all_to_all_single(torch.empty(2 * size), x)
    dist.gather(torch.ones(2), list(torch.empty(size, 2)) if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(2), list(torch.ones(size, 2)) if rank == 0 else None, src=0)
    dist.barrier()


NAMES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter")
NAMES += ("all_to_all", "all_to_all", "gather", "scatter", "barrier")


def test_recorders_inside_each_other_each_see_their_part_and_the_last_puts_back_what_was_there(tmp_path):
    before, x = patched(), torch.ones(2)
    assert before[2] == [False] * 4
    outer = Recorder(tmp_path, 0).start().start()
    assert patched()[1] is not before[1]
    assert patched()[2] == [True] * 4
    dist.all_reduce(x)
    with recorded() as inner:
        dist.broadcast(x, 0)
        with recorded() as innermost:
            dist.barrier()
    dist.all_reduce(x)
    (tmp_path / "b").mkdir()
    second = Recorder(tmp_path / "b", 0).start()
    outer.stop()
    dist.all_reduce(x)
    second.stop()
    second.stop()
    assert patched() == before
    dist.all_reduce(x)
    assert read_records(tmp_path / "b").ops(0) == ("all_reduce",)
    assert read_records(tmp_path).ops(0) == ("all_reduce", "broadcast", "barrier", "all_reduce")
    assert (inner.records.ops(0), innermost.records.ops(0)) == (("broadcast", "barrier"), ("barrier",))


def test_a_call_goes_on_when_only_a_stream_of_the_gpu_waits(tmp_path, monkeypatch):
    """On nccl `wait()` returns at once; the call must not be noted as over while its kernel may hang."""
    monkeypatch.setattr(device, "is_available", lambda: True)
    running = [True]
    monkeypatch.setattr(dist.Work, "is_completed", lambda work: not running[0])
    with Recorder(tmp_path, 0):
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        under_way = [(call.state, call.end_ns, call.wait_ns) for call in read_records(tmp_path)]
        running[0] = False
        dist.barrier()
    assert [(end, wait) for _, end, wait in under_way] == [(0, 0)] * 2, "neither over, nor waited for by the rank"
    assert all(state not in ("done", "waiting") for state, _, _ in under_way)
    over = list(read_records(tmp_path))
    assert [call.state for call in over] == ["done"] * 3
    assert all(call.end_ns >= call.start_ns for call in over)


def helper_that_the_learner_wrote(x):
    dist.all_reduce(x)


def test_the_call_site_is_the_learners_line():
    with recorded() as seen:
        line = inspect.currentframe().f_lineno + 1
        dist.all_reduce(torch.ones(1))
        helper_that_the_learner_wrote(torch.ones(1))
        agree(3, None, what="answer")
    first, second, for_distlab = seen.records
    assert first.site == f"{__file__}:{line}"
    assert second.site == f"{__file__}:{helper_that_the_learner_wrote.__code__.co_firstlineno + 1}"
    assert first.via == ""
    assert for_distlab.site == f"{__file__}:{line + 2}"
    assert "comm/agree.py:" in for_distlab.via


def test_calls_on_other_threads_and_in_backward_hooks_are_seen():
    weight = torch.ones(4, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    with recorded() as seen:
        (weight * 2).sum().backward()
        thread = threading.Thread(target=lambda: dist.broadcast(torch.ones(2), 0))
        thread.start()
        thread.join()
    assert seen.records.ops(0) == ("all_reduce", "broadcast")
    assert all(call.site.startswith(__file__) for call in seen.records)


BAD = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(4)], x),
    "scatter": lambda x: dist.scatter(torch.empty(4), [x], src=0),
    "gather": lambda x: dist.gather(x, [torch.empty(4)], dst=0),
    "reduce_scatter": lambda x: getattr(dist, SCATTER_FROM)(torch.empty(4), x),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty(4), x),
    "send": lambda x: dist.group.WORLD.send([x], 0, 0),
    "recv": lambda x: dist.group.WORLD.recv([x], 0, 0),
}


@pytest.mark.parametrize("op", BAD)
def test_a_non_contiguous_tensor_is_refused_where_it_was_passed(op):
    with recorded() as seen:
        with pytest.raises(ValueError, match=rf"rank 0: {op} at .*test_recorder.py:\d+: got a non-contiguous") as error:
            BAD[op](torch.arange(8.0).reshape(4, 2)[:, 0])
        for part in ("shape [4]", "stride [2]", "expected stride [1]", "call .contiguous()"):
            assert part in str(error.value)
        dist.barrier()
    assert seen.records.ops(0) == ("barrier",)


def test_a_sparse_tensor_is_refused():
    columns = torch.zeros(2, 3)
    with recorded():
        with pytest.raises(ValueError, match=r"all_reduce at .* a sparse tensor of shape \[3, 3\].*\.to_dense\(\)"):
            dist.all_reduce(torch.eye(3).to_sparse())
        dist.all_gather([columns[:, 1]], torch.ones(2))  # a list, which gloo copies, may be strided
    assert columns[:, 1].tolist() == [1, 1]


def test_a_wait_for_what_is_over_already_is_seen():
    with recorded() as seen:
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
        while not all(work.is_completed() for work in works):
            pass
        dist.barrier()  # before a call, those that are over are noted
        for work in works[:2]:
            work.wait()
    first, second, third, _ = seen.records
    assert first.wait_ns > first.end_ns > 0
    assert second.wait_ns > second.end_ns > 0
    assert third.wait_ns == 0 < third.end_ns
    lanes = [span.lane for span in seen.records.to_trace()]
    assert lanes.count("wait") == 1  # the barrier's: no rank stands still for what is over


def let_go_of_a_result_that_was_late():
    """On each rank: how many storages of results are freed after the wait, while no other call is made."""
    rank, freed = dist.get_rank(), []
    dist.barrier()
    result = torch.empty(500)
    weakref.finalize(result.untyped_storage(), freed.append, rank)
    if rank == 1:
        time.sleep(0.2)
    work = getattr(dist, SCATTER_FROM)(result, torch.ones(1000), async_op=True)
    FrontEnd.look()  # the other rank finds it under way
    work.wait()
    del work, result
    return freed


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_the_memory_of_a_result_is_free_after_the_wait(ranks, backend, monkeypatch):
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    assert ranks(2).run(let_go_of_a_result_that_was_late) == [[0], [1]]


def test_functional_collectives_are_waited_for_by_their_tensor():
    with recorded() as seen:
        total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1
    assert total.tolist() == [2, 2, 2, 2]
    (call,) = seen.records
    assert (call.op, call.state) == ("all_reduce", "done")
    assert call.wait_ns > 0


def bytes_of_every_call():
    with recorded() as seen:
        every_call()
    records, rank = seen.records, dist.get_rank()
    assert all(call.state == "done" and call.end_ns >= call.start_ns for call in records)
    assert [call.number for call in records] == list(range(1, len(NAMES) + 1))
    ops = sorted(set(records.ops(rank)))
    return {op: records.payload_bytes(rank, op) for op in ops}, records.ring_equivalent_bytes(rank), records.ops(rank)


def test_bytes_of_native_collectives(ranks):
    size = 3
    full, shard = 4 * 2 * size, 4 * 2
    once = dict.fromkeys(("all_reduce", "broadcast", "reduce"), full) | {"gather": shard, "scatter": shard}
    twice = {"barrier": 0, "all_gather": 2 * shard, "reduce_scatter": 2 * full, "all_to_all": 2 * full}
    for rank, (payload, ring, ops) in enumerate(ranks(size).run(bytes_of_every_call)):
        assert ops == NAMES
        assert payload == once | twice
        expected = 2 * (size - 1) * full // size + 2 * (size - 1) * shard + 4 * (size - 1) * full // size
        expected += 0 if rank == size - 1 else full  # broadcast along a chain from rank 0
        expected += 0 if rank == 0 else full + shard  # reduce and gather to rank 0
        expected += (size - 1) * shard if rank == 0 else 0  # scatter from rank 0
        assert ring == expected


def pairs():
    rank, size = dist.get_rank(), dist.get_world_size()
    with recorded() as seen:
        right, left, box = (rank + 1) % size, (rank - 1) % size, torch.empty(5)
        for request in [dist.isend(torch.ones(5), right, tag=7), dist.irecv(box, left, tag=7)]:
            request.wait()
        both = [dist.P2POp(dist.isend, torch.ones(3), right), dist.P2POp(dist.irecv, torch.empty(3), left)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
    return seen.records.sent_bytes(rank), seen.records.payload_bytes(rank), [str(call) for call in seen.records]


def test_bytes_of_sends(ranks):
    for rank, (sent, payload, calls) in enumerate(ranks(3).run(pairs)):
        assert (sent, payload) == (4 * (5 + 3), 0)
        assert calls[0].startswith(f"send to {(rank + 1) % 3} #1 (float32[5], tag 7, group [0, 1, 2])")
        assert calls[1].startswith(f"recv from {(rank - 1) % 3} #1 (float32[5], tag 7")


def with_torchs_products():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(torch.nn.Linear(3, 3))
    with recorded() as of_ddp:
        wrapped(torch.ones(2, 3)).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with recorded() as of_fsdp:
        fully_shard(torch.nn.Linear(6, 6), mesh=mesh)(torch.ones(2, 6)).sum().backward()
        row = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(1)]).redistribute(placements=[Shard(0)])
        whole = row.t().redistribute(placements=[Replicate()]).to_local().sum().item()
    rank = dist.get_rank()
    return set(of_ddp.records.ops(rank)), set(of_fsdp.records.ops(rank)), whole


def test_calls_that_cpp_makes_and_those_of_fsdp_and_dtensor_are_seen(ranks):
    for of_ddp, of_fsdp, whole in ranks(2).run(with_torchs_products):
        assert {"all_reduce"} <= of_ddp <= {"all_reduce", "broadcast"}
        assert {"all_gather", "reduce_scatter"} <= of_fsdp
        assert whole == 66


def test_a_second_python_thread_cannot_tear_rows(tmp_path):
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Recorder(tmp_path, 0):
            work = lambda: [dist.all_reduce(torch.ones(1)) for _ in range(100)]  # noqa: E731
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switch)
    calls = read_records(tmp_path).calls(0)
    assert [call.number for call in calls] == list(range(1, 301))
    assert all(call.state == "done" for call in calls)


class Finalized:
    def __init__(self):
        self.itself = self  # a cycle: only a collection frees it

    def __del__(self):
        time.sleep(0)  # lets go of the interpreter lock


def many_ask_at_once():
    """Return which threads end that ask where the main one stands, while garbage is collected."""
    main = threading.main_thread().ident

    def look(depth):
        return look(depth - 1) if depth else main_frame(main)

    def work():
        for _ in range(300):
            Finalized()
            look(10)

    gc.set_threshold(5)
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gc.isenabled()


def test_threads_that_ask_while_garbage_is_collected_go_on():
    assert run(many_ask_at_once, 1, record=False) == [True]
