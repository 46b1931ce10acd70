"""Programs that take turns on the same ranks, and the models that they train.

A block is some steps after a barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm.device import synchronize
from distlab.measure import interleave

CPU = torch.device("cpu")
Model = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]  # with a batch, its targets and a loss


def by_value(*names: str) -> None:
    """Send what ranks run of these modules, and of this one, with its text: ranks cannot import a script."""
    for name in (*names, __name__):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def seconds_of(function: Callable[[], object]) -> float:
    """Return what a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def timed(step: Callable[[], object], repeats: int, device: torch.device = CPU) -> Callable[[], float]:
    """Return a program that meets the others and takes the time of a step, the mean of some."""

    def program() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        synchronize(device)
        return (time.perf_counter() - begin) / repeats

    return program


def take_turns(
    steps: Sequence[Callable[[], object]], blocks: int, repeats: int, device: torch.device = CPU, *, warm: int = 3
) -> list[list[float]]:
    """Run on each rank: return the seconds per step of each program, by interleaved block, after some that warm up."""
    for step in steps:
        timed(step, warm, device)()
    return interleave([timed(step, repeats, device) for step in steps], blocks)


def slowest(per_rank: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return each program's time in each block: that of the rank that took longest."""
    found: list[list[float]] = np.asarray(per_rank).max(axis=0).tolist()
    return found


def largest(times: object) -> list[Any]:
    """Run on each rank: return the larger of the ranks' times, in whatever order they stand."""
    tensor = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return cast(list[Any], tensor.tolist())


def alone(function: Callable[..., object], *args: object) -> object:
    """Call a function on a rank that leaves its group first, and joins one of its own."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = function(*args)
    dist.destroy_process_group()
    return found


def multilayer_perceptron(device: torch.device) -> Model:
    """Return a model with large matrices: 8 million parameters in 4 layers, much to send and to update."""
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    x = torch.randn(64, 512, device=device)
    return nn.Sequential(*layers).to(device), x, torch.zeros_like(x), nn.functional.mse_loss


def small_gpt(device: torch.device) -> Model:
    """Return the small GPT and a batch of real text: 53 parameters, most of them small."""
    config = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = ByteCorpus(python_documentation(), config.context)
    inputs, targets = corpus.batch(0, 4 * world_size, rank=rank, world_size=world_size)
    return GPT(config).to(device), inputs.to(device), targets.to(device), GPT.loss
