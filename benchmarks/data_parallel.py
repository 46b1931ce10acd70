"""One training step of DataParallel against torch's DistributedDataParallel, and every rung of the ladder.

The bars: a step (zero_grad, forward, backward, synchronize, SGD) on 2 ranks takes at most as long as torch DDP's with
the same bucket sizes and gradient_as_bucket_view=True; so does a step that accumulates 4 micro-batches under no_sync,
and one that clips by the global norm. Ours also looks for NaN and names it; a row shows what that costs. All programs
live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time is that of the
slowest rank. Recording is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from _blocks import by_value, multilayer_perceptron, slowest, small_gpt, take_turns
from _rows import Row, compare, noise, without_bar
from _script import backend_of, run_script
from torch import nn

from distlab.blocks.clip import clip_gradients_
from distlab.comm import Ranks
from distlab.comm.device import device_of
from distlab.data_parallel import (
    Bucketed,
    DataParallel,
    HorovodOptimizer,
    Overlapped,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    train_step,
)
from distlab.measure import MIN_BLOCKS

BUCKET_MIB = 25
FIRST_BUCKET_BYTES = 1 << 20  # torch DDP's defaults, both; given a bucket_cap_mb it would make the first as large
RUNGS = ("per_parameter", "flat", "bucketed", "overlapped")
WITHOUT_BAR = ("DataParallel, NaN not looked for", "HorovodOptimizer", *RUNGS, "no communication")
VARIANTS = {", 4 micro-batches": "that accumulates 4 micro-batches", ", clipped": "that clips by the global norm"}
PROGRAMS = (
    *("torch DDP", "DataParallel", "torch DDP again"),
    *(f"{program}{variant}" for variant in VARIANTS for program in ("torch DDP", "DataParallel")),
    *WITHOUT_BAR,
)
LEARNING_RATE = 1e-3
MAX_NORM = 0.1


MODELS = {"multilayer perceptron": multilayer_perceptron, "small GPT": small_gpt}


def step_of(program: str, model_name: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """Build a program's model and return one training step of it."""
    torch.manual_seed(0)
    module, inputs, targets, loss_fn = MODELS[model_name](device)
    called: nn.Module = module
    synchronize: Callable[[], None] | None = None
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    optimizer: torch.optim.Optimizer | HorovodOptimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    if program.startswith("torch DDP"):
        called = ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        no_sync = ddp.no_sync
    elif program.startswith("DataParallel"):
        replicas = DataParallel(
            module,
            bucket_bytes=BUCKET_MIB << 20,
            first_bucket_bytes=FIRST_BUCKET_BYTES,
            check_finite=not program.endswith("NaN not looked for"),
        )
        synchronize, no_sync = replicas.synchronize, replicas.no_sync
    elif program == "HorovodOptimizer":
        broadcast_parameters(module)
        optimizer = HorovodOptimizer(optimizer, module.named_parameters(), fusion_bytes=BUCKET_MIB << 20)
    elif program in RUNGS:
        broadcast_parameters(module)
        synchronize = {
            "per_parameter": lambda: partial(average_per_parameter, list(module.parameters())),
            "flat": lambda: partial(average_flat, list(module.parameters())),
            "bucketed": lambda: Bucketed(module, None, BUCKET_MIB << 20).synchronize,
            "overlapped": lambda: Overlapped(module, None, BUCKET_MIB << 20).synchronize,
        }[program]()
    batch = inputs, targets
    if program.endswith("4 micro-batches"):
        return lambda: accumulated_step(called, optimizer, synchronize, no_sync=no_sync, batch=batch, loss_fn=loss_fn)
    if program == "torch DDP, clipped":
        synchronize = partial(nn.utils.clip_grad_norm_, list(module.parameters()), MAX_NORM)
    elif program == "DataParallel, clipped":
        synchronize = partial(averaged_and_clipped, synchronize, list(module.parameters()))
    return partial(train_step, called, optimizer, batch=batch, loss_fn=loss_fn, synchronize=synchronize)


def accumulated_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    synchronize: Callable[[], None] | None,
    *,
    no_sync: Callable[[], AbstractContextManager],
    batch: tuple[torch.Tensor, torch.Tensor],
    loss_fn: Callable,
) -> torch.Tensor:
    """Run one update from 4 micro-batches, of which the last is sent."""
    optimizer.zero_grad()
    *first, last = zip(*(tensor.chunk(4) for tensor in batch), strict=True)
    with no_sync():
        for inputs, targets in first:
            (loss_fn(module(inputs), targets) / 4).backward()
    loss = loss_fn(module(last[0]), last[1])
    (loss / 4).backward()
    if synchronize is not None:
        synchronize()
    optimizer.step()
    return loss.detach()


def averaged_and_clipped(synchronize: Callable[[], None], parameters: list[nn.Parameter]) -> None:
    """Average gradients, then clip them; the norm was checked with them."""
    synchronize()
    clip_gradients_(parameters, MAX_NORM, check_finite=False)


def time_programs(model_name: str, device_type: str, blocks: int, steps: int) -> tuple[list[list[float]], list[float]]:
    """On each rank: time programs in interleaved blocks; return seconds per step and each program's last loss."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = device_of(device_type, rank)
    step_functions = [step_of(program, model_name, device) for program in PROGRAMS]

    times = take_turns(step_functions, blocks, steps, device)  # torch DDP builds its buckets anew after its first step
    return times, [float(step()) for step in step_functions]


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield, for each model: the bar, the noise, and each rung's step against torch DDP's.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    by_value(__name__)
    backend = backend_of(device, 2)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS + 4, 4)
    with Ranks(2, timeout_s=600, backend=backend, record=False) as ranks:
        for model_name in MODELS:
            results = ranks.run(time_programs, model_name, device, blocks, steps)
            times = dict(zip(PROGRAMS, slowest([times for times, _ in results]), strict=True))
            losses = dict(zip(PROGRAMS, results[0][1], strict=True))
            for program in set(PROGRAMS) - {"no communication"}:
                like = "torch DDP" + next((v for v in VARIANTS if program.endswith(v)), "")
                assert abs(losses[program] - losses[like]) < 1e-3, losses
            what = f"of the {model_name} on 2 ranks ({device}, {backend})"
            peer = times["torch DDP"]
            yield compare(f"a DataParallel step {what} against torch DDP's", times["DataParallel"], peer)
            yield noise(f"a torch DDP step {what}", times["torch DDP again"], peer)
            for variant, words in VARIANTS.items():
                ours, other = times[f"DataParallel{variant}"], times[f"torch DDP{variant}"]
                yield compare(f"a DataParallel step {words}, {what} against torch DDP's", ours, other)
            for program in WITHOUT_BAR:
                claim = f"ladder: {program}, a step {what} against torch DDP's"
                yield without_bar(compare(claim, times[program], peer))


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
