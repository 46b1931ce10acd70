"""One training step with each compressor, against torch DDP plain and with torch's own hooks.

The bars: with `Cast(float16)` a step takes at most as long as torch DDP's with `fp16_compress_hook`, and with
`PowerSGD` at most as long as with `powerSGD_hook`, at equal settings. The other compressors have no peer in torch:
their rows say what a step costs beside plain torch DDP on a link that is as fast as memory, where compression can only
lose. When it wins is a matter of the link (benchmarks/throttled.py).

All programs live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time
is that of the slowest rank. PowerSGD is compared with one bucket on both sides: torch's hook starts its second
all-reduce from a callback of the first, and with several buckets on gloo it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, multilayer_perceptron, slowest, take_turns
from _rows import Row, compare, noise, single, without_bar
from _script import backend_of, run_script
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from distlab.blocks.gradient_hook import GradientHook
from distlab.comm import Ranks
from distlab.comm.device import device_of, synchronize
from distlab.compression import Cast, PowerSGD, Quantize, RandomK, Sign, TopK, dequantize, quantize, sign, top_k
from distlab.data_parallel import DataParallel, train_step
from distlab.measure import MIN_BLOCKS, interleave

BUCKET_MIB = 25
FIRST_BUCKET_BYTES = 1 << 20
ONE_BUCKET_MIB = 1000
RANK = 4  # of PowerSGD's factors
PEERS = ("torch DDP", "torch DDP again", "torch fp16", "torch fp16 again", "torch PowerSGD", "torch PowerSGD again")
HOOKS: dict[str, Callable[[], GradientHook]] = {
    "Cast float16": Cast,
    "Cast bfloat16": lambda: Cast(torch.bfloat16),
    "PowerSGD": lambda: PowerSGD(RANK, start_step=2),
    "TopK 1 %": lambda: TopK(0.01),
    "RandomK 1 %": lambda: RandomK(0.01),
    "Quantize 8 bits": lambda: Quantize(8),
    "Quantize 4 bits": lambda: Quantize(4),
    "Quantize 3 bits": lambda: Quantize(3),
    "Quantize 4 bits by chance": lambda: Quantize(4, stochastic=True, error_feedback=False),
    "Sign": Sign,
}
BARS = {"Cast float16": "torch fp16", "PowerSGD": "torch PowerSGD"}
PROGRAMS = (*PEERS, *HOOKS)


def step_of(program: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """Build a program's model and return one training step of it."""
    torch.manual_seed(0)
    module, *batch, loss_fn = multilayer_perceptron(device)
    called: nn.Module = module
    synchronize: Callable[[], None] | None = None
    one_bucket = "PowerSGD" in program
    if program in PEERS:
        # Without a bucket_cap_mb the first bucket is of 1 MiB, as ours; with one it is as large as the others.
        options = {"bucket_cap_mb": ONE_BUCKET_MIB} if one_bucket else {}
        called = parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
        if one_bucket:
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2, min_compression_rate=2)
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif "fp16" in program:
            parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        synchronize = DataParallel(
            module,
            bucket_bytes=(ONE_BUCKET_MIB if one_bucket else BUCKET_MIB) << 20,
            first_bucket_bytes=ONE_BUCKET_MIB << 20 if one_bucket else FIRST_BUCKET_BYTES,
            hook=HOOKS[program](),
        ).synchronize
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return partial(train_step, called, optimizer, batch=tuple(batch), loss_fn=loss_fn, synchronize=synchronize)


def time_programs(device_type: str, blocks: int, steps: int) -> tuple[list[list[float]], list[float]]:
    """On each rank: time programs in interleaved blocks; return seconds per step and each program's last loss."""
    torch.set_num_threads(1)
    device = device_of(device_type, dist.get_rank())
    step_functions = [step_of(program, device) for program in PROGRAMS]

    # torch DDP builds its buckets anew after its first step, its PowerSGD begins with the third
    times = take_turns(step_functions, blocks, steps, device, warm=4)
    return times, [float(step()) for step in step_functions]


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield the bars with their noise, then each compressor's step against plain torch DDP's, then bare codecs.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    by_value(__name__)
    backend = backend_of(device, 2)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS + 4, 2)
    with Ranks(2, timeout_s=900, backend=backend, record=False) as ranks:
        results = ranks.run(time_programs, device, blocks, steps)
    times = dict(zip(PROGRAMS, slowest([times for times, _ in results]), strict=True))
    losses = dict(zip(PROGRAMS, results[0][1], strict=True))
    assert all(np.isfinite(loss) for loss in losses.values()), losses
    what = f"a step of 8 million parameters on 2 ranks ({device}, {backend})"
    for ours, peer in BARS.items():
        note = "one bucket on both sides" if peer == "torch PowerSGD" else ""
        yield compare(f"{ours}: {what} against {peer}'s", times[ours], times[peer], note=note)
        yield noise(f"{peer}, {what}", times[f"{peer} again"], times[peer])
    yield noise(f"torch DDP, {what}", times["torch DDP again"], times["torch DDP"])
    for name in (*HOOKS, "torch fp16", "torch PowerSGD"):
        claim = f"{name}: {what} against plain torch DDP's"
        yield without_bar(compare(claim, times[name], times["torch DDP"]))
    yield from codec_rows(device, blocks)


def codec_rows(device: str, blocks: int) -> Iterator[Row]:
    """Yield how much float32 each compressor takes in a second, there and back, in one thread and with no exchange."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    vector = torch.randn(4_000_000, device=device, generator=torch.Generator(device).manual_seed(0))
    chance = torch.Generator(device).manual_seed(0)
    programs = {
        f"quantize to {bits} bits": partial(lambda b: dequantize(quantize(vector, b)), bits) for bits in (8, 4, 3)
    }
    programs |= {
        "quantize to 4 bits by chance": lambda: dequantize(quantize(vector, 4, chance)),
        "sign": lambda: dequantize(sign(vector)),
        "top_k of 1 %": lambda: top_k(vector, 40_000),
        "torch.topk of 1 %": lambda: vector[vector.abs().topk(40_000).indices],
    }

    def rate(program: Callable[[], object]) -> float:
        begin = time.perf_counter()
        program()
        synchronize(vector.device)
        return vector.numel() * 4 / 1e6 / (time.perf_counter() - begin)

    for program in programs.values():
        program()
    rates = interleave([partial(rate, program) for program in programs.values()], blocks)
    torch.set_num_threads(before)
    for name, values in zip(programs, rates, strict=True):
        yield single(f"{name}: float32 taken in ({device}, one thread)", values, "MB/s")


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True)
