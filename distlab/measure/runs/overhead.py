"""Measure the overhead of steps: what they cost beyond their work and their calls, each of which is timed alone.

In a step the threads that move messages compete with the ranks for the cores, and hooks run between layers. A call ends
when the slower rank does. A bucket to encode has left the cache. We measure this on two small transformers that are not
the model to be predicted, trained by the same plan. Their steps take longer than the simulator says. The difference is
divided among the steps' calls (sharding), encoded buckets (compression), actions (a pipeline), or passes of blocks (any
other mesh). The references of a mesh differ in the rows that a block hands on, since a part of its cost grows with
them: they are cut, copied and put together again on the way to a call. Those of sharding in stage 3 differ in the bytes
of their units: in shared memory the computing rank copies them, which takes longer while others use the memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distlab.measure.count.expert_load import expert_loads, with_expert_loads
from distlab.measure.count.gpt import count_gpt, make_gpt, merge_stages, without_accumulation
from distlab.measure.machine.ranks import Starter, mean_over_ranks, now, on_first_rank, shared_cores
from distlab.measure.machine.speed import REFERENCES, Phases, Reference, fit_cluster, phases_since, time_phases
from distlab.measure.runs.codec import StepWithCodec
from distlab.measure.runs.predict import (
    ByteCost,
    CalibrationRound,
    Overhead,
    bytes_of,
    num_blocks,
    predict_step,
    predicted_step_s,
)
from distlab.measure.runs.programs import (
    Program,
    barely_moving_sgd,
    is_pipeline_alone,
    make_program,
    program_kind,
    schedule_of,
)
from distlab.measure.runs.replicas import make_replica
from distlab.measure.runs.windows import time_window
from distlab.models import GPTConfig
from distlab.plan import Plan, Workload
from simulator import MeasuredCodec, Step

BUCKET_BYTES, FIRST_BUCKET_BYTES = 200_000, 50_000  # several buckets in each reference
REPLICA_REFERENCES = REFERENCES[1:3]
UNIT_REFERENCES = (REFERENCES[1], Reference(160, 2, 48, 4))  # units of 0.2 and 1.2 MB: most models' are between them
# Layers of a pipeline's references: as many as stages, and one; of a mesh's: two per stage, or one where the model to
# be predicted has no more: what a stage costs, however many blocks it has, is counted with its blocks.
# Samples of a pipeline's references are those of a micro-batch; of a mesh's, those of all micro-batches and replicas.
PIPELINE_REFERENCES = (Reference(64, 0, 96, 2), Reference(96, 0, 48, 4))
MESH_REFERENCES = (Reference(64, 0, 48, 2), Reference(96, 0, 96, 10))
MANY_LAYERS = 1 << 30  # of a model of which nothing else is known
REPEATS = 4
GUESSES = 6
EXACT = 1e-4  # of a step: as close as a guess has to come

Floats = NDArray[np.float64]


class ReplicaOverhead:
    """Of replicas: what sharding's calls cost the computing rank, or how much slower a codec is in a step than alone.

    Two reference models are trained: with sharding and without, or with the codec and a clock around it. Every rank
    makes this once, and calls its methods in each round at the same time as the others.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = Plan(
            data=plan.data,
            sharding=plan.sharding,
            compression=plan.compression,
            bucket_bytes=BUCKET_BYTES,
            first_bucket_bytes=FIRST_BUCKET_BYTES,
        )
        self.device = device
        sharded = (UNIT_REFERENCES if plan.sharding.stage == 3 else REPLICA_REFERENCES) if plan.sharding.stage else ()
        self.pairs = [[_phases_of(each, other, device) for other in (None, self.plan)] for each in sharded]
        self.workloads = on_first_rank(lambda: [_count_replica(each, device) for each in sharded])
        coded = REPLICA_REFERENCES if plan.compression is not None and not sharded else ()
        self.steps = [StepWithCodec(each.build(device)[0], _tokens_of(each, device), self.plan) for each in coded]

    def measure(self, measured: CalibrationRound) -> Overhead:
        """Return the overhead beyond what a round without overhead explains: the same on every rank."""
        if self.plan.sharding.stage:
            return self._of_sharding(measured)
        return Overhead() if measured.codec is None else self._of_codec(measured, measured.codec)

    def close(self) -> None:
        """Do nothing: replicas have no threads to end."""

    def _of_sharding(self, measured: CalibrationRound) -> Overhead:
        """Share what steps of sharded models take beyond steps of each rank for itself among gathers and scatters."""
        shares, sizes = [], []
        for (alone, sharded), workload in zip(self.pairs, self.workloads, strict=True):
            sharded_s, alone_s = (time_phases(each, REPEATS, self.device) for each in (sharded, alone))
            more = np.subtract(sharded_s, alone_s)
            extra = np.array(mean_over_ranks(more.tolist(), self.device))
            step = predict_step(workload, measured, self.plan)
            single = predict_step(workload, replace(measured, calls={}), Plan())
            shares.append(share_among_calls(extra - np.subtract(phases_of(step), phases_of(single)), step))
            sizes.append(4.0 * sum(sum(layer.parameter_sizes) for layer in workload.layers))
        if self.plan.sharding.stage < 3:  # buckets are alike in all references: they do not tell what a byte costs
            shares, sizes = [np.sum(shares, axis=0)], [sum(sizes)]
        gathers, scatters = (
            tuple(ByteCost(size / count, seconds / count) for (seconds, count), size in zip(each, sizes, strict=True))
            for each in np.swapaxes(shares, 0, 1).tolist()
        )
        return Overhead(gathers=gathers, scatters=scatters)

    def _of_codec(self, measured: CalibrationRound, codec: MeasuredCodec) -> Overhead:
        """Compare the codec's times in steps of the references with those that it has alone, on the same buckets.

        Alone, a bucket that is encoded twelve times in a row stays in the cache, and nothing else wants the cores.
        """
        cluster = fit_cluster(measured.compute, self.plan.world_size)
        in_steps_s = sum(step.codec_s(cluster, repeats=REPEATS) for step in self.steps)
        alone_s = sum(
            codec.encode_s + codec.decode_s + size * (codec.encode_s_per_byte + codec.decode_s_per_byte)
            for step in self.steps
            for size in step.bucket_bytes
        )
        in_steps_s, alone_s = mean_over_ranks([in_steps_s, alone_s], self.device)
        return Overhead(codec_slowdown=in_steps_s / alone_s if alone_s > 0 else 1.0)


def share_among_calls(left_s: Floats, step: Step) -> Floats:
    """Return the seconds of each phase that are left for gathers and for scatters, and how many of each there are.

    Stage 3 gathers in forward, and again in backward next to its scatters; stages 1 and 2 gather after the update.

    Shapes: left_s [3] -> [2, 2]
    """
    forward, backward, update = left_s
    if step.plan.sharding.stage < 3:
        count = len(step.stages[0].buckets)
        return np.array([[update, count], [backward, count]])
    units = len(step.stages[0].units)
    again = sum(call.lane == "gather" for call in step.timing.calls[0]) - units
    return np.array([[forward, units], [backward - forward / units * again, units]])


def phases_of(step: Step) -> Phases:
    """Return the phases of a simulated step, in seconds."""
    forward = float(step.timing.end_ns[0]) / 1e9
    update = step.timing.optimizer[0][0] / 1e9
    return forward, update - forward, step.duration_s - update


class StepOverhead:
    """Of a pipeline, replicas or any other mesh: what an action costs, or a block's pass.

    Two reference models are trained by the same plan. Every rank makes this once, and calls its methods in each round
    at the same time as the others.
    """

    def __init__(
        self,
        plan: Plan,
        order: Sequence[str],
        device: torch.device,
        *,
        num_layers: int = MANY_LAYERS,
        num_experts: int = 0,
        top_k: int = 2,
    ) -> None:
        self.plan, self.order, self.device = plan, tuple(order), device
        references = PIPELINE_REFERENCES if is_pipeline_alone(plan) else MESH_REFERENCES
        sizes = [(reference_sizes(each, plan, num_layers), reference_samples(each, plan)) for each in references]
        kind = program_kind(plan, num_experts)
        self._programs: list[Program] = []
        self._steps: list[Callable[[], object]] = []
        for config, samples in sizes:
            model = make_gpt(config, 0, num_experts=num_experts, top_k=top_k)
            program = make_program(model, plan, barely_moving_sgd, device=device, kind=kind, order=order)
            shape = (samples * plan.num_microbatches * plan.num_replicas, config.context)
            tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
            self._programs.append(program)
            self._steps.append(partial(program.train_step, tokens, tokens))

        def count() -> list[Workload]:
            stages = plan.pipeline * plan.stages_per_rank
            counted = (count_gpt(*each, num_experts=num_experts, top_k=top_k, device=device) for each in sizes)
            return [merge_stages(each, stages) for each in counted]

        self._workloads = on_first_rank(count)

    def measure(self, measured: CalibrationRound) -> Overhead:
        """Return the overhead beyond what a round without overhead explains: the same on every rank."""
        seconds = [
            median([time_window(step, 1, self.device)[0] for _ in range(REPEATS + 1)][1:])  # the first warms up
            for step in self._steps
        ]
        loads = [expert_loads(program.modules, self.plan, self.device) for program in self._programs]

        def solve() -> Overhead:
            found = []
            for counted, load, second in zip(self._workloads, loads, seconds, strict=True):
                workload = with_expert_loads(counted, load, self.plan, alone_speedup=measured.alone_speedup)
                num_bytes = next(filter(None, (bytes_of(layer, self.plan) for layer in workload.layers)))
                found.append(ByteCost(num_bytes, self._cost_s(workload, num_bytes, second, measured)))
            return self._overhead(found)

        return on_first_rank(solve)

    def close(self) -> None:
        """Stop the threads that train the reference models."""
        for program in self._programs:
            program.close()

    def _overhead(self, costs: Sequence[ByteCost]) -> Overhead:
        if is_pipeline_alone(self.plan):
            return Overhead(action_s=mean(max(0.0, cost.seconds) for cost in costs))
        return Overhead(passes=tuple(costs))

    def _cost_s(self, workload: Workload, num_bytes: float, seconds: float, measured: CalibrationRound) -> float:
        """Find the cost per action (or pass) that makes the simulated step as long as the measured one.

        Noise can make the measured step shorter than its work alone. Then the cost is below zero; the median over
        rounds evens that out.
        """
        if is_pipeline_alone(self.plan):
            in_a_row = 2 * int(max(np.diff(schedule_of(self.plan).offsets)))  # the most that run one after another
        else:
            in_a_row = self.plan.num_microbatches * sum(map(num_blocks, workload.layers)) // self.plan.pipeline
            in_a_row *= 1 if program_kind(self.plan) == "replicas" else 2
        cost_s = 0.0
        for _ in range(GUESSES):
            overhead = self._overhead([ByteCost(num_bytes, max(0.0, cost_s))])
            step = predict_step(workload, replace(measured, overhead=overhead), self.plan, order=self.order)
            left_s = seconds - predicted_step_s(step, shared_cores(self.device))
            cost_s += left_s / in_a_row
            if cost_s < 0 or abs(left_s) < EXACT * seconds:
                break
        return cost_s


def reference_sizes(reference: Reference, plan: Plan, num_layers: int = MANY_LAYERS) -> GPTConfig:
    """Return a model about as large as the reference that the plan can split, for a model of so many layers."""
    num_heads = _multiple(4, plan.tensor * plan.context)
    positions = plan.context * plan.tensor * (2 if plan.context > 1 else 1)
    num_stages = plan.pipeline * plan.stages_per_rank
    return GPTConfig(
        num_layers=num_stages + 1 if is_pipeline_alone(plan) else num_stages * min(2, -(-num_layers // num_stages)),
        num_heads=num_heads,
        hidden_size=_multiple(reference.hidden_size, num_heads),
        context=_multiple(reference.context, positions),
        tied=False,
    )


def reference_samples(reference: Reference, plan: Plan) -> int:
    """Return the samples of a micro-batch of a replica, one at least."""
    if is_pipeline_alone(plan):
        return reference.samples
    return -(-reference.samples // (plan.num_microbatches * plan.num_replicas))


def _multiple(least: int, divisor: int) -> int:
    """Return the smallest multiple of divisor that is at least so large."""
    return -(-least // divisor) * divisor


def _tokens_of(reference: Reference, device: torch.device) -> Tensor:
    return torch.randint(256, (reference.samples, reference.context), device=device)


def _phases_of(reference: Reference, plan: Plan | None, device: torch.device) -> Callable[[], Phases]:
    """Return what runs a step of a reference on all ranks together."""
    model, _, _ = reference.build(device)
    tokens = _tokens_of(reference, device)
    replica, starter = make_replica(model, plan, barely_moving_sgd), Starter(device)

    def step() -> Phases:
        replica.zero_grad()
        begin, start = starter.begin(), now(device)
        loss = model.loss(replica.model(tokens), tokens)
        forward = now(device)
        loss.backward()
        replica.synchronize()
        backward = now(device)
        replica.update()
        return phases_since(begin, start, forward, backward, now(device))

    return step


def _count_replica(reference: Reference, device: torch.device) -> Workload:
    config = GPTConfig(num_layers=reference.num_layers, hidden_size=reference.hidden_size, context=reference.context)
    return without_accumulation(count_gpt(config, reference.samples, optimizer=barely_moving_sgd, device=device))
