"""The order of work on a GPU, proved by a double of torch.cuda: no race, memory kept long enough, no needless wait."""

import pytest
import torch
import torch.distributed as dist
from fake_cuda import fake_gpu
from torch import nn

from distlab.comm import device
from distlab.comm.device import CopyStream, GpuClock
from distlab.data_parallel import DataParallel
from distlab.pipeline import Pipeline
from distlab.plan import one_f_one_b
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.sharding.fsdp import gradient
from distlab.trace import SpanWriter

NUM_STEPS = 3
pytestmark = pytest.mark.gloo("its GPU is a double; backend shared moves CPU tensors alone")


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def steps(gpu, forward, synchronize, update, zero_grad):
    """Run some steps; return what the double saw in the last one, after those that warm up."""
    for _ in range(NUM_STEPS):
        gpu.forget()
        forward().backward()
        synchronize()
        update()
        zero_grad()
    return {"races": gpu.races, "waits": gpu.waits, "pinned": gpu.pinned, "launched": gpu.launched}


def data_parallel(gpu, **options):
    model = net()
    replicas = DataParallel(model, bucket_bytes=200, first_bucket_bytes=200, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    found = steps(gpu, lambda: model(x).square().mean(), replicas.synchronize, optimizer.step, optimizer.zero_grad)
    return found | {"buckets": replicas.num_buckets}


def fully_shard(gpu, *, zero=True, **options):
    model = FullyShard(net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    zero_grad = optimizer.zero_grad if zero else lambda: None
    found = steps(gpu, lambda: model(x).square().mean(), model.synchronize, optimizer.step, zero_grad)
    return found | {"units": len(model.units)}


def sharded_optimizer(gpu, **options):
    model = net()
    optimizer = ShardedOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1), bucket_bytes=200, **options)
    x = torch.randn(5, 6)
    return steps(gpu, lambda: model(x).square().mean(), optimizer.synchronize, optimizer.step, optimizer.zero_grad)


def pipeline(gpu):
    rank = dist.get_rank()
    run = Pipeline({rank: net()[rank]}, one_f_one_b(dist.get_world_size(), 4), loss=nn.functional.mse_loss)
    x = torch.randn(8, 6)
    for _ in range(NUM_STEPS):
        gpu.forget()
        run.step(x, x)
        run.zero_grad()
    return {"races": gpu.races, "waits": gpu.waits, "launched": gpu.launched}


def seen(program, fault=None, **options):
    """Run on each rank: a program on the double, perhaps with a fault, or without the waits for a call of c10d."""
    with pytest.MonkeyPatch.context() as patch:
        if fault in FAULTS:
            patch.setattr(*FAULTS[fault])
        with fake_gpu(deaf_to=fault or "") as gpu:
            return program(gpu, **options)


FAULTS = {
    "copies do not wait for what makes their source": (
        CopyStream,
        "after_current",
        lambda stream: device.cuda.stream(stream._stream),
    ),
    "the allocator is told nothing": (CopyStream, "keep", lambda stream, tensor: None),
    "the host does not wait": (gradient, "wait_for_event", lambda event: None),
}


def all_of(programs):
    """Run on each rank: several programs, by name."""
    return {name: seen(*call[:2], **(call[2] if len(call) > 2 else {})) for name, call in programs.items()}


PROGRAMS = {  # a program, and the call of c10d for which nobody waits where a race is to be found
    "replicas": (data_parallel, "allreduce_"),
    "replicas, unchecked": (data_parallel, "allreduce_", {"check_finite": False}),
    "shards": (fully_shard, "_allgather_base_"),
    "shards, far ahead": (fully_shard, "_allgather_base_", {"prefetch": 3, "reshard_after_forward": False}),
    "stage 1": (sharded_optimizer, "allreduce_", {"stage": 1}),
    "stage 2": (sharded_optimizer, "_reduce_scatter_base_", {"stage": 2}),
    "pipeline": (pipeline, "recv_"),
}


def test_nothing_races_and_the_host_waits_for_the_flag_of_replicas_alone(ranks):
    for found in ranks(2).run(all_of, {name: (call[0], None, *call[2:]) for name, call in PROGRAMS.items()}):
        assert {name: one["races"] for name, one in found.items()} == dict.fromkeys(PROGRAMS, [])
        replicas = found["replicas"]
        assert replicas["waits"] == ["_local_scalar_dense"]
        assert [op for _, op in replicas["launched"]] == ["allreduce_"] * replicas["buckets"]
        for name in ("replicas, unchecked", "shards", "shards, far ahead"):
            assert found[name]["waits"] == [], name
    for found in ranks(2).run(all_of, {name: call for name, call in PROGRAMS.items() if name != "stage 1"}):
        assert [name for name, one in found.items() if not one["races"]] == []
        assert any("writes" in race and "nccl" in race for race in found["replicas"]["races"])


def test_offloaded_shards_are_copied_next_to_the_kernels_and_waited_for_at_the_end(ranks):
    programs = {
        "offloaded": (fully_shard, None, {"offload": True}),
        "adding up": (fully_shard, None, {"offload": True, "zero": False}),
        "late source": (fully_shard, "copies do not wait for what makes their source", {"offload": True}),
        "not kept": (fully_shard, "the allocator is told nothing", {"offload": True}),
        "no wait": (fully_shard, "the host does not wait", {"offload": True}),
    }
    for found in ranks(2).run(all_of, programs):
        offloaded, adding = found["offloaded"], found["adding up"]
        assert offloaded["races"] == adding["races"] == []
        assert len(offloaded["waits"]) == offloaded["units"], "once for each unit's gradient, when backward is over"
        assert offloaded["pinned"] == 2 * offloaded["units"], "a shard and a gradient each, made once"
        assert adding["pinned"] == 3 * adding["units"]
        streams = {stream for stream, op in offloaded["launched"] if op == "copy"}
        assert len(streams) == 2
        assert "compute" not in streams, "one stream for each direction, apart from the one that computes"
        assert any("writes" in race for race in found["late source"]["races"])
        assert any("freed" in race for race in found["not kept"]["races"])
        assert any("in host uses what copy_" in race for race in found["no wait"]["races"])


def test_spans_of_a_gpu_end_when_its_events_do(ranks):
    """A call that is waited for late: its span ends when its own stream is done with it, so the overlap is seen."""

    def draw():
        with fake_gpu() as gpu:
            spans = SpanWriter(dist.get_rank(), GpuClock(torch.device("cpu")))
            call = spans.call()
            work = dist.all_reduce(x := torch.ones(3), async_op=True)
            call.follow(work)
            with spans.span("compute", kind="B"):
                for _ in range(5):
                    y = torch.ones(2) + 1
            work.wait()
            call.draw("all_reduce", "all_reduce", lane="communication", num_bytes=12)
            assert gpu.waits == ["device, compute"] + 5 * ["event of compute"], "only when the clock is made"
            assert not gpu.races
            return {span.lane: span for span in spans.trace()}, x.sum() + y.sum()

    for drawn, _ in ranks(2).run(draw):
        call, compute = drawn["communication"], drawn["compute"]
        assert call.start_ns < call.end_ns < compute.end_ns
