"""One training step of DataParallel against torch's DistributedDataParallel, and every rung of the ladder.

The bar: a step (zero_grad, forward, backward, synchronize, SGD) on 2 ranks takes at most as long as torch DDP's with
the same bucket sizes and gradient_as_bucket_view=True. All programs live in the same ranks and take turns block by
block; a block is some steps after a barrier, and its time is that of the slowest rank. Recording is off.

    python benchmarks/data_parallel.py            # rows
    python benchmarks/data_parallel.py --quick    # few blocks: shows that it runs
    python benchmarks/data_parallel.py --device cuda
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distlab.comm import Ranks
from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import (
    Bucketed,
    DataParallel,
    Overlapped,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    train_step,
)
from distlab.measure.ratio import MIN_BLOCKS, Row, compare, format_rows, interleave, noise
from distlab.models import GPT, GPTConfig

BUCKET_MIB = 25
FIRST_BUCKET_BYTES = 1 << 20  # torch DDP's defaults, both; given a bucket_cap_mb it would make the first as large
RUNGS = ("per_parameter", "flat", "bucketed", "overlapped")
PROGRAMS = ("torch DDP", "DataParallel", "torch DDP again", *RUNGS, "no communication")
LEARNING_RATE = 1e-3


def multilayer_perceptron(device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Callable]:
    """Return a model with large matrices, a batch and a loss: 8 million parameters, much to send."""
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    x = torch.randn(64, 512, device=device)
    return nn.Sequential(*layers).to(device), x, torch.zeros_like(x), nn.functional.mse_loss


def small_gpt(device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Callable]:
    """Return the small GPT, a batch of real text and its loss: 53 parameters, most of them small."""
    config = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = ByteCorpus(python_documentation(), config.context)
    inputs, targets = corpus.batch(0, 4 * world_size, rank=rank, world_size=world_size)
    return GPT(config).to(device), inputs.to(device), targets.to(device), GPT.loss


MODELS = {"multilayer perceptron": multilayer_perceptron, "small GPT": small_gpt}


def step_of(program: str, model_name: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """Build a program's model and return one training step of it."""
    torch.manual_seed(0)
    module, inputs, targets, loss_fn = MODELS[model_name](device)
    called: nn.Module = module
    synchronize: Callable[[], None] | None = None
    if program.startswith("torch DDP"):
        called = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    elif program == "DataParallel":
        synchronize = DataParallel(
            module, bucket_bytes=BUCKET_MIB << 20, first_bucket_bytes=FIRST_BUCKET_BYTES
        ).synchronize
    elif program in RUNGS:
        broadcast_parameters(module)
        synchronize = {
            "per_parameter": lambda: partial(average_per_parameter, list(module.parameters())),
            "flat": lambda: partial(average_flat, list(module.parameters())),
            "bucketed": lambda: Bucketed(module, None, BUCKET_MIB << 20).synchronize,
            "overlapped": lambda: Overlapped(module, None, BUCKET_MIB << 20).synchronize,
        }[program]()
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    return partial(train_step, called, optimizer, batch=(inputs, targets), loss_fn=loss_fn, synchronize=synchronize)


def time_programs(model_name: str, device_type: str, blocks: int, steps: int) -> tuple[list[list[float]], list[float]]:
    """Run on each rank: time the programs in interleaved blocks; return seconds a step and each program's last loss."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = torch.device(device_type, rank % torch.cuda.device_count() if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    step_functions = [step_of(program, model_name, device) for program in PROGRAMS]

    def block(step: Callable[[], torch.Tensor], num_steps: int = steps) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / num_steps

    for step in step_functions:
        block(step, 3)  # torch DDP builds its buckets anew after its first step
    times = interleave([partial(block, step) for step in step_functions], blocks)
    return times, [float(step()) for step in step_functions]


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield, for each model: the bar, the noise, and each rung's step against torch DDP's.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no GPU here; leave --device out")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    backend = "nccl" if device == "cuda" and torch.cuda.device_count() >= 2 else "gloo"
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS + 4, 4)
    with Ranks(2, timeout_s=600, backend=backend, record=False) as ranks:
        for model_name in MODELS:
            results = ranks.run(time_programs, model_name, device, blocks, steps)
            slowest = np.asarray([times for times, _ in results]).max(axis=0).tolist()
            times = dict(zip(PROGRAMS, slowest, strict=True))
            losses = dict(zip(PROGRAMS, results[0][1], strict=True))
            assert all(abs(losses[p] - losses["torch DDP"]) < 1e-3 for p in PROGRAMS[:-1]), losses
            what = f"of the {model_name} on 2 ranks ({device}, {backend})"
            peer = times["torch DDP"]
            yield compare(f"a DataParallel step {what} against torch DDP's", times["DataParallel"], peer)
            yield noise(f"a torch DDP step {what}", times["torch DDP again"], peer)
            for program in (*RUNGS, "no communication"):
                yield context_row(f"ladder: {program}, a step {what} against torch DDP's", times[program], peer)


def context_row(claim: str, ours: list[float], peer: list[float]) -> Row:
    """Make a row that informs and has no bar."""
    row = compare(claim, ours, peer)
    return Row(row.claim, row.ours, row.peer, row.ratio, row.interval, row.unit, "-", None, row.note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    for row in rows(arguments.quick, arguments.device):
        print(format_rows([row]), flush=True)


if __name__ == "__main__":
    main()
