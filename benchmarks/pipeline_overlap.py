"""It does pipeline: stages that sleep, and a backward pass in two parts that costs no more than one.

- Stages that sleep instead of computing, on 2, 4 and 8 ranks: the step takes at most 1 / 0.9 of the schedule's own
  length, which the simulator says. Sleeping needs no core, so this holds on any machine that is otherwise idle. What
  is left over: 0.3 to 0.5 ms of Python per action, and a millisecond per message where cores are fewer than ranks.
- I and W together take as long as one full backward, on one thread: a median of at most 1.05 times, and an interval
  that reaches 1. Width 128 only informs: its products take some tens of microseconds each. So do the Python of a
  deferred layer and the allocator's whims, and that row says more about those than about the split.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value
from _rows import Row, absolute, compare, noise, without_bar
from _script import run_script
from torch import Tensor, nn

from distlab.blocks.models import Block, GPTConfig
from distlab.comm import Ranks
from distlab.measure import MIN_BLOCKS, interleave
from distlab.pipeline import Pipeline
from distlab.pipeline.backward import layers
from distlab.pipeline.backward.two_parts import SplitBackward, full_backward
from distlab.plan import ActionTimes, make_schedule
from simulator import simulate_schedule

SLEEPERS = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v")
SLEEP_S = 0.02


class Sleeping(nn.Module):
    """A layer that takes its time and no core: SLEEP_S in F, in I and in W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        return Sleep.apply(x, self.weight)


class Entrance(nn.Module):
    """Makes what follows want the gradient of its input on stage 0 too: there I would have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Add nothing."""
        return x + self.shift


class Sleep(torch.autograd.Function):
    """Sleeps in forward, and twice as long in a full backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Sleep."""
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Sleep for both gradients."""
        time.sleep(2 * SLEEP_S)
        return gradient.clone(), gradient.sum().reshape(1)


class SleepingRule:
    """How Sleeping parts its backward pass."""

    def refuses(self, layer: Any) -> str | None:
        """Accept every Sleeping."""
        return None

    def input_gradient(self, layer: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Sleep for I."""
        time.sleep(SLEEP_S)
        return gradient.clone()

    def weight_gradients(self, notes: layers.Notes, sums: layers.Sums) -> None:
        """Sleep for W."""
        time.sleep(SLEEP_S)
        sums.add(notes.layer.weight, notes.gradient.sum().reshape(1))


def sleep_steps(name: str, num_microbatches: int, repeats: int) -> list[float]:
    """Run on each rank: time steps of a pipeline whose stages sleep."""
    torch.set_num_threads(1)
    layers.RULES[Sleeping] = SleepingRule()  # in the rank's own table: a copy of it would travel with this file
    schedule = make_schedule(name, dist.get_world_size(), num_microbatches)
    own = [stage for stage, rank in enumerate(schedule.home) if rank == dist.get_rank()]
    stages = {stage: nn.Sequential(Entrance(), Sleeping()) for stage in own}
    pipeline = Pipeline(stages, schedule, loss=lambda output, target: (output - target).square().mean())
    x = torch.zeros(num_microbatches, 1)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        pipeline.step(x, x)
        times.append(time.perf_counter() - begin)
    pipeline.close()
    return times[1:]


def split_modules() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the modules whose backward pass is timed whole and in two parts, with an input each."""
    torch.manual_seed(0)
    wide, middle, narrow = (GPTConfig(context=64, hidden_size=width) for width in (512, 256, 128))
    perceptron = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2)]
    return {
        "a GPT block of width 512": (Block(wide), torch.randn(2, 64, 512)),
        "2 GPT blocks of width 256": (nn.Sequential(Block(middle), Block(middle)), torch.randn(4, 64, 256)),
        "2 GPT blocks of width 128": (nn.Sequential(Block(narrow), Block(narrow)), torch.randn(4, 64, 128)),
        "a multilayer perceptron": (nn.Sequential(*perceptron), torch.randn(128, 256)),
    }


def time_split(name: str, blocks: int, steps: int) -> list[list[float]]:
    """Run on one rank: time a full backward pass, I and W, and the full one again."""
    torch.set_num_threads(1)
    module, x = split_modules()[name]
    parted = copy.deepcopy(module)
    split = SplitBackward(parted)

    def block(module: nn.Module, backward: Callable[..., None]) -> float:
        total = 0.0
        for _ in range(steps):
            y = module(x.clone().requires_grad_())
            gradient = torch.ones_like(y)
            begin = time.perf_counter()
            backward([y], [gradient])
            total += time.perf_counter() - begin
        return total / steps

    programs = [partial(block, module, full_backward), partial(block, parted, split.full_backward)]
    for program in programs:
        program()
    return interleave([*programs, programs[0]], blocks)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the rows of the module's docstring."""
    by_value(__name__)
    yield from split_rows(quick)
    yield from sleeping_rows(quick)


def split_rows(quick: bool) -> Iterator[Row]:
    """I and W against a full backward pass."""
    blocks, steps = (MIN_BLOCKS, 2) if quick else (3 * MIN_BLOCKS, 5)
    with Ranks(1, timeout_s=300, record=False) as ranks:
        for name in split_modules():
            full, parted, again = ranks.run(time_split, name, blocks, steps)[0]
            row = compare(f"I and W of {name} against one full backward", parted, full, note="1 thread")
            yield without_bar(row) if "128" in name else row
            yield noise(f"a full backward of {name}", again, full)


def sleeping_rows(quick: bool) -> Iterator[Row]:
    """Steps of stages that sleep against the schedule's own length."""
    for num_ranks in (2, 4) if quick else (2, 4, 8):
        num_microbatches = 2 * num_ranks
        with Ranks(num_ranks, timeout_s=300, record=False) as ranks:
            for name in SLEEPERS:
                plan = make_schedule(name, num_ranks, num_microbatches)
                bound = simulate_schedule(plan, ActionTimes(1, 1, 1), unit_s=SLEEP_S)
                times = np.asarray(ranks.run(sleep_steps, name, num_microbatches, 2 if quick else 10)).max(axis=0)
                work_s = bound.speedup * bound.duration_s
                yield absolute(
                    f"a step of {name} with stages that sleep, {num_ranks} ranks, {num_microbatches} micro-batches, in "
                    "lengths of the schedule",
                    (times / bound.duration_s).tolist(),
                    bar=round(1 / 0.9, 3),
                    unit="lengths",
                    note=f"speed-up {work_s / np.median(times):.2f}, bound {bound.speedup:.2f}",
                )


if __name__ == "__main__":
    run_script(__doc__, rows)
