"""Per-operator recompute of a block: which products' outputs are kept, and what runs again between them."""

from __future__ import annotations

from dataclasses import replace

from distlab.plan import Region, Work

Shapes = tuple[tuple[int, ...], ...]


def with_operators(region: Region, products: Shapes, tokens: int, *, first: int = 0, is_last: bool = False) -> Region:
    """Return the region under per-operator recompute: the bytes that it keeps, and the work that runs again.

    Products are counted through a block from 0. Outputs of those with an even number are kept, in 16 bits. The last one
    of a block does not run again either, since backward does not need its output.

    Args:
        region: with plain attention, if any: `fuse_attention` keeps the output of a fused one.
        products: shapes of its matrices, columns of the output first, in the order in which they run.
        tokens: of a micro-batch.
        first: number of its first product in the block.
        is_last: whether its last product is the block's.

    Source: pytorch/torchtitan, activation_checkpoint.py, 2024: every second `aten.mm` of a block is computed again.
    """
    kept = [shape for number, shape in enumerate(products, first) if number % 2 == 0]
    left_out = kept if (first + len(products)) % 2 or not is_last else [*kept, products[-1]]
    flops = 2.0 * tokens * sum(columns * depth for columns, depth in left_out)
    again = region.forward.without(Work(flops, 0, min(len(left_out), region.forward.num_kernels)))
    return replace(region, again=again, kept_bytes=2 * tokens * sum(columns for columns, _ in kept))
