"""What the host waits for in one step, counted by torch's profiler; each program says how many waits it may have.

    ranks(n).run(count_waits, "FullyShard", "cuda")   # on each rank: {"cudaStreamSynchronize": 0, ...}

On a GPU these are calls of CUDA that block the host, and copies to the host's memory. On a CPU nothing can block, and
only the reads of a tensor's value are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from distlab.comm import device
from distlab.data_parallel import DataParallel
from distlab.pipeline import Pipeline
from distlab.plan import one_f_one_b
from distlab.sharding import FullyShard, ShardedOptimizer

Step = Callable[[], None]
Training = tuple[nn.Module, Any, Callable[[], Any]]  # a model, its optimizer, what brings gradients together
BLOCKS_THE_HOST = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READS_A_VALUE = "aten::_local_scalar_dense"
TO_HOST = "Memcpy DtoH"
THE_STEP = "the step"
SIZE, NUM_LAYERS = 64, 4


def _net(place: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(NUM_LAYERS))).to(place)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


def _replicas(net: nn.Module, **options: bool) -> Training:
    return net, _sgd(net.parameters()), DataParallel(net, **options).synchronize


def _shards(net: nn.Module, **options: bool) -> Training:
    model = FullyShard(net, **options)
    return model, _sgd(model.parameters()), model.synchronize


def _zero(net: nn.Module, stage: int) -> Training:
    optimizer = ShardedOptimizer(net, _sgd, stage=stage)
    return net, optimizer, optimizer.synchronize


def _training(wrap: Callable[..., Training], **options: Any) -> Callable[[torch.device], Step]:
    def make(place: torch.device) -> Step:
        model, optimizer, synchronize = wrap(_net(place), **options)
        x = torch.randn(8, SIZE).to(place)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            synchronize()
            optimizer.step()

        return step

    return make


def _pipeline(place: torch.device) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(8, SIZE).to(place)
    pipeline = Pipeline({rank: _net(place)[rank]}, one_f_one_b(size, 4), loss=nn.functional.mse_loss)

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(x, x)

    return step


class Program(NamedTuple):
    """A step, the waits for a GPU that it may have, and why."""

    make: Callable[[torch.device], Step]
    allowed: int | None
    why: str


NUM_UNITS = NUM_LAYERS  # the root of the net has no parameters of its own
STEPS = {
    "DataParallel": Program(_training(_replicas), 1, "the flag of the last bucket is read before the update"),
    "DataParallel, NaN not looked for": Program(_training(_replicas, check_finite=False), 0, "the hosts talk by gloo"),
    "FullyShard": Program(_training(_shards), 0, "nothing is read"),
    "FullyShard, offloaded": Program(_training(_shards, offload=True), NUM_UNITS, "the host updates what arrived"),
    **{
        f"ZeRO-{stage}": Program(_training(_zero, stage=stage), None, "what became of gradients is read in every step")
        for stage in (1, 2)
    },
    "pipeline": Program(_pipeline, None, "the step returns its loss as a number"),
}


def count_waits(name: str, kind: str) -> dict[str, int]:
    """Run on each rank: count what the host waits for in one step of a program, after three that warm up.

    Raises:
        ValueError: a pipeline has more ranks than the net has layers.
    """
    if name == "pipeline" and dist.get_world_size() > NUM_LAYERS:
        raise ValueError(f"pipeline: {dist.get_world_size()} ranks, and the net has {NUM_LAYERS} layers; use fewer")
    place = device.device_of(kind, dist.get_rank())
    step = STEPS[name].make(place)
    for _ in range(3):
        step()
    device.synchronize(place)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_gpu(place) else [])]
    with profile(activities=activities) as seen, record_function(THE_STEP):
        step()
    events = seen.events() or []
    whole = next(event for event in events if event.name == THE_STEP and event.device_type == DeviceType.CPU)
    first, last = whole.time_range.start, whole.time_range.end
    inside = [event.name for event in events if first <= event.time_range.start <= last]  # not the profiler's own waits
    counts = {one: inside.count(one) for one in (*BLOCKS_THE_HOST, READS_A_VALUE)}
    return counts | {TO_HOST: sum(event.name.startswith(TO_HOST) for event in events)}


def num_waits(counts: dict[str, int]) -> int:
    """Return how often the host waited for a GPU: each is one blocking call."""
    return sum(counts[name] for name in BLOCKS_THE_HOST)
