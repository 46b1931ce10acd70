"""What profiling costs: microseconds per step and per call, and the share of a training step.

On and off take turns block by block in one process of one rank: steps that do nothing give the cost of the marks, steps
that make calls give the cost of recording each. A step's share is what its marks and its calls cost together, divided
by the step's own time on two ranks. Such a step is also timed with profiling on and off. The costs are CPU time, so
that other programs do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import alone, by_value
from _rows import Row, absolute, compare, noise, without_bar
from _script import run_script
from torch.nn.parallel import DistributedDataParallel

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks
from distlab.measure import MIN_BLOCKS, interleave
from distlab.profile import Profiler

MARKS_BAR_US, CALL_BAR_US, SHARE_BAR = 100.0, 35.0, 2.0
CALLS = 20
SECTIONS = ("forward", "backward", "sync", "optimizer")


def empty_steps(blocks: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of a step that does nothing, and of one that makes CALLS calls, profiled or not."""
    torch.set_num_threads(1)
    tensor = torch.ones(256)

    def block(on: bool, calls: int) -> float:
        profiler = Profiler(skip=1) if on else None
        start = end = 0.0
        for step, _ in enumerate(range(steps + 1) if profiler is None else profiler.steps(range(steps + 1))):
            if step == 1:
                start = time.process_time()
            for section in SECTIONS:
                with contextlib.nullcontext() if profiler is None else profiler.section(section):
                    pass
            for _ in range(calls):
                dist.all_reduce(tensor)
            end = time.process_time()  # not after the loop: there the record is read, once
        return (end - start) / steps

    programs: dict[str, Callable[[], float]] = {
        "nothing, off": lambda: block(False, 0),
        "nothing, on": lambda: block(True, 0),
        "calls, off": lambda: block(False, CALLS),
        "calls, off again": lambda: block(False, CALLS),
        "calls, on": lambda: block(True, CALLS),
    }
    return dict(zip(programs, interleave(list(programs.values()), blocks), strict=True))


def training_steps(blocks: int, steps: int) -> dict[str, list[float]]:
    """Calls per step, and seconds per step of torch's DDP of the small GPT: plain, again, profiled."""
    torch.manual_seed(0)
    config = GPTConfig()
    tokens = torch.randint(config.vocab_size, (4, config.context + 1))
    model = DistributedDataParallel(GPT(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    num_calls = 0

    def train(profiler: Profiler | None) -> float:
        nonlocal num_calls
        batches = [(tokens[:, :-1], tokens[:, 1:])] * (steps + 1)
        start = end = 0.0
        for step, (inputs, targets) in enumerate(batches if profiler is None else profiler.steps(batches)):
            if step == 1:
                dist.barrier()
                start = time.perf_counter()
            mark = contextlib.nullcontext if profiler is None else profiler.section
            with mark("forward"):
                loss = GPT.loss(model(inputs), targets)
            with mark("backward"):
                loss.backward()
            with mark("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            end = time.perf_counter()
        if profiler is not None:
            num_calls = len(profiler.profile().calls.spans) // (steps * dist.get_world_size())
        return (end - start) / steps

    programs = {
        "plain": lambda: train(None),
        "plain again": lambda: train(None),
        "profiled": lambda: train(Profiler(skip=1)),
    }
    train(None)
    found = dict(zip(programs, interleave(list(programs.values()), blocks), strict=True))
    return found | {"calls": [float(num_calls)]}


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the cost per step and per call, then the share of a step."""
    blocks, empty, steps = (4, 50, 1) if quick else (MIN_BLOCKS, 300, 2)
    by_value(__name__)
    with Ranks(1, timeout_s=600, record=False) as ranks:
        (found,) = ranks.run(alone, empty_steps, blocks, empty)
    times = {name: np.asarray(seconds) * 1e6 for name, seconds in found.items()}
    yield noise("a step of 20 all_reduce, not profiled", found["calls, off again"], found["calls, off"])
    marks_us = times["nothing, on"] - times["nothing, off"]
    yield absolute("marks of a step with five sections", marks_us.tolist(), bar=MARKS_BAR_US, unit="us")
    call_us = (times["calls, on"] - times["calls, off"] - marks_us) / CALLS
    yield absolute("profiling a call", call_us.tolist(), bar=CALL_BAR_US, unit="us", note="what recording it costs")
    with Ranks(2, timeout_s=600, record=False) as ranks:
        results = ranks.run(training_steps, blocks, steps)
    slowest = {name: np.max([found[name] for found in results], axis=0).tolist() for name in results[0]}
    num_calls, plain = int(slowest["calls"][0]), np.asarray(slowest["plain"])
    shares = (100 * (np.median(marks_us) + num_calls * np.median(call_us)) * 1e-6 / plain).tolist()
    note = f"{num_calls} calls per step of {np.median(plain) * 1e3:.0f} ms, 2 ranks, torch's DDP, small GPT"
    yield absolute("marks and calls x cost / step", shares, bar=SHARE_BAR, unit="%", note=note)
    yield noise("a step, not profiled", slowest["plain again"], slowest["plain"])
    yield without_bar(compare("a step profiled against not", slowest["profiled"], slowest["plain"], note=note))


if __name__ == "__main__":
    run_script(__doc__, rows)
