"""Training on real ranks with a known fault in it, or none. Layers sleep while they "compute", links are throttled.

So the times of a run are known although the machine is shared: real processes, real DataParallel, real calls of gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import throttled
from distlab.data_parallel import DataParallel, average_flat
from distlab.profile import Profile, Profiler

FORWARD_S, UPDATE_S = 0.04, 0.01  # backward takes twice as long as forward
NAPS = 4
NUM_STEPS = 10


class Naps(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: list[float]) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds[0])
        return gradient, None


class Sleepy(nn.Module):
    """Linear layers, some of them with a nap; `seconds[0]` is how long one lasts."""

    def __init__(self, num_layers: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(num_layers))
        self.seconds = [FORWARD_S / NAPS]

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number % (len(self.layers) // NAPS) == 0:
                x = Naps.apply(x, self.seconds)
        return x.square().mean()


def profile_fault(fault: str, victim: int = 1) -> Profile:
    """Run on each rank: train with a fault on the victim, or on all ranks; return the profile of all ranks."""
    torch.manual_seed(0)
    rank, is_victim = dist.get_rank(), dist.get_rank() == victim
    small = fault == "small buckets"
    model = Sleepy(*((40, 16) if small else (NAPS, 256)))
    link = {"bytes_per_s": 1e9, "latency_s": 1.8e-3} if small else {"bytes_per_s": 18e6}
    overlaps = fault != "missing overlap"
    replicas = DataParallel(
        model, bucket_bytes=1_024 if small else 262_144, first_bucket_bytes=1_024 if small else 262_144
    )
    if not overlaps:
        replicas.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    profiler = Profiler(skip=2)
    slow = 1.5 if is_victim and fault in ("straggler", "imbalance") else 1.0
    nap_s = model.seconds[0]
    with throttled(**link) if dist.get_world_size() > 1 else nullcontext():
        slow_s = 0.06 if is_victim and fault == "slow loader" else 0.0
        for number, x in enumerate(profiler.steps(batches(model, slow_s=slow_s))):
            is_last = fault == "moving imbalance" and number % dist.get_world_size() == rank
            model.seconds[0] = nap_s * slow * (1.6 if is_last else 1.0)
            with profiler.section("forward"):
                loss = model(x)
            with profiler.section("backward"):
                loss.backward()
            with profiler.section("sync"):
                replicas.synchronize() if overlaps else average_flat(model.parameters())
                if not overlaps:
                    dist.barrier()  # a throttled link counts from each rank's own call: let them call together
            with profiler.section("optimizer"):
                time.sleep(UPDATE_S * (slow if fault == "straggler" else 1.0))
                optimizer.step()
            optimizer.zero_grad()
    if overlaps:
        replicas.close()
    return profiler.profile()


def batches(model: Sleepy, *, slow_s: float) -> Iterator[Tensor]:
    """Yield the batches of all steps; each takes so long to load."""
    for _ in range(NUM_STEPS + 2):
        time.sleep(slow_s)
        yield torch.ones(2, model.layers[0].in_features)
