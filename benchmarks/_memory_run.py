"""Measured over predicted memory: train a small GPT under a plan on real ranks, and keep what each rank held.

The same Plan goes to `simulator.memory.memory.memory_of` and to `measure_memory`, which builds what the plan says out
of the techniques: DataParallel (stage 0), ShardedOptimizer (1 and 2), FullyShard (3), recompute, accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks
from distlab.data_parallel import DataParallel
from distlab.measure import KINDS, device_of, track_memory, workload_from_module
from distlab.plan import Plan, Workload
from distlab.recompute import recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedOptimizer

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankMemory:
    """What one rank held during one step, after a step that made the optimizer's state.

    Attributes:
        times_ns: moments, from 0 at the start of the step [T].
        num_bytes: of each kind of KINDS from then on [T, K].
        allocator_bytes: the most that the GPU's allocator gave out; 0 on the CPU.
    """

    times_ns: Ints
    num_bytes: Ints
    allocator_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once; on a GPU as its allocator counts."""
        return max(int(self.num_bytes.sum(axis=1).max()), self.allocator_bytes)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind when the most was held."""
        row = self.num_bytes[self.num_bytes.sum(axis=1).argmax()]
        return dict(zip(KINDS, row.tolist(), strict=True))


@dataclass(frozen=True)
class Job:
    """What every rank trains.

    Attributes:
        plan: data, num_microbatches, bucket_bytes, sharding and recompute count; the rest must be at its default.
        config: the model.
        samples: in a micro-batch of a rank.
        limit_bytes: refuse to hold more on a rank.
        device: where ranks compute: "cpu" or "cuda".
    """

    plan: Plan
    config: GPTConfig
    samples: int = 4
    limit_bytes: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        sharding = self.plan.sharding
        if (self.plan.pipeline, self.plan.tensor, self.plan.context) != (1, 1, 1):
            raise ValueError("measured memory trains data-parallel plans; pass pipeline, tensor and context of 1")
        if self.plan.precision is not None or sharding.replicas != 1 or self.plan.recompute == "selective":
            raise ValueError("measured memory trains in float32, on one set of shards, with recompute none or full")

    def __call__(self) -> RankMemory:
        """Train two steps on this rank and return what the second held."""
        return train(self)


def measure_memory(job: Job, ranks: Ranks | None = None) -> list[RankMemory]:
    """Train a job on as many ranks as its plan has and return what each held; `ranks` saves starting them."""
    if ranks is not None:
        return list(ranks.run(job))
    with Ranks(job.plan.data, timeout_s=120, backend="gloo", record=False) as new:  # in shared memory buffers stay
        return list(new.run(job))


def workload_of(job: Job) -> Workload:
    """Count the job's model, for the simulator."""
    model, tokens = _model(job, 0)
    optimizer = _adam(model.parameters())
    counted = workload_from_module(model, lambda: GPT.loss(model(tokens), tokens), optimizer=optimizer)
    return replace(counted, samples=job.samples)


def train(job: Job) -> RankMemory:
    """Train two steps on this rank and return what the second held."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, tokens = _model(job, rank)
    if job.plan.recompute == "full":
        recompute_blocks(model)
    parts = _build(job.plan, model)
    with track_memory(parts.module, parts.tracked, limit_bytes=job.limit_bytes) as memory:
        for _ in range(2):
            memory.restart()
            parts.zero_grad()
            for left in reversed(range(job.plan.num_microbatches)):
                with parts.no_sync() if left else nullcontext():
                    _backward(parts.module, tokens, job.plan.num_microbatches)
            parts.synchronize()
            parts.step()
        times, rows = memory.over_time()
    parts.close()
    allocator_bytes = 0 if job.device == "cpu" else memory.peak_bytes
    return RankMemory(times, rows, allocator_bytes)


@dataclass(frozen=True)
class _Parts:
    """A technique's names for the parts of a step."""

    module: torch.nn.Module
    tracked: torch.optim.Optimizer | ShardedOptimizer
    zero_grad: Callable[[], None]
    synchronize: Callable[[], None]
    step: Callable[[], object]
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    close: Callable[[], None] = lambda: None


def _build(plan: Plan, model: GPT) -> _Parts:
    sharding = plan.sharding
    if sharding.stage == 3:
        whole = FullyShard(
            model,
            reshard_after_forward=sharding.reshard_after_forward,
            prefetch=sharding.prefetch,
            offload=sharding.offload == "all",
        )
        adam = _adam(whole.parameters())
        # Passes add up in shards; no_sync would keep whole gradients, a reduce-scatter less for Psi bytes more.
        return _Parts(whole, adam, whole.zero_grad, whole.synchronize, adam.step, close=whole.close)
    if sharding.stage:
        sharded = ShardedOptimizer(model, _adam, stage=sharding.stage, bucket_bytes=plan.bucket_bytes)
        steps = (sharded.zero_grad, sharded.synchronize, sharded.step)
        return _Parts(model, sharded, *steps, sharded.no_sync, sharded.close)
    adam = _adam(model.parameters())
    if plan.data == 1:
        return _Parts(model, adam, adam.zero_grad, lambda: None, adam.step)
    replicas = DataParallel(model, bucket_bytes=plan.bucket_bytes, first_bucket_bytes=plan.first_bucket_bytes)
    return _Parts(model, adam, replicas.zero_grad, replicas.synchronize, adam.step, replicas.no_sync, replicas.close)


def _adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)  # one parameter after the other: least temporary memory


def _model(job: Job, rank: int) -> tuple[GPT, Tensor]:
    device = device_of(job.device, rank)
    model = GPT(job.config, generator(0, 0, "weights")).to(device)
    shape = (job.samples, job.config.context)
    return model, torch.randint(job.config.vocab_size, shape, generator=generator(0, rank, "tokens")).to(device)


def _backward(module: torch.nn.Module, tokens: Tensor, num_microbatches: int) -> None:
    # A function of its own: what it names is let go when it returns.
    (GPT.loss(module(tokens), tokens) / num_microbatches).backward()
