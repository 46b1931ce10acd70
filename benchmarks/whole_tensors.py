"""A Muon step of 12 matrices of 512 x 512 in shards of 4 ranks: by owners at most 0.6 of everywhere's time (CPU)."""

from collections.abc import Iterator

import torch
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, noise
from _script import run_script
from torch import nn

from distlab.comm import Ranks
from distlab.large_batch import Muon
from distlab.measure import MIN_BLOCKS
from distlab.sharding import FullyShard, WholeTensorOptimizer


def on_shards(blocks: int) -> list[list[float]]:
    """On each rank: time both ways and one of them again, each on a model of its own, in interleaved blocks."""
    torch.set_num_threads(1)
    steps = []
    for by in ("owners", "everywhere", "everywhere"):
        model = FullyShard(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12))))
        muon = WholeTensorOptimizer(model, lambda named: Muon(named, compute="float32"), by=by)
        model(torch.randn(4, 512)).square().mean().backward()
        model.synchronize()
        steps.append(muon.step)
    return take_turns(steps, blocks, 1, warm=1)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the bar and its noise; a block's time is that of the slowest rank."""
    by_value(__name__)
    with Ranks(4, timeout_s=600, record=False) as ranks:
        owners, everywhere, again = slowest(ranks.run(on_shards, 3 if quick else MIN_BLOCKS + 4))
    what = "a Muon step of 12 matrices of 512 x 512 on 4 ranks"
    yield compare(f"{what}, by owners against everywhere", owners, everywhere, bar=0.6)
    yield noise(f"{what}, everywhere", again, everywhere)


if __name__ == "__main__":
    run_script(__doc__, rows)
