"""One training step of FullyShard against torch FSDP2's (fully_shard), and the most memory that each holds.

The bars: a step (zero_grad, forward, backward, synchronize, SGD) on 2 and on 4 ranks takes at most 0.8 times as long as
FSDP2's with the same units (CPU, gloo; 1.0 times on a GPU), and holds at most as many bytes at its peak. All programs
live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time is that of the
slowest rank. Recording is off. Memory: what torch's allocator gave out since the model was built, at
its highest in the third step; gloo's own tensors are in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, multilayer_perceptron, slowest, small_gpt, take_turns
from _rows import Row, compare, compare_counts, noise, without_bar
from _script import backend_of, run_script
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from distlab.blocks.models import GPT
from distlab.comm import Ranks
from distlab.comm.device import allocated_bytes, device_of, num_gpus, peak_bytes, reset_peak
from distlab.measure import MIN_BLOCKS
from distlab.sharding import FullyShard

PROGRAMS = (
    "torch FSDP2",
    "FullyShard",
    "torch FSDP2 again",
    "torch FSDP2, whole until backward",
    "FullyShard, whole until backward",
    "FullyShard, no prefetch",
)
LEARNING_RATE = 1e-3


MODELS = {"multilayer perceptron": multilayer_perceptron, "small GPT": small_gpt}


def units_of(module: nn.Module) -> list[str]:
    """Return the names of a model's units: the blocks of a GPT, or the layers of a perceptron."""
    return [f"blocks.{index}" for index in range(len(module.blocks))] if isinstance(module, GPT) else list("0123")


def step_of(
    program: str, model_name: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> Callable[[], torch.Tensor]:
    """Build a program's model over a group, of all ranks by default, and return one training step of it."""
    torch.manual_seed(0)
    module, inputs, targets, loss_fn = MODELS[model_name](device)
    units = units_of(module)
    torch.manual_seed(dist.get_rank())
    whole = program.endswith("whole until backward")
    model: nn.Module
    synchronize: Callable[[], None] | None = None
    if program.startswith("torch FSDP2"):
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, device.type)
        for name in units:
            fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=not whole)
        model = fully_shard(module, mesh=mesh, reshard_after_forward=not whole)
    else:
        model = sharded = FullyShard(
            module,
            group=group,
            units=units,
            reshard_after_forward=not whole,
            prefetch=0 if program.endswith("no prefetch") else 1,
        )
        synchronize = sharded.synchronize
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        if synchronize is not None:
            synchronize()
        optimizer.step()
        return loss.detach()

    return step


def time_programs(
    model_name: str, device_type: str, blocks: int, steps: int
) -> tuple[list[list[float]], list[float], list[float]]:
    """On each rank: time programs in interleaved blocks; return seconds per step, last losses and peak bytes."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = device_of(device_type, rank)
    peaks, functions = [], []
    for program in PROGRAMS:
        peak, step = peak_of(program, model_name, device)
        peaks.append(peak)
        functions.append(step)

    times = take_turns(functions, blocks, steps, device)
    return times, [float(step()) for step in functions], peaks


def peak_of(program: str, model_name: str, device: torch.device) -> tuple[float, Callable[[], torch.Tensor]]:
    """Build a program and return the most bytes that its third step holds, with the step."""
    gc.collect()  # what an earlier program left would count as ours
    if device.type == "cuda":
        before = allocated_bytes(device)
        step = step_of(program, model_name, device)
        step(), step()
        reset_peak(device)
        step()
        return float(peak_bytes(device) - before), step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = step_of(program, model_name, device)
        step(), step()
        gc.collect()
        with record_function("the third step"):
            step()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in events if event.name() == "the third step")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = np.cumsum([num_bytes for _, num_bytes in changes])
    return float(max(now for (time_ns, _), now in zip(changes, held, strict=True) if time_ns >= begin)), step


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield, for each model and number of ranks: the two bars, the noise, and variants.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    by_value(__name__)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS, 4)
    worlds = (2, 4) if device == "cpu" else (num_gpus(),)  # nccl wants a GPU a rank
    for num_ranks in worlds:
        backend = backend_of(device, num_ranks)
        with Ranks(num_ranks, timeout_s=600, backend=backend, record=False) as ranks:
            for model_name in MODELS:
                results = ranks.run(time_programs, model_name, device, blocks, steps)
                yield from _rows_of(results, f"of the {model_name} on {num_ranks} ranks ({device}, {backend})", device)


def _rows_of(
    results: list[tuple[list[list[float]], list[float], list[float]]], what: str, device: str
) -> Iterator[Row]:
    times = dict(zip(PROGRAMS, slowest([times for times, _, _ in results]), strict=True))
    losses = dict(zip(PROGRAMS, results[0][1], strict=True))
    highest = dict(zip(PROGRAMS, np.asarray([peaks for _, _, peaks in results]).max(axis=0).tolist(), strict=True))
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses
    bar = 0.8 if device == "cpu" else 1.0
    peer, whole = "torch FSDP2", "whole until backward"
    yield compare(f"a FullyShard step {what} against torch FSDP2's", times["FullyShard"], times[peer], bar=bar)
    yield compare_counts(
        f"peak memory of a FullyShard step {what} against torch FSDP2's",
        highest["FullyShard"],
        highest[peer],
        note="torch's allocator, gloo's tensors included" if device == "cpu" else "torch's allocator",
    )
    yield noise(f"a torch FSDP2 step {what}", times["torch FSDP2 again"], times[peer])
    yield without_bar(
        compare(
            f"a FullyShard step, parameters whole until backward, {what} against torch FSDP2's likewise",
            times[f"FullyShard, {whole}"],
            times[f"torch FSDP2, {whole}"],
        )
    )
    yield without_bar(
        compare(
            f"a FullyShard step without prefetch {what} against torch FSDP2's",
            times["FullyShard, no prefetch"],
            times[peer],
        )
    )


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
