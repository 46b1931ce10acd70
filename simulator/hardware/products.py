"""What the shape of a matrix product costs: tiles at the edges, a last wave that is not full, and short sums.

A kernel cuts the output into tiles of 128 x 256. A multiprocessor makes one tile at a time, so that a wave of tiles
takes as long when few of them are left. Each tile fills the pipeline before its sum begins, which takes as long as
START terms of it:

    used = rows x columns / (waves x multiprocessors x 128 x 256) x depth / (depth + START)

A product that uses FULL or more of the device takes the best measured rate: then power bounds it.
"""

from __future__ import annotations

import math
from functools import lru_cache

TILE = (128, 256)  # of CUTLASS and cuBLAS for 16-bit products on tensor cores
START = 150  # terms of a sum. It and FULL: 183 products on A100 PCIe, SimuMax@4dcaae51, error 4.2 % (one rate: 7.3 %)
FULL = 0.95  # part


@lru_cache(maxsize=4096)
def slowdown(rows: int, columns: int, depth: int, multiprocessors: int, count: int = 1) -> float:
    """Return how many times longer a product takes than at the best measured rate: 1.0 at best.

    Of `count` equal products, such as those of experts, the tiles of all share the multiprocessors (assumed).

    Cost: an output of one tile takes as long as one of as many tiles as there are multiprocessors.
    """
    most = 0.0
    for height, width in (TILE, TILE[::-1]):
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / multiprocessors)
        most = max(most, count * rows * columns / (waves * multiprocessors * height * width))
    return max(1.0, FULL * (depth + START) / (most * depth))
