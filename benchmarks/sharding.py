"""One training step with ZeRO-1 and ZeRO-2 against torch DDP's with its ZeroRedundancyOptimizer.

A step is forward, backward, synchronize and AdamW. The bars: on 2 and 4 ranks ShardedOptimizer's takes at most as long
as torch DDP's with ZeroRedundancyOptimizer. Its gradients, optimizer state and communication buffers take at most as
much memory at their peak. torch has no ZeRO-2 of its own: both stages are compared with its ZeRO-1. FSDP's rows are in
`sharding_units.py`.

All programs live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time
is that of the slowest rank. Recording is off. Peaks are counted by storages, each once: after every gradient of a
backward pass, and after the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, multilayer_perceptron, slowest, small_gpt, timed
from _rows import Row, absolute, compare, noise, without_bar
from _script import backend_of, run_script
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from distlab.comm import Ranks
from distlab.comm.device import device_of
from distlab.measure import MIN_BLOCKS, interleave
from distlab.sharding import ShardedOptimizer

BUCKET_MIB = 1  # a few of them in the small GPT
RATE = 1e-3
PEER = "torch DDP and ZeroRedundancyOptimizer"
OURS = {"ZeRO-1": {"stage": 1}, "ZeRO-2": {"stage": 2}, "ZeRO-1, whole tensors": {"stage": 1, "split": "tensors"}}
PROGRAMS = (PEER, *OURS, f"{PEER} again", "torch DDP, AdamW on every rank")


MODELS = {"multilayer perceptron": multilayer_perceptron, "small GPT": small_gpt}


class Program:
    """A model, its optimizer, and one step of them.

    Attributes:
        held: gradients, optimizer state and buffers that live now, apart from the module's own gradients.
    """

    def __init__(self, name: str, model_name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.module, self.inputs, self.targets, self.loss_fn = MODELS[model_name](device)
        self.peak_bytes = 0
        self.watching = False
        if name in OURS:
            self.sharded = ShardedOptimizer(self.module, adamw, bucket_bytes=BUCKET_MIB << 20, **OURS[name])
            self.called, self.optimizer = self.module, self.sharded.optimizer
        else:
            self.sharded = None
            self.called = nn.parallel.DistributedDataParallel(
                self.module, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
            )
            parameters = self.module.parameters()
            sharded = name.startswith(PEER)
            self.optimizer = (
                ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=RATE) if sharded else adamw(parameters)
            )
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.look)

    def step(self) -> Tensor:
        """Run one update."""
        loss = self.loss_fn(self.called(self.inputs), self.targets)
        loss.backward()
        stepping = self.optimizer if self.sharded is None else self.sharded
        if self.sharded is not None:
            self.sharded.synchronize()
        stepping.step()
        self.look()
        stepping.zero_grad()
        return loss.detach()

    def look(self, _: Tensor | None = None) -> None:
        """Count what is held now."""
        if self.watching:
            held = [p.grad for p in self.module.parameters()]
            inner = self.optimizer.optim if hasattr(self.optimizer, "optim") else self.optimizer
            held += [value for state in inner.state.values() for value in state.values()]
            held += [] if self.sharded is None else self.sharded.gradient_tensors
            self.peak_bytes = max(self.peak_bytes, storage_bytes(held))

    def measure_peak(self) -> int:
        """Run a step and return the most bytes that gradients, optimizer state and buffers took."""
        self.watching = True
        self.step()
        self.watching = False
        return self.peak_bytes


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build AdamW over parameters, or over pieces of them."""
    return torch.optim.AdamW(parameters, lr=RATE)


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(model_name: str, device_type: str, blocks: int, steps: int) -> tuple[list[list[float]], list[int], list]:
    """On each rank: time programs in interleaved blocks; return seconds per step, peak bytes and early losses."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    device = device_of(device_type, rank)
    programs = [Program(name, model_name, device) for name in PROGRAMS]

    for program in programs:
        timed(program.step, 3, device)()  # torch DDP builds its buckets anew after its first step
    losses = [float(program.step()) for program in programs]
    times = interleave([timed(program.step, steps, device) for program in programs], blocks)
    peaks = [program.measure_peak() for program in programs]
    for program in programs:
        if program.sharded is not None:
            program.sharded.close()
    return times, peaks, losses


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield the rows of ZeRO-1 and ZeRO-2 on 2 and on 4 ranks.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    by_value(__name__)
    for world_size in (2, 4):
        yield from optimizer_rows(world_size, quick, device)


def optimizer_rows(world_size: int, quick: bool, device: str) -> Iterator[Row]:
    """Yield the rows of ZeRO-1 and ZeRO-2 at one number of ranks."""
    backend = backend_of(device, world_size)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS + 4, 4)
    with Ranks(world_size, timeout_s=600, backend=backend, record=False) as ranks:
        for model_name in MODELS:
            results = ranks.run(measure, model_name, device, blocks, steps)
            times = dict(zip(PROGRAMS, slowest([times for times, _, _ in results]), strict=True))
            peaks = dict(zip(PROGRAMS, np.asarray([peak for _, peak, _ in results]).max(axis=0).tolist(), strict=True))
            losses = dict(zip(PROGRAMS, results[0][2], strict=True))
            assert all(abs(loss - losses[PEER]) < 1e-5 for loss in losses.values()), losses
            what = f"of the {model_name} on {world_size} ranks ({device}, {backend})"
            for name in OURS:
                row = compare(f"a {name} step {what} against {PEER}", times[name], times[PEER])
                yield row if name != "ZeRO-1, whole tensors" else without_bar(row)
            yield noise(f"a step {what}, {PEER}", times[f"{PEER} again"], times[PEER])
            name = "torch DDP, AdamW on every rank"
            yield without_bar(compare(f"a step {what}, {name}, against {PEER}", times[name], times[PEER]))
            for name in OURS:
                claim = f"gradients, optimizer state and buffers at their peak, {name}, {what} against {PEER}"
                row = absolute(
                    claim, [peaks[name] / peaks[PEER]], bar=1.0, unit="x", note=f"{peaks[name] / 1e6:.1f} MB"
                )
                yield row if name != "ZeRO-1, whole tensors" else without_bar(row)


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
