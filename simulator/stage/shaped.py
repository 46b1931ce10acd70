"""A layer whose products are as slow as their shapes on one rank make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distlab.plan import Device, Layer, Plan, Product, Region, Work
from simulator.hardware.products import slowdown
from simulator.stage.parallel_passes import Shares

PASSES = ("forward", "input_gradient", "weight_gradient")


def with_shapes(layer: Layer, plan: Plan, device: Device) -> Layer:
    """Return the layer with longer products, where the device's multiprocessors and the products' shapes are known.

    A region's products count together, so that each of them takes longer by the same factor. Products of plain
    attention and of experts have no shapes here.
    """
    if device.multiprocessors is None or not any(region.products for region in layer.regions):
        return layer
    works: dict[str, Any] = {name: getattr(layer, name) for name in PASSES}
    regions = []
    for region in layer.regions:
        longer = _region(region, plan, Shares.of(layer, plan), device.multiprocessors) if region.products else region
        for name in PASSES:
            works[name] = works[name].without(getattr(region, name)) + getattr(longer, name)
        regions.append(longer)
    return replace(layer, **works, regions=tuple(regions))


def _region(region: Region, plan: Plan, shares: Shares, multiprocessors: int) -> Region:
    local = [_local(product, plan.tensor, shares.positions) for product in region.products]
    flops = [math.prod(shape) for shape in local]
    inner = region.attention
    works: dict[str, Any] = {}
    for name, sides in zip(PASSES, ((0, 1, 2), (0, 2, 1), (2, 1, 0)), strict=True):
        times = [slowdown(*(shape[side] for side in sides), multiprocessors) for shape in local]
        factor = sum(size * time for size, time in zip(flops, times, strict=True)) / sum(flops)
        whole: Work = getattr(region, name)
        apart = {"forward": inner.forward, "input_gradient": inner.backward}.get(name) if inner else None
        own = whole.matmul_flops - (apart.matmul_flops if apart else 0.0)
        works[name] = replace(whole, matmul_flops=whole.matmul_flops + (factor - 1) * own)
    beside = replace(region.beside, matmul_flops=region.beside.matmul_flops * factor)  # of weights, the last of PASSES
    return replace(region, **works, beside=beside)


def _local(product: Product, tensor: int, positions: int) -> Sequence[int]:
    """Return rows, columns and depth on a rank."""
    sides = {"columns": product.columns, "depth": product.depth}
    if product.divided:
        sides[product.divided] = -(-sides[product.divided] // tensor)
    return -(-product.rows // positions), sides["columns"], sides["depth"]
