"""Model states of a rank: parameters, optimizer state and gradients, and the buckets or units that they travel in.

Under stage 3, forward gathers the root unit first, and each unit with those fetched ahead; backward the same from the
other end. A unit's gradients wait until all are there (raw), are put end to end (flat), and travel while the next unit
computes. At the same time the other ranks' parts of the own shard arrive, n - 1 at once. Software that takes each
tensor by itself, a root's too, has at most two of a layer's whole, or `Software.live_elements`, and as many gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan import PLAIN, Layer, Plan, Software, assign_buckets
from simulator.gradients.fsdp_units import Unit, gathered_bytes, units_of
from simulator.units import Widths

Floats = NDArray[np.float64]
Both = tuple[Floats, Floats]

# The kinds in which memory is counted, and the column of each.
KINDS = (
    *("parameters", "gradients", "optimizer", "master weights"),
    *("activations", "logits", "buffers", "temporary", "errors"),
)
PARAMETERS, GRADIENTS, OPTIMIZER, MASTER, ACTIVATIONS, LOGITS, BUFFERS, TEMPORARY, ERRORS = range(len(KINDS))


class UnitBytes(NamedTuple):
    """Bytes of one rank of a sharded model.

    Attributes:
        shard: elements of its shards, padding included.
        forward: gathered while each layer's forward runs [L].
        backward: gathered, and gradients on their way, while each layer's backward runs [L].
        raw: gradients of a unit that is not done yet, when each layer's backward begins [L].
        grown: of shards' gradients, when each layer's first backward begins, and after it [L + 1].
        tail: on its way from the end of a backward until the next one has passed a unit [L].
        whole: gathered all the time, where parameters stay from the first micro-batch to the last.
    """

    shard: float
    forward: Floats
    backward: Floats
    raw: Floats
    grown: Floats
    tail: Floats
    whole: float


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
    elements: Both,
    plan: Plan,
    widths: Widths,
    units: UnitBytes | None,
    base: float = 0.0,
    *,
    software: Software = PLAIN,
) -> States:
    """Count the states of some layers.

    Args:
        layers: in forward order.
        elements: of each layer on a rank: all parameters, and of these its experts' [L], which have fewer copies.
        plan: how they are held.
        widths: bytes of an element.
        units: under stage 3, what units hold.
        base: bytes of a frozen base on a rank, before stage 3 shards them.
        software: see `Software`; with `flat_buffers`, every gradient is made and added up in the buffer that travels.
    """
    sharding, (parameters, experts), flat_buffers = plan.sharding, elements, software.flat_buffers
    ranks = sharding.num_shards(plan.copies)
    whole, shard = float(parameters.sum()), units.shard if units else _shard(parameters, experts, plan)
    always = np.zeros(len(KINDS))
    always[PARAMETERS] = shard * widths.parameter + base / ranks if units else whole * widths.parameter + base
    always[[OPTIMIZER, MASTER]] = (shard if sharding.stage else whole) * np.array([widths.optimizer, widths.master])
    always[BUFFERS] = units.whole if units else 0.0
    gradients = (shard if sharding.stage >= 2 else whole) * widths.gradient
    arriving = np.zeros(len(passed := _passed(parameters)))
    if plan.copies > 1 and sharding.stage < 3:
        sizes = _bucket_bytes(tuple(layer.parameter_sizes for layer in layers), plan.bucket_bytes, widths.gradient)
        # Two buckets: one is filled while the other travels.
        two = (sum(sizes[:2]) if len(sizes) < 2 else 2.0 * max(sizes)) / plan.tensor
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
    # Whether gradients, or under stage 2 their shard, live in flat buffers all the time.
    in_buckets = flat_buffers or (plan.copies > 1 and (sharding.stage > 0 or plan.gradient_sync == "overlapped"))
    in_buckets = software.pools_gradients if units else in_buckets
    grown = (units.grown if units else np.ceil(passed / max(whole, 1.0) * gradients)) * (not in_buckets)
    always[GRADIENTS] = gradients if in_buckets else 0.0
    # Before the last micro-batch gradients stay where backward puts them; their sum is sent once. Stage 2 sends each.
    own = in_buckets and not flat_buffers and sharding.stage < 2
    waits = plan.pipeline > 1 and not software.scatters_each if units else own
    unsent = (passed * widths.gradient - grown) * (waits and plan.num_microbatches > 1)
    moved = {"none": (), "optimizer": (OPTIMIZER, MASTER), "all": (PARAMETERS, OPTIMIZER, MASTER)}[sharding.offload]
    host = float(sum(always[kind] for kind in moved))
    always[list(moved)] = 0.0
    if sharding.offload == "all" or (software.hosts_gradients and moved and sharding.stage > 1):  # and their gradients
        host, always[GRADIENTS], grown = host + gradients, 0.0, np.zeros(len(passed))
    return States(always, grown, unsent, arriving, int(np.ceil(host)))


def _shard(parameters: Floats, experts: Floats, plan: Plan) -> float:
    """Return the elements of a rank's shard; experts have fewer copies, and larger shards."""
    whole, ranks = float(parameters.sum()), plan.sharding.num_shards(plan.copies)
    if plan.expert == 1 or not experts.any():
        return float(np.ceil(whole / ranks))
    few = plan.sharding.num_shards(plan.expert_copies)
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


def unit_bytes(
    layers: Sequence[Layer],
    elements: tuple[Floats, Floats, Floats],
    largest: Floats,
    plan: Plan,
    widths: Widths,
    software: Software,
) -> UnitBytes:
    """Count what the units of some layers hold.

    Args:
        layers: in forward order.
        elements: of each on a rank: what is trained, what a frozen base is as wide as, and of the former experts [L],
            which fewer ranks share.
        largest: of the largest tensor of each [L].
        plan: how they are sharded.
        widths: bytes of an element.
        software: whether it gathers once beside a pipeline, and tensor by tensor.
    """
    sharding, (parameters, base, experts), prefetch = plan.sharding, elements, plan.sharding.prefetch
    experts = experts * (plan.expert > 1)
    units = units_of(layers, sharding.unit_layers)
    blocks = [unit for unit in units if not unit.is_root]
    root, root_shard, sizes, shards = _padded(units, parameters, experts, plan)
    whole_root, _, whole_sizes, _ = _padded(units, parameters + base, experts, plan)
    up_to, number = np.append(0.0, np.cumsum(whole_sizes)), len(sizes)
    inside = np.bincount(np.array([at for unit in blocks for at in unit.layers], np.int64), minlength=len(layers)) > 0
    begun = np.searchsorted([unit.layers[0] for unit in blocks], np.arange(len(layers)), side="right")
    low = begun - inside
    ahead, behind = np.minimum(low + prefetch + inside, number), np.maximum(begun - prefetch - inside, 0)
    kept = sharding.reshard_after_forward
    by_tensor, live = kept and software.by_tensor, software.live_elements
    alone = by_tensor and live is None  # nothing stays for its next use
    limits = np.maximum(2 * largest, live or 0.0) if by_tensor else np.full(len(layers), np.inf)
    limit = limits[inside].max(initial=0.0)
    held = np.where(inside, 0.0, parameters + base) if alone else whole_root
    width, whole = gathered_bytes(plan, widths, is_root=False), np.minimum(held, limits) * widths.parameter
    forward = whole + width * np.minimum(up_to[ahead] - (up_to[low] if kept else 0.0), limit)
    backward = whole + width * np.minimum(up_to[begun] - (up_to[behind] if kept else 0.0), limit)
    # A flat gradient, and the other ranks' parts of the own shard: of the unit done last.
    travels = np.append(np.minimum(2 * sizes - shards, limit), 0.0)
    last = min(2 * root - root_shard if root else travels[0], limits.max())
    raw = np.minimum(parameters if alone else _raw(blocks, root, parameters, largest), limits)
    # Behind the last layer that uses parameters is the loss: the root went when the model ended, and is not back yet.
    beyond = max((n + 1 for n, own in enumerate(layers) if own.parameter_sizes or own.forward.matmul_flops), default=0)
    raw[beyond:] = 0.0
    if kept:
        forward[beyond:] = backward[beyond:] = 0.0
    once = software.gathers_once and plan.pipeline > 1
    done = np.append(np.append(np.cumsum(shards[::-1])[::-1], 0.0), [0.0, 0.0])  # units from each on
    total = root_shard + float(shards.sum())
    return UnitBytes(
        total,
        forward * (not once),
        backward * (not once) + travels[begun] * widths.reduce,
        raw * widths.parameter,
        np.append(done[begun + 1], total) * widths.gradient,
        np.where(begun == number, last, 0.0) * widths.reduce,
        once * (whole_root * widths.parameter + width * float(whole_sizes.sum())),
    )


def _padded(
    units: Sequence[Unit], elements: Floats, experts: Floats, plan: Plan
) -> tuple[float, float, Floats, Floats]:
    """Return the elements of the root unit and of its shard, and of each other one, filled up to equal shards."""
    sizes = np.zeros((2, len(units)))
    parts = [(plan.copies, elements - experts)]
    parts += [(plan.expert_copies, experts)] if plan.expert > 1 else []
    for ranks, part in parts:
        count = plan.sharding.num_shards(ranks)
        each = np.ceil([part[list(unit.layers)].sum() / count for unit in units])
        sizes += [each * count, each]
    is_root = np.array([unit.is_root for unit in units], np.bool_)
    (root, own), rest = sizes[:, is_root].sum(axis=1).tolist(), sizes[:, ~is_root]
    return root, own, rest[0], rest[1]


def _raw(blocks: Sequence[Unit], root: float, parameters: Floats, largest: Floats) -> Floats:
    """Return the gradients of units that are not done yet, when each layer's backward begins.

    The root's own gradients wait for its first layer; a tied weight's is there from the last layer on.
    """
    raw = np.full(len(parameters), root)
    for unit in blocks:
        after = 0.0
        for layer in reversed(unit.layers):
            raw[layer] += after + min(largest[layer], parameters[layer])
            after += parameters[layer]
    return raw
