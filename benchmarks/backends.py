"""Each technique on both backends of CPU ranks, against torch's product on gloo and on shared memory.

The bars of a training step on 2 and on 4 ranks: FullyShard takes at most half of the time of torch FSDP2 over gloo, and
0.8 of it where both are on shared; tensor parallel takes at most 0.6 of the time of torch's DTensor over gloo. Data
parallel has its rows in benchmarks/shared_memory.py. All programs live in the same ranks and take turns block by block;
a block is some steps after a barrier, and its time is that of the slowest rank. Recording is off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import sharding_units
import tensor_parallel
import torch
import torch.distributed as dist
from _blocks import by_value, slowest, timed
from _rows import Row, compare, noise, without_bar
from _script import run_script
from shared_memory import groups

from distlab.comm import Ranks
from distlab.measure import MIN_BLOCKS, interleave

STEPS = 3


def sharding(whose: str, model: str, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Return a step of FullyShard or of FSDP2 over a group."""
    program = "FullyShard" if whose == "ours" else "torch FSDP2"
    return sharding_units.step_of(program, model, torch.device("cpu"), group)


def tensor(whose: str, model: str, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Return a step of tensor parallel layers, or of DTensor's, over a group."""
    make = partial(tensor_parallel.MODELS[model], group=group)
    return tensor_parallel.step_of("distlab" if whose == "ours" else "DTensor", make)


@dataclass(frozen=True)
class Technique:
    """A technique beside torch's.

    Attributes:
        make: what makes a step from whose it is, a model and a group.
        peer: torch's name of it.
        models: names of the models.
        bar: over torch on gloo.
        on_shared: the bar where both are on shared; None: torch's is not run there. DTensor keeps what it worked out
            for one mesh for all meshes of equal ranks, so in one process it cannot be on two backends.
    """

    make: Callable[[str, str, dist.ProcessGroup], Callable[[], torch.Tensor]]
    peer: str
    models: tuple[str, ...]
    bar: float
    on_shared: float | None

    @property
    def programs(self) -> list[tuple[str, str]]:
        """Whose step, on which backend."""
        both = [("torch", "shared")] if self.on_shared is not None else []
        return [("torch", "gloo"), ("ours", "shared"), ("ours", "gloo"), ("torch", "gloo"), *both]


TECHNIQUES = {
    "FullyShard": Technique(sharding, "FSDP2", tuple(sharding_units.MODELS), 0.5, 0.8),
    "tensor parallel": Technique(tensor, "DTensor", tuple(tensor_parallel.MODELS), 0.6, None),
}


def time_programs(name: str, model: str, blocks: int) -> list[list[float]]:
    """Run on each rank: time a step of every program, in interleaved blocks."""
    torch.set_num_threads(1)
    technique = TECHNIQUES[name]
    with groups() as made:
        steps = [technique.make(whose, model, made[backend]) for whose, backend in technique.programs]
        for step in steps:
            timed(step, 3)()
        losses = [float(step()) for step in steps]
        assert max(losses) - min(losses) < 1e-3, losses
        return interleave([timed(step, STEPS) for step in steps], blocks)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the rows of each technique and model on 2 and on 4 ranks."""
    by_value("sharding_units", "tensor_parallel", "shared_memory", __name__)
    blocks = 3 if quick else MIN_BLOCKS
    for num_ranks, (name, technique) in itertools.product((2, 4), TECHNIQUES.items()):
        for model in technique.models:
            with Ranks(num_ranks, timeout_s=600, backend="shared", record=False) as ranks:  # new ones: see on_shared
                times = slowest(ranks.run(time_programs, name, model, blocks))
            yield from rows_of(times, f"a step of {name}, {model}, on {num_ranks} ranks", technique)


def rows_of(times: list[list[float]], what: str, technique: Technique) -> Iterator[Row]:
    """Yield the rows of one technique with one model."""
    over_gloo, ours, ours_on_gloo, again, *both = times
    peer = technique.peer
    yield compare(f"{what}: on shared against torch's {peer} on gloo", ours, over_gloo, bar=technique.bar)
    if technique.on_shared is not None:
        yield compare(f"{what}: against torch's {peer}, both on shared", ours, both[0], bar=technique.on_shared)
    yield without_bar(compare(f"{what}: on shared against on gloo", ours, ours_on_gloo))
    yield noise(f"torch's {peer} on gloo, {what}", again, over_gloo)


if __name__ == "__main__":
    run_script(__doc__, rows)
