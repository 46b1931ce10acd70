"""What recording costs: microseconds per call, and the share of a training step.

On and off take turns block by block in one process. The cost of a call is the difference of the two; on a busy machine
single blocks may even come out negative. A step's share is the number of calls that it makes, times that cost, divided
by the step's own time. The step is also timed with recording on and off.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import alone, by_value
from _rows import Row, absolute, compare, noise, without_bar
from _script import run_script

from distlab.comm import Ranks, Recorder, recorded
from distlab.measure import MIN_BLOCKS, interleave

COST_BAR_US = 25.0
SHARE_BAR = 2.0


def blocking(tensor: torch.Tensor) -> None:
    """One all-reduce that is waited for at once."""
    dist.all_reduce(tensor)


def asynchronous(tensor: torch.Tensor) -> None:
    """One all-reduce that is waited for by hand."""
    dist.all_reduce(tensor, async_op=True).wait()


def call_times(blocks: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Seconds a call with recording off, off again and on, for calls that have no partner to wait for.

    One rank: the call goes the whole way through gloo, and no other process adds its noise.
    """
    torch.set_num_threads(1)
    tensor, found = torch.ones(256), {}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, 0)
        for call in (blocking, asynchronous):

            def block(on: bool, call: Callable[[torch.Tensor], None] = call) -> float:
                if on:
                    recorder.start()
                for _ in range(20):
                    call(tensor)
                start = time.perf_counter()
                for _ in range(calls):
                    call(tensor)
                seconds = (time.perf_counter() - start) / calls
                recorder.stop()
                return seconds

            programs = {"off": lambda: block(False), "off again": lambda: block(False), "on": lambda: block(True)}
            found[call.__name__] = dict(zip(programs, interleave(list(programs.values()), blocks), strict=True))
        recorder.close()
    return found


def step_times(blocks: int, steps: int) -> dict[str, tuple[int, list[float], list[float]]]:
    """Calls per step, and seconds per step with recording off and on, of training steps of the small GPT."""
    from torch.nn.parallel import DistributedDataParallel

    from distlab.blocks.models import GPT, GPTConfig

    torch.manual_seed(0)
    config, found = GPTConfig(), {}
    tokens = torch.randint(config.vocab_size, (4, config.context + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def parameter_by_parameter(model: torch.nn.Module) -> None:
        GPT.loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    def torch_ddp(model: torch.nn.Module) -> None:
        GPT.loss(model(inputs), targets).backward()

    for step in (torch_ddp, parameter_by_parameter):
        plain = GPT(config)
        model = DistributedDataParallel(plain) if step is torch_ddp else plain

        def block(on: bool, model: torch.nn.Module = model, step: Callable[[torch.nn.Module], None] = step) -> float:
            with recorded() if on else contextlib.nullcontext():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    model.zero_grad()
                    step(model)
                return (time.perf_counter() - start) / steps

        block(False)
        with recorded() as seen:
            model.zero_grad()
            step(model)
        num_calls = len(seen.records)
        off, on = interleave([lambda: block(False), lambda: block(True)], blocks)
        found[step.__name__.replace("_", " ")] = (num_calls, off, on)
    return found


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the cost per call, then the share of a step."""
    blocks, calls, steps = (4, 100, 1) if quick else (MIN_BLOCKS + 4, 500, 3)
    by_value(__name__)
    cost_us = 0.0
    with Ranks(1, timeout_s=600, record=False) as ranks:
        (found,) = ranks.run(alone, call_times, blocks, calls)
    for kind, times in found.items():
        off = np.asarray(times["off"])
        yield noise(f"a {kind} all_reduce, not recorded", times["off again"], times["off"])
        costs = ((np.asarray(times["on"]) - off) * 1e6).tolist()
        cost_us = max(cost_us, float(np.median(costs)))
        note = f"a call itself takes {np.median(off) * 1e6:.0f} us"
        yield absolute(f"cost of recording a {kind} call", costs, bar=COST_BAR_US, unit="us", note=note)
    with Ranks(2, timeout_s=600, backend="gloo", record=False) as ranks:
        results = ranks.run(step_times, blocks, steps)
    for kind in results[0]:
        num_calls = max(result[kind][0] for result in results)
        off = np.max([result[kind][1] for result in results], axis=0)
        on = np.max([result[kind][2] for result in results], axis=0)
        shares = (100 * num_calls * cost_us * 1e-6 / off).tolist()
        note = f"{num_calls} calls per step of {np.median(off) * 1e3:.0f} ms, 2 ranks, small GPT"
        yield absolute(f"calls x cost / step, {kind}", shares, bar=SHARE_BAR, unit="%", note=note)
        row = compare(f"a step ({kind}) recorded against not recorded", on.tolist(), off.tolist(), note=note)
        yield without_bar(row)


if __name__ == "__main__":
    run_script(__doc__, rows)
