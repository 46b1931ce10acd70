"""One training step of Pipeline against torch.distributed.pipelining's with the same schedule.

- A step is zero_grad, forward and backward of all micro-batches, and SGD. With the small GPT on 2 and 4 ranks it takes
  at most as long as torch's with the same schedule, stages and micro-batches. Both live in the same ranks and take
  turns block by block; a block's time is that of the slowest rank. Recording is off, one thread per rank.
- Real compute cannot be faster than the machine has cores: the speed-up over one process is for information.
  `pipeline_overlap.py` shows with stages that sleep that the schedules do what they promise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, noise, single
from _script import backend_of, run_script
from torch import Tensor, nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks
from distlab.comm.device import device_of, num_gpus
from distlab.measure import MIN_BLOCKS
from distlab.pipeline import Pipeline, split_gpt
from distlab.plan import Schedule, make_schedule

PEERS = {
    "gpipe": "ScheduleGPipe",
    "one_f_one_b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
}
CONFIG = GPTConfig(context=64, num_layers=8, num_heads=4, hidden_size=128, tied=False)
SAMPLES = 2  # in a micro-batch
LEARNING_RATE = 1e-3
Step = Callable[[], "Tensor | None"]


@dataclass(frozen=True)
class Setup:
    """What a step trains: the sizes of the GPT, samples of a micro-batch, and the type of its parameters."""

    config: GPTConfig = CONFIG
    samples: int = SAMPLES
    dtype: torch.dtype = torch.float32


SMALL = Setup()


def stages_of(schedule: Schedule, device: torch.device, setup: Setup = SMALL) -> dict[int, nn.Module]:
    """Build the GPT and keep this rank's stages of it."""
    stages = split_gpt(GPT(setup.config, torch.Generator().manual_seed(0)), schedule.num_stages)
    return {
        stage: stages[stage].to(device, setup.dtype)
        for stage, rank in enumerate(schedule.home)
        if rank == dist.get_rank()
    }


def batch_of(num_microbatches: int, device: torch.device, setup: Setup = SMALL) -> tuple[Tensor, Tensor]:
    """Draw tokens and targets, the same on each rank."""
    tokens = torch.randint(
        setup.config.vocab_size,
        (2, setup.samples * num_microbatches, setup.config.context),
        generator=torch.Generator().manual_seed(1),
    ).to(device)
    return tokens[0], tokens[1]


def our_step(name: str, num_microbatches: int, device: torch.device, setup: Setup = SMALL) -> Step:
    """Build Pipeline and return one training step of it."""
    schedule = make_schedule(name, dist.get_world_size(), num_microbatches)
    pipeline = Pipeline(stages_of(schedule, device, setup), schedule, loss=GPT.loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=LEARNING_RATE)
    inputs, targets = batch_of(num_microbatches, device, setup)

    def step() -> Tensor | None:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    return step


def torch_step(name: str, num_microbatches: int, device: torch.device, setup: Setup = SMALL) -> Step:
    """Build torch's pipeline with the same stages and return one training step of it."""
    from torch.distributed.pipelining import PipelineStage, schedules  # loads torch's compiler for seconds

    plan = make_schedule(name, dist.get_world_size(), num_microbatches)
    modules, kind = stages_of(plan, device, setup), getattr(schedules, PEERS[name])
    stages = [PipelineStage(module, index, plan.num_stages, device) for index, module in modules.items()]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, num_microbatches, loss_fn=GPT.loss)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=LEARNING_RATE)
    inputs, targets = batch_of(num_microbatches, device, setup)
    arguments = (inputs,) if 0 in modules else ()
    has_last = plan.num_stages - 1 in modules

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": targets, "losses": losses} if has_last else {}
        schedule.step(*arguments, **options)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def time_steps(
    name: str, num_microbatches: int, device_type: str, blocks: int, steps: int
) -> tuple[list[list[float]], list[float | None]]:
    """Run on each rank: time torch's step, ours and torch's again in interleaved blocks; return last losses too."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = device_of(device_type, rank)
    functions = [make(name, num_microbatches, device) for make in (torch_step, our_step, torch_step)]
    times = take_turns(functions, blocks, steps, device, warm=2)
    losses = [step() for step in functions]
    return times, [None if loss is None else float(loss) for loss in losses]


def step_alone(num_microbatches: int, blocks: int) -> list[float]:
    """Run on one rank: time a step of the whole model on the same micro-batches, one after the other."""
    torch.set_num_threads(1)
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = (part.chunk(num_microbatches) for part in batch_of(num_microbatches, torch.device("cpu")))
    times = []
    for _ in range(blocks + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        for x, wanted in zip(inputs, targets, strict=True):
            (GPT.loss(model(x), wanted) / num_microbatches).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times[1:]


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield, for each number of ranks and schedule: the bar, the noise, and the speed-up of real compute.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    by_value(__name__)
    backend = backend_of(device, 2)
    blocks, steps = (2, 1) if quick else (MIN_BLOCKS, 2)
    worlds = (2, 4) if device == "cpu" else (num_gpus(),)  # nccl wants a GPU a rank
    with Ranks(1, timeout_s=300, record=False) as ranks:
        alone = {world: float(np.median(ranks.run(step_alone, 2 * world, blocks)[0])) for world in worlds}
    for num_ranks in worlds:
        what = f"on {num_ranks} ranks ({device}, {backend})"
        with Ranks(num_ranks, timeout_s=600, backend=backend, record=False) as ranks:
            for name in PEERS:
                results = ranks.run(time_steps, name, 2 * num_ranks, device, blocks, steps)
                peer, ours, again = slowest([times for times, _ in results])
                losses = next(found for _, found in results if found[0] is not None)
                assert max(losses) - min(losses) < 1e-3, losses
                yield compare(f"a step of {name} {what} against torch.distributed.pipelining's", ours, peer)
                yield noise(f"a step of torch's {name} {what}", again, peer)
                if device == "cpu":
                    yield alone_row(name, num_ranks, alone[num_ranks], ours)


def alone_row(name: str, num_ranks: int, alone_s: float, ours: list[float]) -> Row:
    """The speed-up of real compute, beside what the cores allow."""
    cores = len(os.sched_getaffinity(0))
    speedup = [alone_s / one for one in ours]
    claim = f"speed-up of a step of {name} on {num_ranks} ranks over one process, real compute"
    return single(claim, speedup, "x", note=f"min(ranks, cores) is {min(num_ranks, cores)}")


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
