"""A tensor of 16 MiB on 4 ranks from one placement to a different one, against DTensor.redistribute.

Both live in the same ranks, in shared memory, and take turns block by block; a block's time is that of the slowest
rank. DTensor brings S(0) to S(1) on the CPU by an all-gather. CPU, float32, one thread per rank, recording off.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, noise
from _script import run_script

from distlab.comm import Ranks
from distlab.measure import MIN_BLOCKS
from distlab.placements import cut, layout_of, redistribute

NUM_RANKS, SHAPE = 4, (2048, 2048)
CASES = (("S(0)", "R"), ("S(1)", "R"), ("P", "R"), ("P", "S(0)"), ("P", "S(1)"), ("S(0)", "S(1)"))


def time_case(before: str, after: str, blocks: int, repeats: int) -> list[list[float]]:
    """On each rank: time ours, DTensor and DTensor again in interleaved blocks; what they make is equal."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    torch.set_num_threads(1)
    placements = {"S(0)": Shard(0), "S(1)": Shard(1), "R": Replicate(), "P": Partial()}
    mesh = DeviceMesh("cpu", torch.arange(NUM_RANKS))
    whole = torch.randint(-3, 4, SHAPE, generator=torch.Generator().manual_seed(0)).float()
    local = cut(whole, layout_of(before), (NUM_RANKS,), dist.get_rank())
    other = DTensor.from_local(local, mesh, [placements[before]])

    def theirs() -> torch.Tensor:
        made = other.redistribute(mesh, [placements[after]]).to_local()
        return made.wait() if hasattr(made, "wait") else made

    ours = partial(redistribute, local, SHAPE, layout_of(before), layout_of(after), [None])
    assert torch.equal(ours(), theirs()), f"{before} to {after}"
    return take_turns([ours, theirs, theirs], blocks, repeats)


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield for each change of placement the bar and the noise."""
    by_value(__name__)
    blocks, repeats = (3, 1) if quick else (MIN_BLOCKS + 4, 4)
    with Ranks(NUM_RANKS, timeout_s=600, backend="shared", record=False) as ranks:
        for before, after in CASES:
            ours, peer, again = slowest(ranks.run(time_case, before, after, blocks, repeats))
            what = f"16 MiB from {before} to {after} on {NUM_RANKS} ranks (shared)"
            yield compare(f"redistribute {what} against DTensor", ours, peer)
            yield noise(f"{what}, DTensor", again, peer)


if __name__ == "__main__":
    run_script(__doc__, rows)
