"""Traces as torch.profiler writes them on GPUs, made up: a host that launches kernels, streams that run them, nccl.

Names, categories and arguments are those of Kineto's Chrome traces (schemaVersion 1): `cuda_runtime` events launch what
the `kernel` event with the same correlation runs, on a stream of the GPU; autograd launches from a thread of its own;
nccl's kernels tell their collective, elements and ranks. Times are microseconds after `baseTimeNanoseconds`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

FAULTS = ("none", "host-bound", "straggler")
BASE_NS = 1_790_857_026_000_000_000
HOST, MAIN, AUTOGRAD, COMPUTE, NCCL = 4711, 4711, 4802, 7, 20


@dataclass(frozen=True)
class GpuJob:
    """One drawn run; times in microseconds."""

    num_ranks: int
    num_steps: int
    num_layers: int
    kernels_per_layer: int
    kernel_us: float
    launch_us: float
    num_buckets: int
    bucket_us: float
    data_us: float
    noise: float
    slow_rank: int = 0
    factor: float = 1.0


class SeededGpu(NamedTuple):
    """A document per rank, the fault, and the ranks to be named."""

    documents: list[dict[str, Any]]
    fault: str
    ranks: tuple[int, ...]


def draw(random: np.random.Generator) -> GpuJob:
    """Draw a run whose kernels take longer than launching them, with buckets that backward hides."""
    layers, kernels = int(random.integers(6, 16)), int(random.integers(4, 9))
    kernel_us, buckets = random.uniform(40, 200), int(random.integers(4, 7))
    return GpuJob(
        num_ranks=int(random.choice([2, 4, 8])),
        num_steps=int(random.integers(4, 8)),
        num_layers=layers,
        kernels_per_layer=kernels,
        kernel_us=kernel_us,
        launch_us=random.uniform(5, 12),
        num_buckets=buckets,
        bucket_us=2 * layers * kernels * kernel_us * random.uniform(0.2, 0.7) / buckets,
        data_us=random.uniform(20, 150),
        noise=random.uniform(0.005, 0.04),
    )


class _Rank:
    """Writes one rank's events while its host and its streams go on."""

    def __init__(self, rank: int, job: GpuJob, random: np.random.Generator, clock_us: float) -> None:
        self.rank, self.job, self.random = rank, job, random
        self.events: list[dict[str, Any]] = []
        self.host, self.free, self.nccl_free = clock_us, clock_us, clock_us
        self.number = 0

    def add(self, name: str, cat: str, tid: int, start: float, end: float, pid: int = HOST, **args: object) -> None:
        times = {"ts": round(start, 3), "dur": round(end - start, 3)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def noise(self) -> float:
        return float(np.exp(self.random.normal(0, self.job.noise)))

    def launch(self, name: str, thread: int, lasts_us: float, *, after: float = 0.0) -> float:
        """Let the host launch a kernel on the compute stream; return when it is over."""
        self.number += 1
        begin, self.host = self.host, self.host + self.job.launch_us * self.noise()
        self.add(f"aten::{name}", "cpu_op", thread, begin, self.host)
        self.add("cudaLaunchKernel", "cuda_runtime", thread, self.host - 3, self.host, correlation=self.number)
        start = max(self.host + 1, self.free, after)
        slow = self.job.factor if self.rank == self.job.slow_rank else 1.0
        self.free = start + lasts_us * slow * self.noise()
        args = {"correlation": self.number, "device": self.rank, "stream": COMPUTE}
        self.add(f"{name}_kernel", "kernel", COMPUTE, start, self.free, pid=self.rank, **args)
        return self.free

    def collect(self, start: float, end: float, num_bytes: int) -> None:
        """Note a bucket's kernel on nccl's stream."""
        ranks = str(list(range(self.job.num_ranks)))
        told = {"Collective name": "allreduce", "In msg nelems": num_bytes // 4, "dtype": "Float"}
        told |= {"Group size": self.job.num_ranks, "Process Group Ranks": ranks, "stream": NCCL}
        self.add("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel", NCCL, start, end, pid=self.rank, **told)
        self.nccl_free = end


def simulate_gpus(job: GpuJob, random: np.random.Generator, *, marked: bool, clocks_us: list[float]) -> list[_Rank]:
    """Run all steps of all ranks; the host waits for its GPU at the end of each step."""
    ranks = [_Rank(rank, job, random, 5e12 + clock) for rank, clock in enumerate(clocks_us)]
    for step in range(job.num_steps):
        begins, ready = [], []
        for one in ranks:
            begins.append(one.host)
            ready.append(_passes(one, job, marked))
        ends = [one.nccl_free for one in ranks]
        for bucket in range(job.num_buckets):
            starts = [max(full[bucket], one.nccl_free) for full, one in zip(ready, ranks, strict=True)]
            on_first_clock = [start - clock for start, clock in zip(starts, clocks_us, strict=True)]
            end = max(on_first_clock) + job.bucket_us * one.noise()
            for one, start, clock in zip(ranks, starts, clocks_us, strict=True):
                one.collect(start, end + clock, 4_000_000)
            ends = [end + clock for clock in clocks_us]
        for one, begin, synced in zip(ranks, begins, ends, strict=True):
            before = one.host
            for _ in range(6):
                one.launch("adamw", MAIN, job.kernel_us / 2, after=synced)
            one.add("Optimizer.step#AdamW.step", "user_annotation", MAIN, before, one.host)
            one.host = max(one.host, one.free)
            one.add(f"ProfilerStep#{step + 3}", "user_annotation", MAIN, begin, one.host)
    return ranks


def _passes(one: _Rank, job: GpuJob, marked: bool) -> list[float]:
    """Launch a rank's batch, forward and backward; return when each bucket is full."""
    before = one.host
    one.host += job.data_us * one.random.uniform(0.7, 1.3)
    one.add("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", MAIN, before, one.host)
    before = one.host
    for _ in range(job.num_layers * job.kernels_per_layer):
        one.launch("gemm", MAIN, job.kernel_us)
    if marked:
        one.add("## forward ##", "user_annotation", MAIN, before, one.host)
    full, before = [], one.host
    for _ in range(job.num_layers * job.kernels_per_layer):
        begin = one.host
        full.append(one.launch("gemm_backward", AUTOGRAD, 2 * job.kernel_us))
        one.add("autograd::engine::evaluate_function: MmBackward0", "cpu_op", AUTOGRAD, begin - 1, one.host)
    if marked:
        one.add("## backward ##", "user_annotation", MAIN, before, one.host)
    return [full[place] for place in np.linspace(0, len(full), job.num_buckets + 1).round().astype(int)[1:] - 1]


def document_of(one: _Rank) -> dict[str, Any]:
    """Return a rank's file."""
    told = {"backend": "nccl", "rank": one.rank, "world_size": one.job.num_ranks}
    more = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "deviceProperties": [{"id": 0}]}
    return more | {"distributedInfo": told, "host_name": f"node{one.rank}", "traceEvents": one.events}


def seeded_gpu(number: int) -> SeededGpu:
    """Return the run with this number: faults take turns; clocks are seconds apart, as between machines."""
    random = np.random.default_rng([21, number])
    fault = FAULTS[number % len(FAULTS)]
    job, ranks = draw(random), ()
    if fault == "straggler":
        ranks = (int(random.integers(job.num_ranks)),)
        job = replace(job, slow_rank=ranks[0], factor=random.uniform(1.2, 1.8))
    if fault == "host-bound":  # kernels are shorter than launching them
        job = replace(job, bucket_us=30.0, data_us=9.0)
        job = replace(job, kernel_us=random.uniform(2, 8), launch_us=random.uniform(12, 30))
    clocks = [0.0, *random.uniform(-3e6, 3e6, job.num_ranks - 1)]
    made = simulate_gpus(job, random, marked=bool(number % 2), clocks_us=clocks)
    return SeededGpu([document_of(one) for one in made], fault, ranks)
