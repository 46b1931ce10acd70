"""A step of Muon on 12 matrices of 512 x 512 in shards of 4 ranks, by owners against everyone computing all.

The bar: at most 0.6 of its time. In one process a step takes at most as long as torch.optim.Muon's. Products are of
float32 on ranks, of bfloat16 against torch. CPU, one thread per rank; a block's time is that of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, noise
from _script import run_script
from large_batch import Program
from torch import nn

from distlab.comm import Ranks
from distlab.large_batch import Muon
from distlab.measure import MIN_BLOCKS, interleave
from distlab.sharding import FullyShard, WholeTensorOptimizer

NUM_RANKS, COUNT, WIDTH = 4, 12, 512
MAKES = (Muon, torch.optim.Muon, torch.optim.Muon)


def on_shards(blocks: int) -> list[list[float]]:
    """On each rank: time both ways and one of them again, each on a model of its own, in interleaved blocks."""
    torch.set_num_threads(1)
    steps = []
    for by in ("owners", "everywhere", "everywhere"):
        model = FullyShard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))))
        muon = WholeTensorOptimizer(model, lambda named: Muon(named, compute="float32"), by=by, bucket_bytes=2**22)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        model.synchronize()
        steps.append(muon.step)
    return take_turns(steps, blocks, 1, warm=1)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield both bars, each with its noise."""
    by_value(__name__)
    blocks = 3 if quick else MIN_BLOCKS + 4
    with Ranks(NUM_RANKS, timeout_s=600, record=False) as ranks:
        owners, everywhere, again = slowest(ranks.run(on_shards, blocks))
    what = f"a Muon step of {COUNT} matrices of {WIDTH} x {WIDTH}"
    yield compare(f"{what} on {NUM_RANKS} ranks, by owners against everywhere", owners, everywhere, bar=0.6)
    yield noise(f"{what} on {NUM_RANKS} ranks, everywhere", again, everywhere)
    torch.set_num_threads(1)
    programs = [Program(make, [nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH) for _ in range(4)]) for make in MAKES]
    ours, torchs, again = interleave([partial(program.block, 1) for program in programs], blocks)
    yield compare("a Muon step of 4 of them in one process against torch.optim.Muon", ours, torchs)
    yield noise("a step of torch.optim.Muon", again, torchs)


if __name__ == "__main__":
    run_script(__doc__, rows)
