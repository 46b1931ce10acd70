"""Products of matrices on one rank take what their shapes and their numbers make them take: of 16 bits, or of 8.

**Shapes.** A kernel cuts the output into tiles of 128 x 256. A multiprocessor makes one tile at a time, so that a wave
of tiles takes as long when few of them are left. Each tile fills the pipeline before its sum begins, which takes as
long as START terms of it:

    used = rows x columns / (waves x multiprocessors x 128 x 256) x depth / (depth + START)

A product that uses FULL or more of the device takes the best measured rate: then power bounds it.

**Numbers.** A block's products with parameters may run in 8 bits (`Plan.float8`), at the device's rate for them. What
they multiply is first quantised, in two layouts, since products of 8 bits sum over neighbours in memory:

    cast once   2 bytes per element are read, 1 is written, and 1 more transposed: 4 (Transformer Engine)
    cast twice  each layout reads 2 and writes 1: 6 (torchao, which keeps 16 bits for backward)
    gathered    parameters that came in 8 bits are copied transposed: 2
    mxfp8       as cast once, with a byte of scale for each 32 elements of a layout
    nvfp4       the largest is looked for first, 2; then half a byte per layout, and a byte of scale for each 16

That is counted in forward for inputs and parameters and in backward for outputs' gradients, in kernels that are there
anyway (assumed): they find the largest number too. Attention between heads, routers, the head and all that is kept stay
in 16 bits.

An expert's products have the rows that an even load brings it from all expert ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from distlab.plan import Cluster, Device, Experts, Layer, Plan, Product, Region, Work
from distlab.plan.require import changed
from simulator.stage.parallel_passes import Shares

TILE = (128, 256)  # of CUTLASS and cuBLAS for 16-bit products on tensor cores
START = 150  # terms of a sum. It and FULL: 183 products on A100 PCIe, SimuMax@4dcaae51, error 4.2 % (one rate: 7.3 %)
FULL = 0.95  # part
PASSES = ("forward", "input_gradient", "weight_gradient")
# Of a product [rows, depth] x [depth, columns]: rows, columns and depth of what each pass computes.
SIDES = ((0, 1, 2), (0, 2, 1), (2, 1, 0))
CAST_ONCE, CAST_TWICE, GATHERED = 4, 6, 2  # bytes of an element
# Of the kinds with a scale for each few elements: bytes that quantising moves, and that are kept of an element.
SCALED: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"mxfp8": (4 + 2 / 32, 1 + 1 / 32), "nvfp4": (5 + 2 / 16, 1 / 2 + 1 / 16)}
)


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


def with_shapes(layer: Layer, plan: Plan, cluster: Cluster) -> Layer:
    """Return the layer with longer products, where the device's multiprocessors and the products' shapes are known.

    A region's products count together, so that each of them takes longer by the same factor. Products of plain
    attention have no shapes here. Products of 8 bits are shorter, and there is more other work.

    Source: NVIDIA/TransformerEngine, cast_transpose.cu, 2023; pytorch/ao, float8_linear.py, 2024; Open Compute
        Project, microscaling formats 1.0, 2023 (mxfp8); NVIDIA 2025 (2509.25149), section 3 (nvfp4).
    """
    device, in_8_bits = cluster.device, plan.float8 != "none" and layer.input_bytes > 0  # a block
    scaled = SCALED.get(plan.float8, (CAST_TWICE if cluster.software.casts_twice else CAST_ONCE,))[0]
    rate = device.float4_flops_per_s if plan.float8 == "nvfp4" else device.float8_flops_per_s
    narrow = Narrow(scaled, GATHERED if plan.float8 == "gathers" else scaled, rate or math.inf) if in_8_bits else None
    experts = layer.experts
    has_shapes = any(region.products for region in layer.regions) or bool(experts and experts.products)
    if not has_shapes or (device.multiprocessors is None and not in_8_bits):
        return layer
    works: dict[str, Any] = {name: getattr(layer, name) for name in PASSES}
    regions = []
    for region in layer.regions:
        local = _region(region, plan, Shares.of(layer, plan), device, narrow) if region.products else region
        for name in PASSES:
            works[name] = works[name].without(getattr(region, name)) + getattr(local, name)
        regions.append(local)
    if experts is not None and experts.products:
        local_experts = _experts(experts, plan, Shares.of(layer, plan), device, narrow)
        for name in PASSES:
            works[name] = works[name].without(getattr(experts, name)) + getattr(local_experts, name)
        experts = local_experts
    return changed(layer, **works, regions=tuple(regions), experts=experts)


class Narrow(NamedTuple):
    """Bytes that quantising an element of states, and of weights, moves; and the rate of products of such numbers."""

    of_states: float
    of_weights: float
    flops_per_s: float


def _experts(experts: Experts, plan: Plan, shares: Shares, device: Device, narrow: Narrow | None) -> Experts:
    most, parts = experts.most_on_a_rank(plan.expert), experts.num_experts * shares.outside / plan.expert
    local = [(-(-p.rows * plan.expert // shares.outside), p.columns, p.depth) for p in experts.products]
    quantised = _quantised(local, parts, narrow) if narrow else {}
    works: dict[str, Any] = {}
    for name, sides in zip(PASSES, SIDES, strict=True):
        work: Work = getattr(experts, name)
        factor = _factor([[shape[side] for side in sides] for shape in local], device, narrow, most)
        works[name] = changed(work, matmul_flops=work.matmul_flops * factor) + quantised.get(name, Work())
    return changed(experts, **works)


def _region(region: Region, plan: Plan, shares: Shares, device: Device, narrow: Narrow | None) -> Region:
    local = [_local(product, plan.tensor, shares.positions) for product in region.products]
    inner = region.attention
    works: dict[str, Any] = {}
    quantised = _quantised(local, shares.inside, narrow) if narrow else {}
    for name, sides in zip(PASSES, SIDES, strict=True):
        whole: Work = getattr(region, name)
        apart = {"forward": inner.forward, "input_gradient": inner.backward}.get(name) if inner else None
        own = whole.matmul_flops - (apart.matmul_flops if apart else 0.0)
        factor = _factor([[shape[side] for side in sides] for shape in local], device, narrow)
        more = quantised.get(name, Work())
        works[name] = changed(whole, matmul_flops=whole.matmul_flops + (factor - 1) * own) + more
        if name == "forward" and region.again and plan.recompute == "operators":
            flops = region.again.matmul_flops - (inner.forward.matmul_flops if inner and not inner.is_fused else 0.0)
            again = changed(region.again, matmul_flops=region.again.matmul_flops + (factor - 1) * flops)
            works["again"] = again + more.times(flops / own)
    beside = changed(region.beside, matmul_flops=region.beside.matmul_flops * factor)  # of weights, the last of PASSES
    return changed(region, **works, beside=beside)


def _factor(shapes: Sequence[Sequence[int]], device: Device, narrow: Narrow | None, count: int = 1) -> float:
    """Return how much longer products of these rows, columns and depths take than at the device's rate of 16 bits.

    There are `count` of each, which run side by side.
    """
    sizes, slower = [math.prod(shape) for shape in shapes], 1.0
    if device.multiprocessors is not None:
        times = [slowdown(*shape, device.multiprocessors, count) for shape in shapes]
        slower = sum(size * time for size, time in zip(sizes, times, strict=True)) / sum(sizes)
    return slower * device.matmul_flops_per_s / narrow.flops_per_s if narrow else slower


def _quantised(shapes: Sequence[Sequence[int]], parts: float, narrow: Narrow) -> dict[str, Work]:
    """Return, for each pass, the work of quantising the factors of its products on a number of ranks."""
    into = sum((narrow.of_states * rows + narrow.of_weights * columns) * depth for rows, columns, depth in shapes)
    out = sum(narrow.of_states * rows * columns for rows, columns, _ in shapes)
    return {"forward": Work(memory_bytes=parts * into), "input_gradient": Work(memory_bytes=parts * out)}


def _local(product: Product, tensor: int, positions: int) -> Sequence[int]:
    """Return rows, columns and depth on a rank."""
    sides = {"columns": product.columns, "depth": product.depth}
    if product.divided:
        sides[product.divided] = -(-sides[product.divided] // tensor)
    return -(-product.rows // positions), sides["columns"], sides["depth"]
