"""Time what pipelines add to computing: a message to the next rank, and an action beyond its layers' work.

Messages are timed as the runner sends them: each rank has posted its receive, and one message goes round all ranks.
An action's cost is read off two pipelines of other models than the one to be predicted: what their steps take beyond
what the simulator makes of them is shared among the actions on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.p2p import Receive, Send, start
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import Reference, measure_round, now
from distlab.measure.runs.pipeline_predict import (
    MESSAGE_BYTES,
    Layout,
    PipelineRound,
    build_stages,
    count_stages,
    predict_step,
)
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline
from distlab.plan import Schedule, Work, Workload

REFERENCES = (Reference(64, 0, 96, 2), Reference(96, 0, 48, 4))  # as many layers as stages, and one
REPEATS = 4
ROUND_TRIPS = 5
GUESSES = 6
EXACT = 1e-4  # of a step: as close as a guess has to come


@dataclass(frozen=True)
class _BusyPipeline:
    """A reference model as a pipeline."""

    step: Callable[[], float]
    close: Callable[[], None]


class PipelineCalibration:
    """Reference pipelines, made once and timed in each round.

    Every rank makes one, and calls `measure` and `close` at the same time as the others.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._works: dict[str, Work] = {}
        self._pipelines = [_make_pipeline(reference, layout, device) for reference in REFERENCES]
        self._workloads = on_first_rank(lambda: [_count(reference, layout, device) for reference in REFERENCES])

    def measure(self) -> PipelineRound:
        """Take one round of measurements."""
        compute = measure_round(self.device, works=self._works)
        measured = PipelineRound(compute, measure_messages(self.device))
        seconds = [
            float(np.median([each.step() for _ in range(REPEATS + 1)][1:])) for each in self._pipelines
        ]  # one warms up
        pairs = list(zip(self._workloads, seconds, strict=True))
        action_s = on_first_rank(lambda: float(np.mean([self._action_s(*pair, measured) for pair in pairs])))
        return replace(measured, action_s=action_s)

    def _action_s(self, workload: Workload, seconds: float, measured: PipelineRound) -> float:
        """Find the cost of an action with which the simulated step takes as long as the measured one."""
        schedule = self.layout.make()
        on_the_way = 2 * max(np.diff(schedule.offsets))  # at most so many follow one another
        action_s = 0.0
        for _ in range(GUESSES):
            left = seconds - predict_step(workload, replace(measured, action_s=action_s), self.layout).pipeline_s
            action_s = max(0.0, action_s + left / on_the_way)
            if abs(left) < EXACT * seconds:
                break
        return action_s

    def close(self) -> None:
        """End the reference pipelines."""
        for pipeline in self._pipelines:
            pipeline.close()


def measure_messages(device: torch.device) -> tuple[float, ...]:
    """Return the seconds of a message from one rank to the next, for each of MESSAGE_BYTES; the same on every rank."""
    if dist.get_world_size() == 1:
        return (1e-9,) * len(MESSAGE_BYTES)
    return tuple(_all_max([_time_message(size, device) for size in MESSAGE_BYTES], device))


def _time_message(num_bytes: int, device: torch.device) -> float:
    """Pass a message on from rank to rank, round and round; each rank's receive waits for it already."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent, arrives = torch.zeros(num_bytes // 4, device=device), torch.empty(num_bytes // 4, device=device)
    times = []
    for _ in range(ROUND_TRIPS + 1):
        receive = start(Receive(arrives, (rank - 1) % num_ranks))
        dist.barrier()
        begin = now(device)
        if rank != 0:
            receive.wait()
        send = start(Send(sent, (rank + 1) % num_ranks))
        if rank == 0:
            receive.wait()
        times.append((now(device) - begin) / num_ranks)
        send.wait()
    return float(np.median(times[1:])) if rank == 0 else 0.0  # rank 0 sees whole round trips


def _sizes(reference: Reference, schedule: Schedule) -> GPTConfig:
    return GPTConfig(
        num_layers=schedule.num_stages + 1,
        hidden_size=reference.hidden_size,
        context=reference.context,
        tied=False,
    )


def _count(reference: Reference, layout: Layout, device: torch.device) -> Workload:
    """Count the stages of a reference, which no pipeline runs."""
    schedule = layout.make()
    sizes = _sizes(reference, schedule)
    tokens = torch.randint(sizes.vocab_size, (reference.samples, reference.context), device=device)
    return count_stages(build_stages(sizes, schedule.num_stages, 0, device), tokens, tokens)


def _make_pipeline(reference: Reference, layout: Layout, device: torch.device) -> _BusyPipeline:
    schedule = layout.make()
    sizes = _sizes(reference, schedule)
    samples = reference.samples * schedule.num_microbatches
    tokens = torch.randint(sizes.vocab_size, (samples, reference.context), device=device)
    modules = build_stages(sizes, schedule.num_stages, 0, device)
    own = {stage: modules[stage] for stage in range(schedule.num_stages) if schedule.home[stage] == dist.get_rank()}
    pipeline = Pipeline(own, schedule, loss=GPT.loss)

    def step() -> float:
        pipeline.zero_grad()
        dist.barrier()
        begin = now(device)
        pipeline.step(tokens, tokens)
        return _all_max([now(device) - begin], device)[0]

    return _BusyPipeline(step, pipeline.close)


def _all_max(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each over all ranks."""
    largest: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]
