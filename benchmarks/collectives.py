"""All-reduce over send and receive against torch's own, on 2 and 4 ranks, and bus bandwidths as nccl-tests prints them.

The bar: the ring at 16 and 64 MB of float32 takes at most as long as the backend's all-reduce. Ranks meet in a barrier
before each timed call, and a call's time is that of its slowest rank. Recording is off for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, slowest
from _rows import Row, compare, noise
from _script import backend_of, run_script

from distlab import collectives
from distlab.comm import Ranks
from distlab.comm.device import device_of, synchronize
from distlab.measure import MIN_BLOCKS, interleave

WORLD_SIZES = (2, 4)
JUDGED_MIB = (16, 64)
TABLE_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
PROGRAMS = ("all_reduce", "ring_all_reduce", "halving_doubling_all_reduce", "double_tree_all_reduce")


def time_programs(names: tuple[str, ...], num_bytes: int, blocks: int, device_type: str) -> list[list[float]]:
    """Run on each rank: time programs in interleaved blocks on a tensor of float32, after checking them."""
    rank = dist.get_rank()
    device = device_of(device_type, rank)
    source = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(rank)).to(device)
    tensor, expected = source.clone(), source.clone()
    dist.all_reduce(expected)

    def call(name: str) -> None:
        dist.all_reduce(tensor) if name == "all_reduce" else getattr(collectives, name)(tensor)

    def program(name: str) -> Callable[[], float]:
        def timed() -> float:
            tensor.copy_(source)
            synchronize(device)
            dist.barrier()
            begin = time.perf_counter()
            call(name)
            synchronize(device)
            return time.perf_counter() - begin

        return timed

    for name in names:
        tensor.copy_(source)
        call(name)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
    return interleave([program(name) for name in names], blocks)


def ranks_for(world_size: int, device: str) -> Ranks:
    """Return ranks that can move tensors of the device, for the functions of this benchmark."""
    by_value(__name__)
    return Ranks(world_size, timeout_s=300, backend=backend_of(device, world_size), record=False)


def rows(quick: bool = False, device: str = "cpu") -> Iterator[Row]:
    """Yield the judged rows, what the peer's own noise is, and the bus bandwidths reached."""
    blocks = 4 if quick else MIN_BLOCKS + 4
    for world_size in WORLD_SIZES:
        with ranks_for(world_size, device) as ranks:
            for mib in JUDGED_MIB:
                names = ("all_reduce", "ring_all_reduce", "all_reduce")
                num_bytes = mib << 20
                peer, ours, again = slowest(ranks.run(time_programs, names, num_bytes, blocks, device))
                what = f"{mib} MiB float32 on {world_size} ranks ({device}, {ranks.backend})"
                ours_gb, peer_gb = (bus_bandwidth(num_bytes, world_size, times) for times in (ours, peer))
                yield compare(
                    f"ring all-reduce of {what} against torch's all_reduce",
                    ours,
                    peer,
                    note=f"bus bandwidth {ours_gb:.2f} and {peer_gb:.2f} GB/s",
                )
                yield noise(f"torch's all_reduce of {what}", again, peer)


def bus_bandwidth(num_bytes: int, world_size: int, times_s: list[float]) -> float:
    """Return GB/s as nccl-tests defines it: S/t times 2 (n-1)/n, so that it compares with one link's speed at any n."""
    return num_bytes / float(np.median(times_s)) * 2 * (world_size - 1) / world_size / 1e9


def table(quick: bool = False, device: str = "cpu") -> Iterator[str]:
    """Yield lines as nccl-tests' all_reduce_perf prints them: time, algorithm and bus bandwidth, by size."""
    for world_size in WORLD_SIZES:
        yield f"\n# {world_size} ranks, {device}, float32, sum: time us | algbw GB/s | busbw GB/s (median of blocks)"
        yield f"{'bytes':>10}" + "".join(f"{name.removesuffix('_all_reduce'):>28}" for name in PROGRAMS)
        with ranks_for(world_size, device) as ranks:
            for num_bytes in TABLE_BYTES:
                blocks = 4 if quick else MIN_BLOCKS
                measured = slowest(ranks.run(time_programs, PROGRAMS, num_bytes, blocks, device))
                cells = []
                for times in measured:
                    median_s = float(np.median(times))
                    algorithm = num_bytes / median_s / 1e9
                    bus = bus_bandwidth(num_bytes, world_size, times)
                    cells.append(f"{median_s * 1e6:>12.0f}{algorithm:>8.3f}{bus:>8.3f}")
                yield f"{num_bytes:>10}" + "".join(cells)


if __name__ == "__main__":
    run_script(__doc__, rows, devices=True, then=table)
