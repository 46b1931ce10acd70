"""What a rank holds of one pipeline stage: bytes by kind, all the time and while each layer passes forward or backward.

A micro-batch's activations are held layer by layer: from the start of a layer's forward to the end of its backward. So
what is held over a step rises and falls like the teeth of a saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distlab.plan import PLAIN, Layer, Plan, Product, Software, Workload
from distlab.plan.work import COLUMNS, kinds_of
from simulator.memory.model_states import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    count_states,
    unit_bytes,
)
from simulator.stage.local_layer import base_on_a_rank, local_layers
from simulator.stage.modules import dropped_bytes, names_in
from simulator.stage.products import SCALED
from simulator.stage.recomputed import Bools, grouped, offloaded, recomputed
from simulator.units import Widths, widths_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTS = ("gate_bytes", "expert_gate_bytes", "dropped_bytes", "divided_dropped_bytes")
F = 0  # a forward pass, as in the kinds F, B, I, W
# Where a stage is with its gradients: it has none, makes the first, is between, makes the last or the only one; ONLY
# stands for FIRST and LAST in one.
NONE, FIRST, MIDDLE, LAST, AFTER, ONLY = range(6)


@dataclass(frozen=True, eq=False)
class StageBytes:
    """What a rank of one stage holds, one column per kind of KINDS.

    Attributes:
        always: during the whole step [K].
        kept: of one micro-batch by each layer, from its forward to its backward [L, K].
        until_weights: the part of it that stays after I, until W [L, K].
        forward: in addition, while each layer's forward runs [L, K].
        backward: the same while each layer's backward runs [L, K].
        between: from the end of a micro-batch's forward to the start of its backward [K].
        update: in addition to what is held then, while the optimizer works [K].
        gradients: bytes that the first backward has added when each layer's backward begins, and after it [L + 1].
        unsent: like `gradients`, for those that wait outside the buckets until the last micro-batch is added [L + 1].
        tail: of buffers, from the end of a backward until the next one has passed a unit [L].
        ends: of buffers, at the end of a backward.
        host: in the host's memory.
        kept_on_host: the same of one micro-batch, from its forward to its backward.
    """

    always: Ints
    kept: Ints
    until_weights: Ints
    forward: Ints
    backward: Ints
    between: Ints
    update: Ints
    gradients: Ints
    unsent: Ints
    tail: Ints
    ends: int
    host: int
    kept_on_host: int = 0

    def working(self, kind: Ints, others: Ints, waiting: Ints, phase: Ints) -> Ints:
        """Return what is held as each layer of each pass begins, and in the last column after the pass.

        Without `always`, and of this stage alone. An I frees what its W does not need (see `until_weights`). `others`
        counts the micro-batches held in addition to the one at work, `waiting` those whose I has run and W has not.

        Shapes: kind [A], others [A], waiting [A], phase [A] -> [A, L + 1, K]
        """
        held = self.kept.cumsum(axis=0)
        whole = held[-1]
        forward = np.concatenate([held + self.forward, (whole + self.between)[None]])
        backward = np.concatenate([(held + self.backward)[::-1], np.zeros((1, held.shape[1]), np.int64)])
        backward[-1, BUFFERS] = self.ends
        waits = self.until_weights.cumsum(axis=0)
        freed = (whole - waits[-1] - held + waits)[::-1]
        inputs = np.concatenate([(whole + self.backward)[::-1] - freed, waits[-1:]])
        weights = np.concatenate([(waits + self.backward)[::-1], backward[-1:]])
        rows = np.stack([forward, backward, inputs, weights])[kind]
        rows += (others - waiting)[:, None, None] * whole + waiting[:, None, None] * waits[-1]
        order = np.append(np.arange(len(held))[::-1], len(held))  # backward begins with the last layer
        grown, unsent = np.zeros((2, 6, len(order)), np.int64)
        grown[[FIRST, ONLY]] = self.gradients[order]
        grown[[MIDDLE, LAST, AFTER]] = self.gradients[-1]
        unsent[FIRST], unsent[MIDDLE] = self.unsent[order], self.unsent[-1]
        unsent[LAST], unsent[ONLY] = (self.unsent[-1] - self.unsent)[order], self.unsent[-1]
        rows[:, :, GRADIENTS] += (grown + unsent)[phase]
        travels = np.where((kind == F)[:, None], self.tail.max(), np.append(self.tail[::-1], 0))
        rows[:, :, BUFFERS] += travels * ((phase == MIDDLE) | (phase == LAST))[:, None]
        return np.asarray(rows, np.int64)

    def resting(self, held: Ints, waiting: Ints, phase: Ints) -> Ints:
        """Return what the stage holds while its rank works on one of its other stages: all of them [A] -> [A, K]."""
        rows = (held - waiting)[:, None] * self.kept.sum(axis=0) + waiting[:, None] * self.until_weights.sum(axis=0)
        rows[:, GRADIENTS] += (phase >= MIDDLE) * self.gradients[-1] + (phase == MIDDLE) * self.unsent[-1]
        return np.asarray(rows, np.int64)


def count_stage(workload: Workload, plan: Plan, cut: tuple[int, int], *, software: Software = PLAIN) -> StageBytes:
    """Count what a rank of the stage with layers cut[0] to cut[1] - 1 holds.

    Args:
        workload: the model.
        plan: how it is laid out.
        cut: first layer of the stage and one past its last.
        software: how gradients and parameters are kept, and what is kept in 8 bits.
    """
    table = dict(zip(COLUMNS, workload.columns[:, cut[0] : cut[1]], strict=True))
    widths = widths_of(workload, plan)
    layers = workload.layers[cut[0] : cut[1]]
    mixtures = [layer.experts for layer in layers]
    shares = [each.most_on_a_rank(plan.expert) / each.num_experts if each else 1.0 for each in mixtures]
    experts = table["expert_parameters"] * np.array(shares)  # on the ranks that have most of them [L]
    parameters = table["num_parameters"] - table["tensor_parameters"] - table["expert_parameters"] + experts
    parameters = parameters + np.ceil(table["tensor_parameters"] / plan.tensor)
    largest = np.minimum(table["largest_parameter"], parameters)
    full = recomputed(workload, plan, cut)
    kept, again = _kept(_with_parts(table, workload, cut, plan, software), plan, widths.activations, full, software)
    forward, backward = np.zeros((2, len(layers), len(KINDS)))
    base = _add_unpacked(layers, plan, forward, backward, software)
    _add_temporary(table, plan, widths, again, (forward, backward), software)
    between = np.zeros(len(KINDS))
    kept_on_host = _offload(kept, table["input_bytes"] > 0, plan, forward, backward)
    if plan.sharding.stage == 3:
        units = unit_bytes(layers, (parameters, base / widths.parameter, experts), largest, plan, widths, software)
        forward[:, BUFFERS] += units.forward
        backward[:, BUFFERS] += units.backward
        backward[:, TEMPORARY] += units.raw
        if not plan.sharding.reshard_after_forward:
            between[BUFFERS] = forward[-1, BUFFERS]
    else:
        units = None
        # A weight's gradient as backward made it, before it is the parameter's, is added to it or lies in its bucket.
        backward[:, TEMPORARY] += largest * widths.parameter
    _add_context(layers, plan, widths, forward, backward)
    alone = replace(plan, tensor=1, fold_experts=False)
    own = local_layers(layers, kinds_of(layers), alone) if plan.expert > 1 else layers
    states = count_states(own, (parameters, experts), plan, widths, units, float(base.sum()), software=software)
    states.always[PARAMETERS] += table["frozen_bytes"].sum()
    if software.keeps_messages and plan.pipeline > 1:
        states.always[BUFFERS] += _messages(table, plan, widths, is_last=cut[1] == len(workload.layers))
    tail, ends = (units.tail, units.tail.max()) if units else (np.zeros(len(layers)), states.arriving[-1])
    backward[:, BUFFERS] += states.arriving[:-1]
    return StageBytes(
        always=_whole(states.always),
        kept=_whole(kept),
        until_weights=_whole(_until_weights(layers, table, plan, kept)),
        forward=_whole(forward),
        backward=_whole(backward),
        between=_whole(between),
        update=_whole(_update(largest, plan, widths, states.always) * (not software.flat_buffers)),
        gradients=_whole(states.grown),
        unsent=_whole(states.unsent),
        tail=_whole(tail),
        ends=int(np.ceil(ends)),
        host=states.host,
        kept_on_host=int(np.ceil(kept_on_host)),
    )


def _whole(values: Floats) -> Ints:
    return np.ceil(values).astype(np.int64)


def _kept(table: dict[str, Floats], plan: Plan, width: float, full: Bools, software: Software) -> tuple[Floats, Floats]:
    """Return what each layer keeps for backward by kind [L, K], and what is there again in its backward [L].

    `full` says which layers run again in full [L]. Of a group that runs again together, what its earlier layers made is
    still there in the backward of the later ones.
    """
    logits, divided = table["logits_bytes"], table["tensor_activation_bytes"]
    outside = table["activation_bytes"] - logits - divided  # what tensor parallelism alone leaves whole
    along = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    inside = plan.context * plan.tensor
    everything = width * (outside / along + divided / inside)
    if plan.float8 != "none" and not software.casts_twice:  # what goes into a block's products is kept in 8 bits
        in_8_bits = table["whole_inputs"] / along + table["divided_inputs"] / inside
        everything -= width * (2 - _input_bytes(plan, software)) * in_8_bits * (table["input_bytes"] > 0)
    everything += width * software.norm_bytes * table["input_bytes"] / along  # of two norms, 2 bytes an element
    if software.keeps_gathered and along > plan.context:
        whole = table["whole_inputs"] * (table["input_bytes"] > 0) * (table["expert_parameters"] == 0)
        everything += width * (2 if plan.float8 == "none" else 1) * whole * (1 / plan.context - 1 / along)
    if software.fused_gate:
        everything -= width * (table["gate_bytes"] / inside + table["expert_gate_bytes"] / along)
    inputs, operators = width * table["input_bytes"] / along, width * table["operator_bytes"] / inside
    kept = np.zeros((len(logits), len(KINDS)))
    kept[:, ACTIVATIONS] = np.where(full, np.minimum(inputs, everything), everything)
    if plan.recompute == "operators":
        kept[:, ACTIVATIONS] = np.where(operators > 0, np.minimum(inputs + operators, everything), everything)
    if names := names_in(plan):
        kept[:, ACTIVATIONS] -= width * (table["dropped_bytes"] / along + table["divided_dropped_bytes"] / inside)
    if plan.recompute == "selective" or "core_attn" in names:
        scores = table["score_bytes"]
        kept[:, ACTIVATIONS] -= width * np.where(divided >= scores, scores / inside, scores / plan.context)
    later = grouped(full, plan)
    kept[later, ACTIVATIONS] = 0.0
    again = everything - kept[:, ACTIVATIONS]
    for layer in np.flatnonzero(later):
        again[layer] += again[layer - 1]
    kept[:, LOGITS] = software.loss_copies[0] * logits / inside  # in the loss's own type, whatever the layers' is
    return kept, again


def kept_and_beside(workload: Workload, plan: Plan, software: Software) -> tuple[Floats, Floats]:
    """Return bytes of a micro-batch that each layer of a whole model keeps, and has beside in backward at least [L].

    Those of sharding, and of largest tensors' gradients, are not among them.
    """
    whole = (0, len(workload.layers))
    table = _with_parts(dict(zip(COLUMNS, workload.columns, strict=True)), workload, whole, plan, software)
    widths, full = widths_of(workload, plan), recomputed(workload, plan, whole)
    kept, again = _kept(table, plan, widths.activations, full, software)
    forward, backward = np.zeros((2, len(workload.layers), len(KINDS)))
    _add_unpacked(workload.layers, plan, forward, backward, software)
    _add_temporary(table, plan, widths, again, (forward, backward), software, are_first=True)
    _add_context(workload.layers, plan, widths, forward, backward)
    return np.asarray(kept.sum(axis=1), np.float64), np.asarray(backward.sum(axis=1), np.float64)


def _input_bytes(plan: Plan, software: Software) -> float:
    """Return the bytes of an element that is kept for a product, of the two that it has in 16 bits."""
    return 2.0 if plan.float8 == "none" or software.casts_twice else SCALED.get(plan.float8, (0.0, 1.0))[1]


def _with_parts(
    table: dict[str, Floats], workload: Workload, cut: tuple[int, int], plan: Plan, software: Software
) -> dict[str, Floats]:
    """Return the table with bytes that a kernel which makes a gate and its activation at once does not keep [L].

    They are what the activation makes of the gate; of experts also what comes out of them, where their weights are in
    the kernel too. A product that makes a gate has twice the columns that go into the next one. So are bytes of single
    modules that run again.
    """
    names, fused = names_in(plan), software.fused_gate
    if not (fused or names):
        return table
    known: dict[int, tuple[float, ...]] = {}
    kinds = workload.kinds[cut[0] : cut[1]]
    for kind, layer in zip(kinds, workload.layers[cut[0] : cut[1]], strict=True):
        if kind not in known:
            inside = sum(_gated(region.products) for region in layer.regions if region.attention is None)
            experts = layer.experts
            each = _gated(experts.products) * experts.num_experts if experts else 0
            gates = (2.0 * inside, 2.0 * each + (experts.row_bytes if experts and each else 0))
            known[kind] = (*gates, *dropped_bytes(layer, names, _input_bytes(plan, software), fused_gate=fused))
    rows = np.array([known[kind] for kind in kinds], np.float64).T
    return table | dict(zip(PARTS, rows, strict=True))


def _gated(products: Sequence[Product]) -> int:
    return sum(last.rows * last.depth for first, last in pairwise(products) if first.columns == 2 * last.depth)


def _offload(kept: Floats, blocks: Bools, plan: Plan, forward: Floats, backward: Floats) -> float:
    """Take what blocks keep off the device, and return its bytes.

    While a block's pass runs, its own is there, and that of the block before it, which is on its way.
    """
    if not plan.offload_activations:
        return 0.0
    moved = kept[:, ACTIVATIONS] * offloaded(blocks, plan)
    kept[:, ACTIVATIONS] -= moved
    for passes in (forward, backward):
        passes[:, BUFFERS] += moved + np.append(0.0, moved[:-1])
    return float(moved.sum())


def _add_unpacked(layers: Sequence[Layer], plan: Plan, forward: Floats, backward: Floats, software: Software) -> Floats:
    """Add a layer's largest weight of 4 bits, unpacked while a pass runs; return bytes of frozen bases [L]."""
    unpacked = np.array([sum(layer.base_bytes[3:]) / plan.tensor for layer in layers])
    for passes in (forward, backward):
        passes[:, TEMPORARY] += unpacked
    widens = software.widens_rest and plan.sharding.stage < 3 and unpacked.any()
    return np.array([base_on_a_rank(layer, plan) for layer in layers]) * np.where(widens & (unpacked == 0), 2.0, 1.0)


def _until_weights(layers: Sequence[Layer], table: dict[str, Floats], plan: Plan, kept: Floats) -> Floats:
    """Return the part of what each layer keeps that stays until W [L, K].

    Under ZB-2p an I frees the rest, as its paper counts. Under other schedules all stays, as in this project's runs.
    """
    if plan.schedule != "zb_2p" or plan.recompute != "none":
        return kept
    known = [layer.kept_until_weights_bytes for layer in layers]
    pairs = zip(known, table["activation_bytes"].tolist(), strict=True)
    shares = [1.0 if size is None or not whole else size / whole for size, whole in pairs]
    return np.asarray(kept * np.array(shares)[:, None], np.float64)


def _add_temporary(
    table: dict[str, Floats],
    plan: Plan,
    widths: Widths,
    again: Floats,
    passes: tuple[Floats, Floats],
    software: Software,
    *,
    are_first: bool = False,
) -> None:
    """Add what lives for less than a pass: outputs, gradients, and what the loss makes of the logits.

    A backward begins with the gradient of the layer's output, all that forward kept (or makes again), and soon the
    widest gradient inside the layer; that of its input comes when the rest is gone. A loss holds the logits and their
    log-softmax at the end of forward; in backward the latter, its gradient, and that of the logits, as torch's
    cross-entropy does. A fused loss holds less. A forward that keeps nothing holds what goes into its widest operator,
    and what comes out. Where ranks hold parts of the sequence, a layer's input is whole while its products need it, and
    in backward its gradient too. `Software.loss_copies` says how many copies of the logits software holds.
    With `are_first` each layer counts as the first of its stage, which has no gradient of its input.
    """
    (forward, backward), copies = passes, software.loss_copies
    along = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    outputs = widths.activations * table["output_bytes"] / along
    widest = widths.activations * table["widest_bytes"] / (plan.context * plan.tensor)
    inputs = np.append(0.0, outputs[:-1]) * (not are_first)
    logits = table["logits_bytes"] / (plan.context * plan.tensor)
    whole = np.maximum(inputs, widths.activations * table["input_bytes"] / along) * (along / plan.context - 1)
    forward[:, TEMPORARY] += (
        whole + outputs + (again if plan.recompute == "selective" else np.minimum(again, 2 * widest))
    )
    forward[:, LOGITS] += copies[1] * logits
    widest = np.maximum(np.maximum(inputs, widest), copies[3 if plan.tensor > 1 else 2] * logits)
    backward[:, TEMPORARY] += 2 * whole + again + outputs + widest


def _messages(table: dict[str, Floats], plan: Plan, widths: Widths, *, is_last: bool) -> float:
    """Return what stays of a step's messages: of each micro-batch output and gradient, or its logits in 16 bits."""
    along = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    both = 2 * widths.activations * table["output_bytes"][-1] / along
    each = table["logits_bytes"][-1] / 2 / (plan.context * plan.tensor) if is_last else both
    return float(plan.num_microbatches * each)


def _update(largest: Floats, plan: Plan, widths: Widths, always: Floats) -> Floats:
    """Return what an update takes in addition to the states: the largest tensor's Adam denominator, before and after.

    That is an update tensor by tensor; one of all tensors at once takes as much as all of them, and one kernel nothing.
    """
    update = np.zeros(len(KINDS))
    width = widths.master or widths.parameter
    if widths.optimizer >= 2 * width and plan.sharding.offload == "none":
        update[TEMPORARY] = 2 * min(width * float(largest.max()), always[OPTIMIZER] / 2)
    return update


def _add_context(layers: Sequence[Layer], plan: Plan, widths: Widths, forward: Floats, backward: Floats) -> None:
    """Add the keys and values that a rank of context parallelism receives, and in backward their gradients.

    A gather receives those of all ranks. All-to-alls receive queries too, and the same in backward; what was traded is
    freed.
    """
    if plan.context > 1:
        inner = [next((region.attention for region in layer.regions if region.attention), None) for layer in layers]
        sizes = np.array([(each.query_bytes, each.key_value_bytes) if each else (0, 0) for each in inner], np.float64)
        queries, keys = widths.activations * sizes.T / plan.tensor / plan.context
        keys = keys * (plan.context if plan.context_kind == "all_gather" else 1)
        trades = plan.context_kind == "all_to_all"
        forward[:, BUFFERS] += keys + queries * trades
        backward[:, BUFFERS] += keys + (queries if trades else keys)
