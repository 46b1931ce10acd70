"""Averages over equal pipelines: each stage's gradients travel as soon as they are complete, while others compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradients.flat_gradients import TimedWork
from distlab.blocks.replicate import broadcast_each, every_parameter
from distlab.comm.p2p import needs_batches
from distlab.pipeline import Pipeline
from distlab.trace import SpanWriter


class StageAverages:
    """Averages the gradients of a pipeline's stages over their copies, each stage while others still compute.

    Every copy starts from the first one's weights. Call `finish` between `step` and the optimizer's update; all copies
    run the same schedule.

    Args:
        pipeline: whose stages these are.
        stages: this rank's, by number.
        group: ranks that hold copies of all that is in them, except for experts.
        experts: parameters whose copies are the ranks of `expert_group` alone; sums are divided by all of `group`.
        expert_group: see experts.
        late: parameters whose gradients are complete only when `step` has returned: tied ones.
        spans: draws each sum on the lane "communication"; its end is seen when the next one starts, or in
            `finish`.

    Cost: per step one all-reduce of a stage's gradients, one more of its experts', and one of what is late. Where
        gradients are accumulated over several steps, call `finish` after each: the sum of means is the mean of sums, at
        the cost of one all-reduce per step.
    Error: equal to one process on the whole batch up to the order of sums. After a step that failed on some ranks
        `finish` goes through as ever, since others may wait for it; the means are of no use then.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Mapping[int, nn.Module],
        group: ProcessGroup,
        *,
        experts: Sequence[nn.Parameter] = (),
        expert_group: ProcessGroup | None = None,
        late: Sequence[nn.Parameter] = (),
        spans: SpanWriter | None = None,
    ) -> None:
        self._num_copies, self._spans = dist.get_world_size(group), spans
        apart, after = {id(p) for p in experts}, {id(p) for p in late}
        own_groups = {False: group, True: group if expert_group is None else expert_group}
        self._order = _ends(pipeline, stages)
        self._buckets: dict[int, list[_StageBucket]] = {}
        seen: set[nn.Parameter] = set()
        for number, module in stages.items():
            trained = [p for _, p in every_parameter(module) if p.requires_grad and p not in seen]
            seen.update(trained)
            for is_expert, same in own_groups.items():
                for when, is_late in ((number, False), (-1, True)):
                    own = [p for p in trained if (id(p) in apart) == is_expert and (id(p) in after) == is_late]
                    if own:
                        name = f"{'tied weights' if is_late else f'stage {number}'}{' of experts' * is_expert}"
                        self._buckets.setdefault(when, []).append(_StageBucket(own, same, name))
        if self._num_copies > 1:
            for module in stages.values():
                for tensor in module.state_dict(keep_vars=True).values():
                    broadcast_each([tensor], own_groups[id(tensor) in apart])
            pipeline.on_stage_complete = self._start

    def _start(self, stage: int) -> None:
        """Start to average a stage's gradients."""
        if self._spans is not None:
            for bucket in chain.from_iterable(self._buckets.values()):
                bucket.note_end()
        for bucket in self._buckets.get(stage, ()):
            bucket.start(self._num_copies, self._spans)

    def finish(self) -> None:
        """Wait for the means and put them in place of the gradients."""
        if self._num_copies == 1:
            return
        for stage in (*self._order, -1):  # all but the last are on their way, unless the step did not get there
            self._start(stage)
        for bucket in chain.from_iterable(self._buckets.values()):
            bucket.finish()


class _StageBucket:
    """Gradients end to end in one buffer, which are averaged over the copies of their parameters."""

    def __init__(self, parameters: list[nn.Parameter], group: ProcessGroup, name: str) -> None:
        self._parameters, self._group, self._flat = parameters, group, FlatBuffer(parameters)
        self._name, self._started = name, False
        self._work: TimedWork | None = None

    def start(self, divisor: int, spans: SpanWriter | None) -> None:
        """Divide, then sum: gloo has no mean."""
        if self._started:
            return
        self._flat.pack([parameter.grad for parameter in self._parameters])
        self._flat.buffer /= divisor
        self._started = True
        if dist.get_world_size(self._group) > 1:
            buffer, group = self._flat.buffer, self._group
            of_nccl = spans is not None and needs_batches(buffer, group)
            self._work = TimedWork(lambda: dist.all_reduce(buffer, group=group, async_op=True), spans, of_nccl=of_nccl)

    def note_end(self) -> None:
        """Remember when the sum was first seen to be over."""
        if self._work is not None:
            self._work.note_end()

    def finish(self) -> None:
        """Wait, put the means in place, and draw the sum if one was sent."""
        if self._work is not None:
            self._work.wait()
            self._work.mark(f"all_reduce {self._name}", self._flat.num_bytes)
        for parameter, mean in zip(self._parameters, self._flat.views, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
        self._work, self._started = None, False


def _ends(pipeline: Pipeline, stages: Mapping[int, nn.Module]) -> list[int]:
    """Return this rank's stages in the order in which their gradients are complete: the same on all copies."""
    own_rank = next(rank for stage, rank in enumerate(pipeline.schedule.home) if stage in stages)
    last = {
        action.stage: place
        for place, action in enumerate(pipeline.schedule.actions(own_rank))
        if action.kind in ("B", "W")
    }
    return sorted(stages, key=lambda stage: last[stage])
