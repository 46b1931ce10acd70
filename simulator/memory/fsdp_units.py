"""What units of sharding hold while layers run: gathered parameters, and gradients on their way.

Forward gathers the root first, and each unit with those fetched ahead; backward the same from the other end. A unit's
gradients wait until all are there (raw), are put end to end (flat), and travel while the next unit computes. At the
same time the other ranks' parts of the own shard arrive, n - 1 at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Layer, Plan
from simulator.gradients.fsdp_units import gathered_bytes, units_of
from simulator.precision import Widths

Floats = NDArray[np.float64]


class UnitBytes(NamedTuple):
    """Bytes of one rank of a sharded model.

    Attributes:
        shard: elements of its shards, padding included.
        forward: gathered while each layer's forward runs [L].
        backward: gathered, and gradients on their way, while each layer's backward runs [L].
        raw: gradients of a unit that is not done yet, when each layer's backward begins [L].
        grown: of shards' gradients, when each layer's first backward begins, and after it [L + 1].
        tail: on its way from the end of a backward until the next one has passed a unit [L].
    """

    shard: float
    forward: Floats
    backward: Floats
    raw: Floats
    grown: Floats
    tail: Floats


def _beyond_the_model(layers: Sequence[Layer]) -> int:
    """Return the first of the last layers that use no parameters, tied ones neither: they run outside the model."""
    place = len(layers)
    while place and not layers[place - 1].parameter_sizes and not layers[place - 1].weight_gradient.matmul_flops:
        place -= 1
    return place


def unit_bytes(layers: Sequence[Layer], parameters: Floats, largest: Floats, plan: Plan, widths: Widths) -> UnitBytes:
    """Count what the units of some layers hold.

    Args:
        layers: in forward order.
        parameters: elements of each on a rank [L].
        largest: of the largest tensor of each [L].
        plan: how they are sharded.
        widths: bytes of an element.
    """
    sharding = plan.sharding
    ranks, prefetch = sharding.num_shards(plan.copies), sharding.prefetch
    units = units_of(layers, sharding.unit_layers)
    padded = [float(np.ceil(parameters[list(unit.layers)].sum() / ranks) * ranks) for unit in units]
    root = sum(size for unit, size in zip(units, padded, strict=True) if unit.is_root)
    blocks = [unit for unit in units if not unit.is_root]
    sizes = np.array([size for unit, size in zip(units, padded, strict=True) if not unit.is_root])
    up_to, number = np.append(0.0, np.cumsum(sizes)), len(sizes)
    own = np.full(len(layers), -1)  # the unit of each layer, or -1: the root's, or no parameters
    for index, unit in enumerate(blocks):
        own[list(unit.layers)] = index
    inside = own >= 0
    begun = np.searchsorted([unit.layers[0] for unit in blocks], np.arange(len(layers)), side="right")
    low = begun - inside
    ahead, behind = np.minimum(low + prefetch + inside, number), np.maximum(begun - prefetch - inside, 0)
    kept = sharding.reshard_after_forward
    width, whole = gathered_bytes(plan, widths, is_root=False), root * widths.parameter
    forward = whole + width * (up_to[ahead] - (up_to[low] if kept else 0.0))
    backward = whole + width * (up_to[begun] - (up_to[behind] if kept else 0.0))
    # A flat gradient, and the other ranks' parts of the own shard: of the unit done last.
    travels = np.append(sizes, 0.0) * (1 + (ranks - 1) / ranks)
    last = (root or (sizes[0] if number else 0.0)) * (1 + (ranks - 1) / ranks)
    # The root's own gradients wait for its first layer; a tied weight's is there from the last layer on.
    raw = np.full(len(layers), root)
    for unit in blocks:
        after = 0.0
        for layer in reversed(unit.layers):
            raw[layer] += after + min(largest[layer], parameters[layer])
            after += parameters[layer]
    beyond = _beyond_the_model(layers)  # the loss: the root went when the model's forward ended, and is not back yet
    raw[beyond:] = 0.0
    if kept:
        forward[beyond:] = backward[beyond:] = 0.0
    done = np.append(np.append(np.cumsum(sizes[::-1])[::-1], 0.0), [0.0, 0.0])  # units from each on
    total = root + float(sizes.sum())
    return UnitBytes(
        total / ranks,
        forward,
        backward + travels[begun] * widths.reduce,
        raw * widths.parameter,
        np.append(done[begun + 1], total) / ranks * widths.gradient,
        np.where(begun == number, last, 0.0) * widths.reduce,
    )
