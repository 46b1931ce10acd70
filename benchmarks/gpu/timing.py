"""What the timed parts share: the device's own clock, programs that take turns, their memory, and rows of both.

Programs live in the same ranks and take turns block by block (`distlab.measure.interleave`). A block is some steps
after a barrier. On a GPU its time is that between two events on the stream, so that a host which runs ahead is not
counted. The time of a block is that of the slowest rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from _rows import Row, compare, compare_counts, noise, without_bar

from distlab.comm import device as seam
from distlab.measure import MIN_BLOCKS, device_of, interleave, on_first_rank
from gpu.job import Job

Step = Callable[[], object]
MOST_STEPS = 8  # in a block
WARM_STEPS = 3


class Turns(NamedTuple):
    """What one rank measured.

    Attributes:
        times: seconds of a step, for each program and block.
        peaks: most bytes that a program's step held on the GPU, without what other programs hold; 0 on the CPU.
        losses: each program's loss after the same few steps, before any is timed.
    """

    times: list[list[float]]
    peaks: list[int]
    losses: list[float]


def device_here(job: Job) -> torch.device:
    """Return this rank's device; without a process group the first one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if job.small:
        torch.set_num_threads(1)
    return device_of(job.device, rank)


def seconds_of(step: Step, count: int, device: torch.device) -> float:
    """Run a step so many times; return the seconds of one on the device's own clock."""
    if dist.is_initialized():
        dist.barrier()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count
    seam.synchronize(device)
    first = seam.event(device, timing=True)
    for _ in range(count):
        step()
    return seam.seconds_between(first, seam.event(device, timing=True)) / count


def built(make: Callable[[], Step], device: torch.device) -> tuple[int, Step]:
    """Build a program; return the most bytes that its third step holds on the GPU (0 on the CPU), and its step."""
    gc.collect()
    if device.type != "cuda":
        return 0, make()
    seam.empty_cache()
    before = seam.allocated_bytes(device)
    step = make()
    step(), step()
    seam.reset_peak(device)
    step()
    return seam.peak_bytes(device) - before, step


def take_turns(makes: Sequence[Callable[[], Step]], job: Job, *, share: float = 0.5) -> Turns:
    """Build programs and time them in turns, within a share of the part's seconds; call it on every rank.

    Args:
        makes: each builds a program and returns its step. The first is the peer, which also takes a second turn in each
            block, as the last: the noise.
        job: what the part was told.
        share: of the part's seconds, for the timed blocks.
    """
    device = device_here(job)
    programs = [built(make, device) for make in makes]
    steps = [step for _, step in programs]
    for step in steps:
        seconds_of(step, WARM_STEPS, device)
    losses = [float(loss) if isinstance(loss := step(), torch.Tensor) else 0.0 for step in steps]  # all after as many
    turn = [*steps, steps[0]]
    once_s = sum(seconds_of(step, 1, device) for step in turn)
    blocks, count = _planned(once_s, share * job.seconds, small=job.small)
    if dist.is_initialized():
        blocks, count = on_first_rank(lambda: (blocks, count))  # clocks differ; one rank decides
    times = interleave([partial(seconds_of, step, count, device) for step in turn], blocks)
    return Turns(times, [peak for peak, _ in programs], losses)


def _planned(once_s: float, budget_s: float, *, small: bool) -> tuple[int, int]:
    """Return the number of blocks, and of steps in each: MIN_BLOCKS blocks, unless the time is not enough for them."""
    if small:
        return 3, 1
    count = int(min(MOST_STEPS, max(1, budget_s / (MIN_BLOCKS * once_s))))
    return int(min(MIN_BLOCKS, max(4, budget_s / (count * once_s)))), count


def rows_of(
    turns: Sequence[Turns], what: str, job: Job, *, against: str, bar: float, memory_bar: float | None = None
) -> Iterator[Row]:
    """Yield the rows of two programs, the peer first: time, memory where it was measured, and the peer's noise.

    Args:
        turns: of each rank.
        what: our program, in words.
        job: what the part was told; small runs claim nothing about speed.
        against: the peer, in words.
        bar: the most that the ratio of the times may be.
        memory_bar: the most that the ratio of the peaks may be; None where nothing is claimed.
    """
    peer, ours, *_, again = np.asarray([one.times for one in turns]).max(axis=0).tolist()
    apart = max(abs(one.losses[0] - one.losses[1]) for one in turns)
    has_loss = any(loss for one in turns for loss in one.losses)
    note = f"losses differ by {apart:.1e} after equally many steps" if has_loss else ""
    row = compare(f"{what} against {against}", ours, peer, bar=bar, note=note)
    yield without_bar(row) if job.small else row
    peaks = np.asarray([one.peaks for one in turns]).max(axis=0).tolist()
    if min(peaks) > 0:
        held = compare_counts(f"peak memory of {what} against {against}", peaks[1], peaks[0], bar=memory_bar or 1.0)
        yield without_bar(held) if memory_bar is None else held
    yield noise(f"{against} for {what}", again, peer)
