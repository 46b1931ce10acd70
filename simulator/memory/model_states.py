"""Model states of a rank: parameters, optimizer state, gradients, and the buckets that gradients travel in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import Layer, Plan, assign_buckets
from simulator.memory.fsdp_units import UnitBytes
from simulator.precision import Widths

Floats = NDArray[np.float64]

# The kinds in which memory is counted, and the column of each.
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "master weights",
    "activations",
    "logits",
    "buffers",
    "temporary",
    "errors",
)
PARAMETERS, GRADIENTS, OPTIMIZER, MASTER, ACTIVATIONS, LOGITS, BUFFERS, TEMPORARY, ERRORS = range(len(KINDS))


class States(NamedTuple):
    """What training holds in addition to activations.

    Attributes:
        always: during the whole step [K].
        grown: gradients, when each layer's first backward begins, and after it [L + 1].
        unsent: like `grown`, for gradients that wait outside the buckets until the last micro-batch [L + 1].
        arriving: of other ranks' gradients, when each layer's backward begins, and after it [L + 1].
        host: in the host's memory.
    """

    always: Floats
    grown: Floats
    unsent: Floats
    arriving: Floats
    host: int


def count_states(
    layers: Sequence[Layer],
    elements: tuple[Floats, Floats],
    plan: Plan,
    widths: Widths,
    units: UnitBytes | None,
    *,
    flat_buffers: bool = False,
) -> States:
    """Count the states of some layers.

    Args:
        layers: in forward order.
        elements: of each layer on a rank: all parameters, and of these its experts' [L]. Experts have fewer copies to
            share their states out over.
        plan: how they are held.
        widths: bytes of an element.
        units: under stage 3, what units hold.
        flat_buffers: every gradient is made, added up and scattered in the buffer that travels (see `Cluster`).
    """
    sharding, (parameters, experts) = plan.sharding, elements
    ranks = sharding.num_shards(plan.copies)
    whole, shard = float(parameters.sum()), units.shard if units else _shard(parameters, experts, plan)
    always = np.zeros(len(KINDS))
    always[PARAMETERS] = (shard if sharding.stage == 3 else whole) * widths.parameter
    always[OPTIMIZER] = (shard if sharding.stage else whole) * widths.optimizer
    always[MASTER] = (shard if sharding.stage else whole) * widths.master
    gradients = (shard if sharding.stage >= 2 else whole) * widths.gradient
    passed = _passed(parameters)
    arriving = np.zeros(len(passed))
    if plan.copies > 1 and sharding.stage < 3:
        sizes = _bucket_bytes(tuple(layer.parameter_sizes for layer in layers), plan.bucket_bytes, widths.gradient)
        two = sum(sizes[:2]) if len(sizes) < 2 else 2.0 * max(sizes)  # one is filled while another travels
        two /= plan.tensor
        if sharding.stage and not flat_buffers:
            ends = _passed(np.array([layer.num_parameters for layer in layers], np.float64)) * widths.gradient
            arriving = _under_way(np.array(sizes), ends) / plan.tensor * (ranks - 1) / ranks
        if sharding.stage == 2:  # used again and again, also by the next step
            always[BUFFERS] = two
        elif plan.gradient_sync in ("flat", "bucketed") and not flat_buffers:
            always[BUFFERS] = whole * widths.gradient
        elif widths.reduce != widths.gradient:
            arriving = arriving + two * widths.reduce / widths.gradient
        if plan.compression and plan.compression.error_feedback:
            always[ERRORS] = whole * widths.gradient
    in_buckets = _in_buckets(plan, flat_buffers)
    grown = units.grown if units else np.ceil(passed / max(whole, 1.0) * gradients) * (not in_buckets)
    always[GRADIENTS] = gradients if in_buckets else 0.0
    # Micro-batches before the last leave their gradients where backward puts them, so that their sum can be divided
    # into the buckets and sent once. Stage 2 does not keep them: it sends after each micro-batch.
    waits = in_buckets and not flat_buffers and sharding.stage < 2 and plan.num_microbatches > 1
    unsent = passed * widths.gradient * waits
    moved = {"none": (), "optimizer": (OPTIMIZER, MASTER), "all": (PARAMETERS, OPTIMIZER, MASTER)}[sharding.offload]
    host = float(sum(always[kind] for kind in moved))
    always[list(moved)] = 0.0
    if sharding.offload == "all":  # shards and their gradients live together
        host += gradients
        always[GRADIENTS], grown = 0.0, np.zeros(len(passed))
    return States(always, grown, unsent, arriving, int(np.ceil(host)))


def _shard(parameters: Floats, experts: Floats, plan: Plan) -> float:
    """Return the elements of a rank's shard; experts have fewer copies, and larger shards."""
    whole, ranks = float(parameters.sum()), plan.sharding.num_shards(plan.copies)
    if plan.expert == 1 or not experts.any():
        return float(np.ceil(whole / ranks))
    few = plan.sharding.num_shards(plan.data * plan.context)
    return float(np.ceil((whole - experts.sum()) / ranks) + np.ceil(experts.sum() / few))


def _passed(sizes: Floats) -> Floats:
    """Return the sum over the layers behind each, which backward has passed when it comes to it, and over all."""
    return np.append(np.append(np.cumsum(sizes[::-1])[::-1][1:], 0.0), sizes.sum())


def _under_way(sizes: Floats, passed: Floats) -> Floats:
    """Return the bytes of buckets that travel, from the bytes of gradients that exist.

    The last full one does; the one before it is waited for when the next bucket gets its first gradient.
    """
    ends = np.cumsum(sizes)
    full = np.searchsorted(ends, passed, side="right")
    padded = np.concatenate([[0.0, 0.0], sizes])
    next_is_empty = np.concatenate([[0.0], ends])[full] == passed
    return np.asarray(padded[full + 1] + padded[full] * next_is_empty, np.float64)


@lru_cache(maxsize=256)
def _bucket_bytes(sizes: tuple[tuple[int, ...], ...], bucket_bytes: int, width: int) -> tuple[float, ...]:
    """Return the bytes of each bucket, in the order in which backward fills them."""
    buckets = assign_buckets([size * width for layer in sizes for size in layer], bucket_bytes)
    return tuple(float(bucket.num_bytes) for bucket in buckets)


def _in_buckets(plan: Plan, flat_buffers: bool) -> bool:
    """Whether gradients, or under stage 2 their shard, live in flat buffers all the time."""
    travels = plan.copies > 1 and (plan.sharding.stage > 0 or plan.gradient_sync == "overlapped")
    return plan.sharding.stage < 3 and (flat_buffers or travels)
