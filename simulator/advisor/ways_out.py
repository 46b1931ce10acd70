"""What to do where no plan fits without offload: the nearest plan in full, and the best plan of each way out.

A way out is a question that differs in one thing, and is searched like the first. More recompute and smaller
micro-batches are none: the search has them all, so that the nearest plan has what it needs of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distlab.plan.sharding import OFFLOADS
from simulator.advisor.question import Question
from simulator.advisor.reasons import MOST_SIMULATED, MOST_TRIED, columns_of, words_of
from simulator.advisor.search import NOT_SEARCHED, Choice, Search, is_even, search
from simulator.models.description import ModelDescription
from simulator.step.simulate import simulate
from simulator.step.timed import notes_on
from simulator.units import counted, format_bytes, format_s

MOST_DOUBLINGS = 6  # of the devices
RANK = 16
LEAST_FREE = 0.03  # of the memory: the least that logs of Megatron-Bridge reserve beyond tensors, 2025


class Way(NamedTuple):
    """A way out: what it is, the best plan that fits so, and why there is none (""; there is one)."""

    name: str
    choice: Choice | None
    why_none: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"

    @property
    def words(self) -> str:
        """The plan with its time and memory, or why there is none."""
        if self.choice is None:
            return self.why_none
        step = self.choice.step
        held = f"{format_bytes(step.memory.max_bytes)} held"
        on_host = f", and {format_bytes(step.memory.host_bytes)} of the host" if step.memory.host_bytes else ""
        words = words_of(self.choice.plan, self.choice.microbatch)
        return f"{words}: {format_s(self.choice.seconds)}, {held}{on_host}"


def nearest(found: Search, among: NDArray[np.bool_] | None = None) -> str:
    """Return which plan lacks least memory, what it needs in all, what there is, and how long its step would take."""
    question, row = found.found.question, found.nearest(among)
    plan, workload, device = found.found.plan(row), found.found.workload(row), question.device
    step = simulate(workload, question.cluster, plan)
    needs, has, where = float(step.memory.max_bytes), device.memory_bytes, "of a device"
    if needs <= has:
        needs, has, where = step.memory.host_bytes, device.host_memory_bytes or 0.0, "that a device may use of its host"
    why = f"needs {format_bytes(needs)}, {format_bytes(needs - has)} more than the {format_bytes(has)} {where}"
    kept = f", {question.headroom:.0%} kept free" if question.headroom and where == "of a device" else ""
    words = f"on {counted(plan.world_size, 'device')} the nearest ({words_of(plan, workload.samples)})"
    return f"{words} {why}{kept}; a step would take {format_s(step.steady_s)}"


def ways_out(question: Question) -> Iterator[Way]:
    """Yield the ways out of a question for which nothing fits without offload, each once it is searched."""
    if question.offloads == OFFLOADS[:1]:
        yield _way("offload", replace(question, offloads=OFFLOADS[1:]))
    plain = replace(question, offloads=OFFLOADS[:1])
    per_node, count = question.cluster.devices_per_node, question.cluster.num_devices
    for _ in range(MOST_DOUBLINGS):
        count = 2 * count if 2 * count <= per_node else -(-2 * count // per_node) * per_node
        way = _way(f"{count} devices", replace(plain, cluster=replace(plain.cluster, num_devices=count)))
        if way.choice or count > question.batch_size:
            break
    yield way
    if plain.cluster.device.host_memory_bytes is not None and not question.fixed.offload_activations:
        fixed = replace(question.fixed, offload_activations=True)
        yield _way("activations offloaded too", replace(question, fixed=fixed, offloads=OFFLOADS))
    if question.model.lora_rank is None:
        adapters = replace(question.model, lora_rank=RANK)
        yield _way(f"LoRA of rank {RANK}", replace(plain, model=adapters))
        yield _way(f"QLoRA of rank {RANK}", replace(plain, model=replace(adapters, weights="nf4")))
    if question.model.optimizer == ModelDescription.optimizer:
        yield _way("states of 8 bits", replace(plain, model=replace(question.model, optimizer="adamw-8bit")))
    if question.headroom > LEAST_FREE:
        name, fuller = f"{LEAST_FREE:.0%} kept free", replace(plain, headroom=LEAST_FREE)
        way = _way(name, fuller)
        yield way if way.choice or question.offloads != OFFLOADS else _way(name, replace(fuller, offloads=OFFLOADS))


def _way(name: str, question: Question) -> Way:
    try:
        found = search(question)
    except ValueError as error:
        return Way(name, None, str(error))
    best = found.best(1, most=MOST_SIMULATED)
    return Way(name, best[0] if best else None, "" if best else "nothing fits")


def beside(found: Search, best: Choice) -> dict[str, list[str]]:
    """Return what to know beside the best plan: by a heading, texts of one line each."""
    question, plan, told = found.found.question, best.plan, dict[str, list[str]]()
    columns, offload = columns_of(found.found), found.found.offload
    alone = np.logical_and.reduce([columns[name] == 1 for name in ("pipeline", "tensor", "context", "expert")])
    like = (offload == 0) | (plan.sharding.offload != "none")
    if plan.world_size > plan.data and (alone & like).any():
        other = found.best(1, among=alone & like, most=MOST_TRIED)
        longer = f"{Way('', other[0]).words}, {other[0].seconds / best.seconds - 1:.1%} longer" if other else ""
        told["data ranks alone"] = [longer or nearest(found, alone & like)]
    sooner = ~like & (found.found.bound_s < best.seconds)
    if (other := found.best(1, among=sooner, most=MOST_TRIED)) and other[0].seconds < best.seconds:
        told["with offload"] = [f"{Way('', other[0]).words}, {1 - other[0].seconds / best.seconds:.1%} shorter"]
    if plan.sharding.offload != "none" and (offload == 0).any():
        told["without offload nothing fits"] = [nearest(found, offload == 0)]
        told["other way out"] = [str(way) for way in ways_out(replace(question, offloads=OFFLOADS[1:]))]
    keeps = any(layer.score_bytes for layer in best.step.workload.layers)
    told["not searched"] = [_not_searched(question) + ", attention that keeps no scores (--attention flash)" * keeps]
    notes = list(notes_on(plan, best.step.mfu, best.step.workload, best.step.loader_wait_s))
    if not is_even(best.step.workload, plan.pipeline * plan.stages_per_rank):
        notes.append(
            "stages have unequal numbers of blocks, which Megatron-LM does not run; --cut blocks makes them equal"
        )
    return told | {"note": notes}


def _not_searched(question: Question) -> str:
    """Return what the search has left out, in words."""
    offload = ""
    if question.offloads != OFFLOADS[:1] and question.cluster.device.host_memory_bytes is None:
        offload = ", offload (no host_memory_bytes says what fits there)"
    eight = question.cluster.device.float8_flops_per_s and question.fixed.float8 == "none"
    return f"{NOT_SEARCHED}{', 8 bits (--float8 products)' if eight else ''}{offload}"
