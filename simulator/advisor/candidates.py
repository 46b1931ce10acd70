"""All plans for a question: every way to divide the devices, with a bound on each plan's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from distlab.plan import AXES, Workload
from simulator.advisor.bounds import bounds_s
from simulator.advisor.question import Candidates, Costs, Floats, Ints, Question, Shape
from simulator.hardware.rank_layout import RankLayout
from simulator.memory.stage import kept_by_layers
from simulator.stage.local_layer import check_divides, time_layers
from simulator.stage.recomputed import recomputed

Seconds = tuple[Floats, Floats]

MOST_MICROBATCH = 64
MOST_PER_RANK = 8
MOST_CONTEXT = 16
EVERY = (2, 4)  # one block in 2, or in 4, is recomputed, where that is searched


def candidates(question: Question, keep: Callable[[Shape], bool] | None = None) -> Candidates:
    """Return all plans for a question, or those of the shapes to keep.

    Searched: every way to divide the devices among pipeline, data, expert, context and tensor ranks whose groups sit
    alike in all nodes (3 tensor ranks in nodes of 8 would cross some); micro-batches of up to MOST_MICROBATCH samples;
    1F1B, and interleaved stages where the micro-batches fill rounds; sharding; recompute; sequence parallelism.
    Sharding's stage 2 is searched with one micro-batch, since it sends gradients in each; stage 3 without a pipeline
    and without expert ranks, since every pass gathers. That is 128,397 plans for 175B on 1,536 devices with 1,536
    samples, and 256,794 with `partial_recompute`. Not searched: other orders of axes, schedules that split backward,
    offload, sizes of buckets and units.

    Raises:
        ValueError: nothing divides the batch and the model among the devices.
    """
    shapes: list[Shape] = []
    costs: list[Costs] = []
    plans: list[Ints] = []
    bounds: list[Floats] = []
    for base, workload in _bases(question):
        wanted = [base._replace(**recompute) for recompute in _recomputes(question, workload)]
        wanted = [shape for shape in wanted if keep is None or keep(shape)]
        rows = _rows(question, base, workload)
        if not (len(rows) and wanted and _divides(base, workload)):
            continue
        known: dict[str, Seconds] = {}
        for shape in wanted:
            cost = _costs(question, shape, workload, known)
            plans.append(np.column_stack([np.full(len(rows), len(shapes)), rows]))
            bounds.append(bounds_s(question, shape, cost, rows))
            shapes.append(shape)
            costs.append(cost)
    if not shapes:
        raise ValueError(
            f"no plan divides {question.batch_size} samples among {question.cluster.num_devices} devices; change the "
            "batch, or the number of devices"
        )
    shape_of, pipeline, per_rank, data, microbatches, sharding = np.concatenate(plans).T
    return Candidates(
        question,
        tuple(shapes),
        tuple(costs),
        shape=shape_of,
        pipeline=pipeline,
        per_rank=per_rank,
        data=data,
        microbatches=microbatches,
        sharding=sharding,
        bound_s=np.concatenate(bounds),
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, rising."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _recomputes(question: Question, workload: Workload) -> list[dict[str, Any]]:
    """Return what may be computed again, as fields of a shape: from nothing to all."""
    names = ["none"]
    names += ["selective"] if any(layer.score_bytes for layer in workload.layers) else []
    if question.partial_recompute:
        names += ["operators"] if any(layer.operator_bytes for layer in workload.layers) else []
    some = [{"recompute": "full", "recompute_layers": number} for number in EVERY if question.partial_recompute]
    return [*({"recompute": name} for name in names), *some, {"recompute": "full"}]


def _divides(shape: Shape, workload: Workload) -> bool:
    try:
        check_divides(workload, shape.plan())
    except ValueError:
        return False
    return True


def _bases(question: Question) -> Iterator[tuple[Shape, Workload]]:
    """Yield all shapes that compute nothing again, with the model of their micro-batch."""
    num, batch = question.cluster.num_devices, question.batch_size
    one = question.model.with_microbatch(1).workload()
    attention = next((r.attention for layer in one.layers for r in layer.regions if r.attention), None)
    heads = attention.num_key_value_heads if attention else 1
    positions = attention.num_positions if attention else 1
    experts = max((layer.experts.num_experts for layer in one.layers if layer.experts), default=1)
    for microbatch in (size for size in divisors(batch) if size <= MOST_MICROBATCH):
        workload = one if microbatch == 1 else question.model.with_microbatch(microbatch).workload()
        for tensor in (t for t in divisors(num) if heads % t == 0):
            for context in (
                c for c in divisors(num // tensor) if c == 1 or (c <= MOST_CONTEXT and positions % (2 * c) == 0)
            ):
                for expert in (e for e in divisors(num // tensor // context) if experts % e == 0):
                    split = (False, True) if tensor > 1 and positions // context % tensor == 0 else (False,)
                    for along in split:
                        shape = Shape(tensor, context, expert, along, microbatch, "none")
                        if shape.is_aligned(question.cluster):
                            yield shape, workload


def _rows(question: Question, shape: Shape, workload: Workload) -> Ints:
    """Return pipeline, stages per rank, data, micro-batches and sharding of a shape's plans, one per row."""
    rest = question.cluster.num_devices // (shape.tensor * shape.context * shape.expert)
    rows = []
    for pipeline in divisors(rest):
        data, num_layers = rest // pipeline, len(workload.layers)
        each, left = divmod(question.batch_size, data * shape.expert)
        if left or each % shape.microbatch or pipeline > num_layers:
            continue
        count = each // shape.microbatch
        most = min(MOST_PER_RANK, num_layers // pipeline) if pipeline > 1 and count % pipeline == 0 else 1
        copies = data * shape.expert * shape.context
        stages = [0, 1] if copies > 1 else [0]
        stages += [2] * (copies > 1 and count == 1) + [3] * (copies > 1 and pipeline == 1 and shape.expert == 1)
        rows += [(pipeline, v, data, count, stage) for v in range(1, most + 1) for stage in stages]
    return np.array(rows, np.int64).reshape(-1, 5)


def _costs(question: Question, shape: Shape, workload: Workload, known: dict[str, Seconds]) -> Costs:
    """Cost a shape's layers; `known` has forward and backward of shapes that differ in what runs again alone."""
    plan = shape.plan()
    for name in (shape.recompute, *(["none"] if shape.recompute_layers > 1 else [])):
        if name not in known:
            own = replace(plan, recompute=name, recompute_method="uniform", recompute_layers=1)
            times = time_layers(workload, RankLayout(question.cluster, own, AXES, {}), splits=False)
            forward, backward = np.array([each.durations_ns[:2] for each in times], np.float64).T / 1e9
            known[name] = forward, backward
    forward, backward = known[shape.recompute]
    if shape.recompute_layers > 1:
        backward = np.where(recomputed(workload, plan, (0, len(workload.layers))), backward, known["none"][1])
    return Costs(workload, forward, backward, kept_by_layers(workload, plan))
