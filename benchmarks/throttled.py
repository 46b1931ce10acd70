"""When does compression pay? Real steps over a slow link, and the bandwidth below which each compressor wins.

Three claims. The throttled link takes the time that it promises. A step over it takes the time that the simulator
predicts for a link of that bandwidth. And so the bandwidth at which a compressed step takes as long as a plain one (its
break-even) is where the simulator says.

At each bandwidth all programs live in the same two ranks and take turns block by block; a block is some steps after a
barrier, and its time is that of the slowest rank. The prediction knows the speed of the machine and of the compressors
from a calibration before and after, without any slow link; nothing in it is fitted to the steps.

    distlab bench throttled            # rows
    distlab bench throttled --quick    # few bandwidths and blocks: shows that it runs
    sudo python tools/slow_link.py --bytes-per-s 20e6 --latency-s 5e-4 -- python benchmarks/throttled.py --here
                                       # the same steps over a link that the kernel slows down
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, largest, timed
from _rows import Row, absolute, median_interval, single

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks, process_group, throttled
from distlab.comm.record.throttle import link_s
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel, train_step
from distlab.measure import (
    Round,
    fit_cluster,
    interleave,
    measure_codec,
    measure_round,
    median_round,
    workload_from_module,
)
from distlab.measure.machine.fit import median_of
from distlab.plan import Contention, Link, Plan, Protocol, Workload
from distlab.plan.compression import Compression
from simulator import Measured as MeasuredApart, MeasuredCodec, break_even_bytes_per_s, simulate

LATENCY_S = 500e-6  # more than the machine's own, so that the link's is what counts
BANDWIDTHS = (5e6, 10e6, 20e6, 40e6, 80e6, 160e6, 320e6)  # bytes per second, one way
CALLS = ((5e6, 20_000), (5e6, 400_000), (40e6, 20_000), (40e6, 2_000_000), (160e6, 2_000_000))
KERNEL_BANDWIDTHS = (5e6, 20e6)  # as tc counts them, headers included
PAYLOAD_SHARE = 1448 / 1514  # of a packet's bytes on the wire
KERNEL_FACTOR = 1.15
PLAIN = "no compression"
COMPRESSIONS = {
    "8 bits": Compression("quantize", bits=8),
    "1 bit": Compression("sign"),
    "the 1 % largest": Compression("top_k", ratio=0.01),
    "PowerSGD of rank 4": Compression("powersgd", rank=4),
}
PROGRAMS: dict[str, Compression | None] = {PLAIN: None, **COMPRESSIONS}
MODEL = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
BATCH_SIZE = 8
PLAN = Plan(data=2, bucket_bytes=1_000_000, first_bucket_bytes=250_000)
ACCURACY_BAR, LATE_BAR_S = 0.05, 0.4e-3  # a share of the time, or what two sleeps and the call itself take
STEP_BAR, FACTOR_BAR = 0.10, 1.25


@dataclass
class Measured:
    """What rank 0 saw; times are of the slowest rank.

    Attributes:
        calls: for each of CALLS: seconds of an all-reduce beyond its time on the link, by block.
        steps: for each bandwidth: for each program: seconds per step, by block.
        workload: the step as counted.
        rounds: calibrations, before and after.
        codecs: encoding and decoding, by program, before and after.
    """

    calls: list[list[float]]
    steps: list[list[list[float]]]
    workload: Workload
    rounds: list[Round]
    codecs: dict[str, list[MeasuredCodec]]


def step_of(compression: Compression | None) -> Callable[[], torch.Tensor]:
    """Build a model of its own and return one training step with a compressor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(MODEL, torch.Generator().manual_seed(0))
    batch = ByteCorpus(python_documentation(), MODEL.context).batch(0, BATCH_SIZE, rank=rank, world_size=world_size)
    replicas = DataParallel(
        model,
        bucket_bytes=PLAN.bucket_bytes,
        first_bucket_bytes=PLAN.first_bucket_bytes,
        hook=None if compression is None else make_hook(compression),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return partial(train_step, model, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=replicas.synchronize)


def time_steps(
    bandwidths: Sequence[float | None], blocks: int, steps: int, latency_s: float = LATENCY_S
) -> list[list[list[float]]]:
    """Time every program at every bandwidth; None is the link as it is."""
    programs = [step_of(compression) for compression in PROGRAMS.values()]
    for program in programs:
        timed(program, 3)()
    found = []
    for bandwidth in bandwidths:
        with nullcontext() if bandwidth is None else throttled(bandwidth, latency_s):
            for program in programs:
                timed(program, 1)()
            found.append(interleave([timed(program, steps) for program in programs], blocks))
    return largest(found)


def time_calls(blocks: int) -> list[list[float]]:
    """Time single all-reduces over throttled links, and take off the time that the links promise."""
    found = []
    for bandwidth, num_bytes in CALLS:
        message = torch.zeros(num_bytes // 4)
        with throttled(bandwidth, LATENCY_S):
            seconds = [timed(partial(dist.all_reduce, message), 3)() for _ in range(blocks)]
        found.append([one - promised_s(bandwidth, num_bytes) for one in seconds])
    return found


def promised_s(bandwidth: float, num_bytes: int) -> float:
    """Return the time of an all-reduce between two ranks on a throttled link."""
    return link_s("all_reduce", num_bytes, 2, bytes_per_s=bandwidth, latency_s=LATENCY_S)


def measure(bandwidths: Sequence[float], blocks: int, steps: int) -> Measured:
    """Run on each rank: calibrate, time calls and steps, calibrate again."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    rounds: list[Round] = []
    codecs: dict[str, list[MeasuredCodec]] = {name: [] for name in COMPRESSIONS}

    def calibrate() -> None:
        rounds.append(measure_round(device))
        cluster = fit_cluster(rounds[-1], dist.get_world_size())
        for name, compression in COMPRESSIONS.items():
            codecs[name].append(measure_codec(compression, cluster, device=device))

    calibrate()
    calls = time_calls(blocks)
    times = time_steps(bandwidths, blocks, steps)
    calibrate()
    model = GPT(MODEL)
    tokens = torch.zeros(BATCH_SIZE // dist.get_world_size(), MODEL.context, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workload = workload_from_module(model, lambda: model.loss(model(tokens), tokens), optimizer=optimizer)
    return Measured(calls, times, workload, rounds, codecs)


def break_even(bandwidths: Sequence[float], plain: Sequence[float], compressed: Sequence[float]) -> float | None:
    """Return the bandwidth at which both take equal time, on straight lines between measured points in logarithms.

    It is the first crossing from the slow end: below it compression wins. None: no crossing was seen.
    """
    gain = np.log(np.asarray(plain) / np.asarray(compressed))
    logs = np.log(bandwidths)
    for i in range(len(bandwidths) - 1):
        if gain[i] > 0 >= gain[i + 1]:
            return float(np.exp(logs[i] + (logs[i + 1] - logs[i]) * gain[i] / (gain[i] - gain[i + 1])))
    return None


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the accuracy of the link, the error of predicted steps, and each compressor's break-even."""
    by_value(__name__)
    bandwidths, blocks, steps = (BANDWIDTHS[::3], 2, 1) if quick else (BANDWIDTHS, 9, 3)
    with Ranks(2, timeout_s=900, record=False) as ranks:
        measured: Measured = ranks.run(measure, bandwidths, blocks, steps)[0]
        beside = ranks.run(time_steps, [rate * PAYLOAD_SHARE for rate in KERNEL_BANDWIDTHS], blocks, steps, 0.0)[0]
    for (bandwidth, num_bytes), late in zip(CALLS, measured.calls, strict=True):
        promised = promised_s(bandwidth, num_bytes)
        claim = f"throttled all-reduce of {num_bytes:,} bytes at {bandwidth / 1e6:g} MB/s: beyond the link's time"
        bar = max(ACCURACY_BAR * promised, LATE_BAR_S)
        yield absolute(claim, late, bar=bar, unit="s", note=f"of {promised * 1e3:.1f} ms")
    yield from predicted_rows(measured, bandwidths)
    for bandwidth, times in zip(KERNEL_BANDWIDTHS, beside, strict=True):
        yield kernel_row(bandwidth, np.median(times, axis=1).tolist(), quick)


def kernel_row(bandwidth: float, paced: Sequence[float], quick: bool) -> Row:
    """Compare the programs' steps over a throttled link with those over one that the kernel slows down."""
    claim = f"steps over a throttled link against one slowed down by the kernel (tc), {bandwidth / 1e6:g} MB/s"
    bar = f"within {KERNEL_FACTOR:g}x"
    folder = Path(__file__).resolve().parent
    make = [sys.executable, str(folder.parent / "tools" / "slow_link.py"), "--bytes-per-s", str(bandwidth), "--"]
    rank = [sys.executable, __file__, "--here", *(["--quick"] if quick else [])]
    done = subprocess.run([*make, *rank], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        why = f"not measured: {(done.stderr.splitlines() or ['no reason given'])[-1]}"
        return Row(claim, 0.0, None, None, (0.0, 0.0), "s", bar, None, why)
    kernel = json.loads(done.stdout.splitlines()[-1])
    ratios = [ours / kernel[name] for name, ours in zip(PROGRAMS, paced, strict=True)]
    words = [f"{name} {ours * 1e3:.0f} ({kernel[name] * 1e3:.0f})" for name, ours in zip(PROGRAMS, paced, strict=True)]
    middle, peer = float(np.median(ratios)), float(np.median(list(kernel.values())))
    holds = all(1 / KERNEL_FACTOR <= ratio <= KERNEL_FACTOR for ratio in ratios)
    span = (min(ratios), max(ratios))
    note = f"ms throttled (tc): {', '.join(words)}; the range is over the programs"
    return Row(claim, float(np.median(paced)), peer, middle, span, "s", bar, holds, note)


def predicted_rows(measured: Measured, bandwidths: Sequence[float]) -> Iterator[Row]:
    """Compare the steps with the simulator's."""
    calibrated = median_round(measured.rounds)
    # A throttled exchange sleeps: it takes next to nothing from a rank that computes.
    cluster = replace(fit_cluster(calibrated, 2), contention=Contention())
    codecs = {name: median_of(found) for name, found in measured.codecs.items()}
    times = np.asarray(measured.steps)  # [bandwidth, program, block]
    errors = []
    for place, (name, compression) in enumerate(PROGRAMS.items()):
        plan, words = replace(PLAN, compression=compression), []
        for bandwidth, step in zip(bandwidths, np.median(times[:, place], axis=1), strict=True):
            link = Link("throttled", (Protocol(LATENCY_S, bandwidth),))
            on = replace(cluster, intra_node=link, inter_node=link)
            predicted = simulate(measured.workload, on, plan, measured=MeasuredApart(codecs.get(name))).duration_s
            errors.append(abs(predicted / step - 1))
            words.append(f"{bandwidth / 1e6:g} MB/s {step * 1e3:.0f} ({predicted * 1e3:.0f})")
        note = f"ms measured (predicted): {', '.join(words)}"
        yield single(f"step over a slow link, {name}: error", errors[-len(bandwidths) :], "relative", note=note)
    yield absolute(
        "step over a slow link, all of them: predicted against measured", errors, bar=STEP_BAR, unit="relative"
    )
    link = Link("throttled", (Protocol(LATENCY_S, bandwidths[0]),))
    cluster = replace(cluster, intra_node=link, inter_node=link)
    for place, (name, compression) in enumerate(COMPRESSIONS.items(), 1):
        predicted = break_even_bytes_per_s(measured.workload, cluster, PLAN, compression, codec=codecs[name])
        yield break_even_row(name, bandwidths, times[:, 0], times[:, place], predicted)


def break_even_row(
    name: str, bandwidths: Sequence[float], plain: np.ndarray, compressed: np.ndarray, predicted: float
) -> Row:
    """Judge one break-even: measured over predicted, within a factor."""
    claim = f"bandwidth below which {name} pays: measured against predicted"
    bar = f"within {FACTOR_BAR:g}x"
    found = break_even(bandwidths, np.median(plain, axis=1), np.median(compressed, axis=1))
    if found is None:
        outside = not bandwidths[0] < predicted < bandwidths[-1]
        wins = np.median(compressed[-1]) < np.median(plain[-1])
        edge = bandwidths[-1] if wins else bandwidths[0]
        range_mb = f"{bandwidths[0] / 1e6:g} to {bandwidths[-1] / 1e6:g} MB/s"
        note = f"no crossing seen: it pays at {'every' if wins else 'no'} bandwidth from {range_mb}"
        return Row(claim, edge, predicted, None, (edge, edge), "bytes/s", bar, outside, note)
    by_block = [break_even(bandwidths, one, other) for one, other in zip(plain.T, compressed.T, strict=True)]
    seen = [one / predicted for one in by_block if one is not None]
    interval = median_interval(seen) if seen else (found / predicted,) * 2
    holds = 1 / FACTOR_BAR <= found / predicted <= FACTOR_BAR
    return Row(claim, found, predicted, found / predicted, interval, "bytes/s", bar, holds)


def here(blocks: int = 9, steps: int = 3) -> None:
    """Run as one of several ranks that something else has started: print seconds per step over the link as it is."""
    with process_group(watch=False):
        torch.set_num_threads(1)
        (times,) = time_steps([None], blocks, steps)
        if dist.get_rank() == 0:
            print(json.dumps({name: float(np.median(part)) for name, part in zip(PROGRAMS, times, strict=True)}))


if __name__ == "__main__":
    if "--here" in sys.argv:
        here(*((2, 1) if "--quick" in sys.argv else (9, 3)))
    else:
        print(*rows("--quick" in sys.argv), sep="\n")
