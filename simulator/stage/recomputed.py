"""What backward computes again of a stage's layers: of which blocks, in which groups, and of a block how much.

    "full"       a forward of the block; its methods say of which blocks (see `distlab.plan.Plan`)
    "operators"  what is between the outputs that are kept: those of fused attention, and of the first, third, fifth ..
                 product of a block. The last product never runs again, since backward does not need its output. Experts
                 and their router run again whole.
    "selective"  attention's inner part
    others       single modules, see `simulator.stage.modules`

Source: Korthikanti et al. 2022 (2205.05198), section 5 (selective); pytorch/torchtitan, activation_checkpoint.py, 2024
    (operators, and "every" as selective_ac_option); NVIDIA/Megatron-LM, arguments.py, 2025 (uniform and block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Layer, Plan, Work, Workload
from distlab.plan.require import changed
from distlab.plan.work import COLUMNS
from simulator.stage.modules import modules_again, names_in

Bools = NDArray[np.bool_]
T = TypeVar("T")
INPUT_BYTES = COLUMNS.index("input_bytes")


def keeps_some(plan: Plan) -> bool:
    """Return whether a plan with full recompute leaves it out of some blocks."""
    return plan.recompute == "full" and plan.recompute_method != "uniform"


def all_kept(plan: Plan) -> Plan:
    """Return the plan with nothing computed again."""
    return replace(plan, recompute="none", recompute_method="uniform", recompute_layers=1)


def recomputed(workload: Workload, plan: Plan, cut: tuple[int, int]) -> Bools:
    """Return which of the layers cut[0] to cut[1] - 1, which are a stage, run again in full [L]."""
    blocks = workload.columns[INPUT_BYTES] > 0
    here = blocks[cut[0] : cut[1]]
    if plan.recompute != "full":
        return np.zeros(len(here), np.bool_)
    place = np.cumsum(here) - 1
    if plan.recompute_method == "block":
        return np.asarray(here & (place < plan.recompute_layers), np.bool_)
    if plan.recompute_method == "every":
        return np.asarray(here & ((place + blocks[: cut[0]].sum()) % plan.recompute_layers == 0), np.bool_)
    return np.asarray(here, np.bool_)


def chosen(again: Bools, full: Sequence[T], kept: Sequence[T]) -> list[T]:
    """Choose for each layer from two lists: `full` if it runs again in full, else `kept`."""
    return [one if runs else other for one, other, runs in zip(full, kept, again.tolist(), strict=True)]


def grouped(again: Bools, plan: Plan) -> Bools:
    """Return which of a stage's layers run again in a group that a different layer begins, and so keep nothing [L]."""
    inside = (np.cumsum(again) - 1) % (plan.recompute_layers if plan.recompute_method == "uniform" else 1)
    return np.asarray(again & (inside > 0), np.bool_)


def offloaded(blocks: Bools, plan: Plan) -> Bools:
    """Return which of a stage's layers, of which some are blocks, keep what they keep in the host's memory [L]."""
    return np.asarray(blocks & (np.cumsum(blocks) <= (plan.offload_layers or len(blocks))), np.bool_)


def run_again(layer: Layer, plan: Plan, *, stops_early: bool) -> Layer | None:
    """Return the layer whose forward runs again before a backward, or None: at most attention's inner part does."""
    if plan.recompute == "full" and layer.input_bytes:
        return without_last_product(layer) if stops_early else layer
    if names := names_in(plan):
        return modules_again(layer, names)
    return between_kept(layer) if plan.recompute == "operators" and layer.operator_bytes else None


def without_last_product(layer: Layer) -> Layer:
    """Return the layer with a forward that ends before its last product, whose output backward does not need.

    Nor is that output sent. A layer that ends with experts stays as it is.
    """
    last = layer.regions[-1] if layer.regions and layer.experts is None else None
    if last is None or not last.products:
        return layer
    flops = [math.prod((product.rows, product.columns, product.depth)) for product in last.products]
    inner = last.attention.forward.matmul_flops if last.attention else 0.0
    left_out = Work((last.forward.matmul_flops - inner) * flops[-1] / sum(flops), 0, 1)
    region = changed(last, forward=last.forward.without(left_out), output_bytes=0)
    return changed(layer, forward=layer.forward.without(left_out), regions=(*layer.regions[:-1], region))


def between_kept(layer: Layer) -> Layer:
    """Return the layer with a forward of what per-operator recompute runs again, and with no fused attention."""
    forward, regions = layer.forward, []
    for region in layer.regions:
        again = region.again or Work()
        is_kept = region.attention is not None and region.attention.is_fused
        forward = forward.without(region.forward) + again
        regions.append(changed(region, forward=again, attention=None if is_kept else region.attention))
    if layer.experts is None:
        regions[-1] = changed(regions[-1], output_bytes=0)
    return changed(layer, forward=forward, regions=tuple(regions))
