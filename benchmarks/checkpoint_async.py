"""How long does a save hold training up, when a thread writes it: against a save that training waits for.

Held up are the call of `save` and the wait in the next update for the copy of the state, which a thread makes during
forward and backward. A block saves once each way in the middle of training; what the thread still writes is awaited
between blocks, and not counted, as saves are minutes apart. Rows without a bar tell what the thread costs the steps
beside it: a rank and its thread share a core here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _blocks import by_value, seconds_of
from _rows import Row, compare, noise, without_bar
from _script import run_script

from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import AsyncSaves, save
from distlab.comm import Ranks
from distlab.data_parallel import DataParallel
from distlab.measure import MIN_BLOCKS
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedState

CONFIG = GPTConfig(context=64, num_layers=6, num_heads=6, hidden_size=384)
SAMPLES = 4
STEPS_BESIDE = 3


def plain() -> tuple[Any, Any, Any, dict[str, Any]]:
    """Replicas: rank 0 writes weights and moments for all."""
    model = GPT(CONFIG, generator(0, 0, "weights"))
    replicas, optimizer = DataParallel(model), torch.optim.AdamW(model.parameters())
    return model, replicas, optimizer, {"model": model, "optimizer": optimizer}


def sharded() -> tuple[Any, Any, Any, dict[str, Any]]:
    """Shards: each rank writes its own."""
    model = FullyShard(GPT(CONFIG, generator(0, 0, "weights")))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, model, optimizer, {"training": ShardedState(model, optimizer)}


WAYS = {"replicas": plain, "FullyShard": sharded}


def measure(folder: Path, way: str, blocks: int) -> dict[str, list[float]]:
    """Run on each rank: seconds of each block, by what was measured."""
    model, gradients, optimizer, parts = WAYS[way]()
    tokens = torch.randint(256, (SAMPLES, CONFIG.context), generator=generator(0, dist.get_rank(), "data"))

    def step() -> None:
        GPT.loss(model(tokens), tokens).backward()
        gradients.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    def steps(number: int) -> float:
        return seconds_of(lambda: [step() for _ in range(number)])

    def at_once(number: int) -> float:
        dist.barrier()
        return seconds_of(lambda: save(folder / "at once", number, parts=parts, keep=1))

    found: dict[str, list[float]] = {name: [] for name in ("at once", "again", "held", "alone", "beside")}
    saves = AsyncSaves(folder / "beside", keep=1)
    steps(2)
    for number in range(blocks + 1):  # the first one warms files and buffers up
        found["alone"].append(steps(STEPS_BESIDE))
        found["at once"].append(at_once(2 * number))
        dist.barrier()
        before_s = saves.held_s
        saves.save(number, parts=parts)
        found["beside"].append(steps(STEPS_BESIDE))
        found["held"].append(saves.held_s - before_s)
        saves.wait()
        found["again"].append(at_once(2 * number + 1))
    gradients.close()
    return {name: seconds[1:] for name, seconds in found.items()}


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the bar and its context for each way."""
    by_value(__name__)
    num_parameters = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder, Ranks(2, timeout_s=600, echo=False) as ranks:
            found = ranks.run(measure, Path(folder), way, 3 if quick else MIN_BLOCKS)
        slowest = {name: [max(times) for times in zip(*(one[name] for one in found), strict=True)] for name in found[0]}
        what = f"{way}, {12 * num_parameters / 1e6:.0f} MB of weights and moments, 2 ranks"
        claim = f"AsyncSaves: what a save holds training up for, against a save at once: {what}"
        yield compare(claim, slowest["held"], slowest["at once"], bar=0.05)
        yield noise(f"saves at once, {what}", slowest["again"], slowest["at once"])
        claim = f"{STEPS_BESIDE} steps while the thread writes, against steps alone: {what}"
        yield without_bar(compare(claim, slowest["beside"], slowest["alone"]))


if __name__ == "__main__":
    run_script(__doc__, rows)
