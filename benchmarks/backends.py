"""Each technique on both backends of CPU ranks, against torch's product on gloo and on shared memory.

The bars of a training step on 2 and on 4 ranks: FullyShard takes at most half of the time of torch FSDP2 over gloo, and
0.8 of it where both are on shared; tensor parallel takes at most 0.6 of the time of torch's DTensor over gloo. Data
parallel has its rows in benchmarks/shared_memory.py. All programs live in the same ranks and take turns block by block;
a block is some steps after a barrier, and its time is that of the slowest rank. Recording is off.

    python benchmarks/backends.py            # rows
    python benchmarks/backends.py --quick    # few blocks: shows that it runs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import cloudpickle
import sharding_units
import tensor_parallel
import torch
import torch.distributed as dist
from _rows import Row, compare, noise, without_bar
from _script import run_script
from collectives import slowest
from shared_memory import groups, timed

from distlab.comm import Ranks
from distlab.measure import MIN_BLOCKS, interleave

PROGRAMS = (("torch", "gloo"), ("ours", "shared"), ("torch", "shared"), ("ours", "gloo"), ("torch", "gloo"))
STEPS = 3


def sharding(whose: str, model: str, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Return a step of FullyShard or of FSDP2 over a group."""
    program = "FullyShard" if whose == "ours" else "torch FSDP2"
    return sharding_units.step_of(program, model, torch.device("cpu"), group)


def tensor(whose: str, model: str, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Return a step of tensor parallel layers, or of DTensor's, over a group."""
    make = partial(tensor_parallel.MODELS[model], group=group)
    return tensor_parallel.step_of("distlab" if whose == "ours" else "DTensor", make)


# technique: what makes a step, torch's name, its models, and the bars over gloo and where both are on shared
TECHNIQUES = {
    "FullyShard": (sharding, "FSDP2", tuple(sharding_units.MODELS), 0.5, 0.8),
    "tensor parallel": (tensor, "DTensor", tuple(tensor_parallel.MODELS), 0.6, None),
}


def time_programs(technique: str, model: str, blocks: int) -> list[list[float]]:
    """Run on each rank: time a step of every program, in interleaved blocks."""
    torch.set_num_threads(1)
    with groups() as made:
        steps = [TECHNIQUES[technique][0](whose, model, made[backend]) for whose, backend in PROGRAMS]
        for step in steps:
            for _ in range(3):
                step()
        losses = [float(step()) for step in steps]
        assert max(losses) - min(losses) < 1e-3, losses
        return interleave([timed(step, STEPS) for step in steps], blocks)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the rows of each technique and model on 2 and on 4 ranks."""
    for module in (sharding_units, tensor_parallel, sys.modules["shared_memory"], sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    blocks = 3 if quick else MIN_BLOCKS
    for num_ranks in (2, 4):
        with Ranks(num_ranks, timeout_s=600, backend="shared", record=False) as ranks:
            for technique, (_, peer, models, bar, on_shared) in TECHNIQUES.items():
                for model in models:
                    times = slowest(ranks.run(time_programs, technique, model, blocks))
                    what = f"a step of {technique}, {model}, on {num_ranks} ranks"
                    yield from rows_of(times, what, peer, bar, on_shared)


def rows_of(times: list[list[float]], what: str, peer: str, bar: float, on_shared: float | None) -> Iterator[Row]:
    """Yield the rows of one technique with one model."""
    over_gloo, ours, over_shared, ours_on_gloo, again = times
    yield compare(f"{what}: on shared against torch's {peer} on gloo", ours, over_gloo, bar=bar)
    row = compare(f"{what}: against torch's {peer}, both on shared", ours, over_shared, bar=on_shared or 1.0)
    yield row if on_shared else without_bar(row)
    yield without_bar(compare(f"{what}: on shared against on gloo", ours, ours_on_gloo))
    yield noise(f"torch's {peer} on gloo, {what}", again, over_gloo)


if __name__ == "__main__":
    run_script(__doc__, rows)
