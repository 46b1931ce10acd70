"""Pipeline: runs any valid schedule on the modules of its stages.

See `distlab.pipeline.execute` for a step, which is a walk through the plan; here is what a program calls, and what all
ranks make sure of before the first message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.comm.p2p import group_rank
from distlab.pipeline.execute import Execution, Loss, mean_of
from distlab.pipeline.faults import gather_numbers, raise_together, refuse_together
from distlab.pipeline.model.tied import TiedGradients, TiedParameter
from distlab.pipeline.negotiate import check_schedule, check_sizes, negotiate, wrong_stages
from distlab.pipeline.route import Route, forward_only, route_of
from distlab.pipeline.shapes import Batch, ValueLayout, cut_batch, join
from distlab.pipeline.stage import Stage
from distlab.pipeline.wire import Wire, open_channels
from distlab.plan import Action, Schedule
from distlab.trace import SpanWriter

MOST_SHAPES = 64  # sets of shapes that ranks remember having agreed on


class Pipeline:
    """A model in stages over the ranks of a group.

        stages = {0: first_module}  # on rank 0; {1: second_module} on rank 1
        pipeline = Pipeline(stages, one_f_one_b(2, 8), loss=loss_fn)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        for inputs, targets in batches:
            pipeline.zero_grad()
            loss = pipeline.step(inputs, targets)  # forward and backward of 8 micro-batches
            optimizer.step()

    Every rank calls the same methods at the same time. A stage's module is called with what the stage before it
    returns: a tuple becomes its positional arguments, anything else its one argument. Tensors in tuples, lists and
    dicts, of any shapes and dtypes, may be handed over; floating ones that depend on parameters get gradients.

    Args:
        stages: the modules of this rank's stages, by number.
        schedule: any valid one, with sends and receives or without; it says which stages are whose.
        group: ranks of the pipeline; None is all.
        loss: of the last stage's output and the targets of a micro-batch, the mean over it; needed on its rank alone.
        tied: parameters that several stages use (`distlab.pipeline.model.tied`).
        recompute: keep only inputs of stages, and run forward again in backward.
        spans: draws computations ("compute"), sends ("send") and waits for receives ("receive").

    Attributes:
        order: computations of this rank's last step in the order in which they ended.
        peak_in_flight: most micro-batches, counted once per stage, that this rank held at once in the last step.
        on_last_backward: set it to be called with a stage's number before its last backward pass (B or W) of a step.
        on_stage_complete: set it to be called with a stage's number when its gradients of the step are complete: they
            can then be averaged over other pipelines while this one goes on. Those of tied parameters are complete
            when `step` returns. After a failure it is called all the same, with incomplete ones: others wait for it.
        on_failure: set it to be called at once with what a stage of this rank raised. What it raises itself ends the
            step here, and the other ranks are told nothing. It is for ranks that others wait for inside a stage.
        splits: how each stage's backward pass is parted in I and W, where the schedule does that.

    Cost: B s h elements sent for each boundary between ranks and each micro-batch of B samples [s, h], in each
        direction; and two all-reduces of 8 bytes per rank. Memory: the peak in flight of the plan, and 2 messages per
        neighbour that arrive early.
    Error: gradients equal one process's up to the order in which micro-batches are added up; repeats bit for bit.
        BatchNorm and dropout see micro-batches, and so differ from one process.

    After an error: a ValueError comes before anything has run, and everything is as it was. After a StageError the
    pipeline can be used again at once. But `.grad` holds a part of the failed step on top of what it held before, and
    each rank a different part: call `zero_grad`, and repeat the batches since the last update. Only tied parameters
    have the gradients that they had before the step, so that their copies stay equal. What forward passes wrote to
    buffers, and random numbers that they drew, stay written and drawn. `order` and `peak_in_flight` tell what the
    failed step did here.

    Raises:
        ValueError: on every rank, before any message of a step: an invalid schedule, ranks with different ones, stages
            that are missing or not this rank's.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: ProcessGroup | None = None,
        *,
        loss: Loss | None = None,
        tied: Sequence[TiedParameter] = (),
        recompute: bool = False,
        spans: SpanWriter | None = None,
    ) -> None:
        self._rank, self._group, self._loss, self._spans = group_rank(group), group, loss, spans
        agree(str(schedule).splitlines(), group, what="the schedule")
        check_schedule(schedule, dist.get_world_size(group))
        refuse_together(wrong_stages(stages, schedule, self._rank), group)
        self.schedule = schedule
        self._route = route_of(schedule, self._rank)
        self._forward_route: Route | None = None
        self._last_rank = self._route.stage_to_rank[-1]
        splits = {action.stage for action in self._route.actions if action.kind == "I"}
        self._tied = TiedGradients(tied, stages, self._route.stage_to_rank, group)
        self._stages = {
            number: Stage(number, module, splits=number in splits, recomputes=recompute)
            for number, module in sorted(stages.items())
        }
        self._device = next((parameter.device for parameter in self.parameters()), group_device(group))
        self._channels = open_channels(self._route.stage_to_rank, group, device=self._device)
        self._known: dict[tuple[int, ...], list[ValueLayout]] = {}
        self._state = ""  # "in a step" or "closed"; "" is ready for anything
        self.order: list[Action] = []
        self.peak_in_flight = 0
        self.on_last_backward: Callable[[int], None] | None = None
        self.on_stage_complete: Callable[[int], None] | None = None
        self.on_failure: Callable[[Exception], None] | None = None
        self.splits = {number: stage.split.report for number, stage in self._stages.items() if stage.split is not None}

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """Run forward and backward of all micro-batches; gradients add up in `.grad` until `zero_grad`.

        The gradients are those of the mean loss over the batch. Two steps without zero_grad between them accumulate:
        the sum of two batches' gradients.

        Args:
            inputs: the batch, on the rank of stage 0; cut along dimension 0 into equal micro-batches.
            targets: the batch's, on the rank of the last stage; cut along dimension 0 like the inputs.

        Returns:
            The mean loss over the batch on the last stage's rank, None elsewhere; see `mean_loss`.

        Shapes: inputs [m B, ...], targets [m B, ...] -> []

        Raises:
            ValueError: on every rank, before anything runs: inputs or targets are missing or cannot be cut; a stage
                cannot run on what the one before makes.
            StageError: on every rank: a stage raised. The pipeline can be used again.
        """
        self._require_idle("step")
        batch, problem = self._cut(inputs, targets, wants_loss=True)
        with torch.enable_grad():
            layouts = self._agree_on_layouts("step", batch, problem)
            self._tied.begin()
            try:
                execution = self._run(self._route, layouts, batch, self._loss)
            except BaseException:
                self._tied.give_up()
                raise
        self._tied.finish()
        return mean_of(execution.results) if self._rank == self._last_rank else None

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Any:
        """Run forward alone, without a graph; call `.eval()` on the modules before where it matters.

        Args:
            inputs: as of `step`.
            targets: on the last stage's rank; None for the outputs.

        Returns:
            On the last stage's rank the outputs of the whole batch, or with targets the mean loss; None elsewhere.

        Shapes: inputs [m B, ...] -> outputs [m B, ...], or [] with targets

        Raises:
            ValueError, StageError: as `step`.
        """
        self._require_idle("evaluate")
        batch, problem = self._cut(inputs, targets, wants_loss=targets is not None)
        if self._forward_route is None:
            self._forward_route = route_of(forward_only(self.schedule), self._rank)
        with torch.no_grad():
            layouts = self._agree_on_layouts("evaluate", batch, problem)
            execution = self._run(self._forward_route, layouts, batch, None if targets is None else self._loss)
        if self._rank != self._last_rank:
            return None
        if targets is not None:
            return mean_of(execution.results)
        return join([execution.results[microbatch] for microbatch in sorted(execution.results)])

    def mean_loss(self, loss: Tensor | None) -> float:
        """Give every rank the loss that `step` returned on the last stage's rank.

        Cost: one broadcast of 16 bytes.

        Raises:
            ValueError: on every rank: the last stage's rank passed None.
        """
        told = torch.zeros(2, dtype=torch.float64, device=group_device(self._group))  # is there one, and which
        if self._rank == self._last_rank and loss is not None:
            told[0], told[1] = 1.0, loss.item()
        dist.broadcast(told, group=self._group, group_src=self._last_rank)
        is_there, value = told.tolist()
        if not is_there:
            raise ValueError(f"rank {self._last_rank}: mean_loss got None; pass what step() returned there")
        return float(value)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, each once."""
        yield from dict.fromkeys(one for stage in self._stages.values() for one in stage.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's stages."""
        for stage in self._stages.values():
            stage.module.zero_grad(set_to_none)

    def close(self) -> None:
        """Give the modules back as they were, with the gradients that they have."""
        for stage in self._stages.values():
            stage.close()
        for channel in self._channels.values():
            dist.destroy_process_group(channel)
        self._channels = {}
        self._state = "closed"

    def _run(self, route: Route, layouts: list[ValueLayout], batch: Batch, loss: Loss | None) -> Execution:
        """Run a route; whatever happens, no micro-batch is left behind."""
        wire = Wire(route, layouts, self._group, device=self._device, channels=self._channels, spans=self._spans)
        execution = Execution(self._stages, route, wire, layouts=layouts, batch=batch, loss=loss, spans=self._spans)
        execution.on_last_backward = self.on_last_backward
        execution.on_stage_complete, execution.on_failure = self.on_stage_complete, self.on_failure
        self._state = "in a step"
        try:
            execution.run()
            self.order, self.peak_in_flight = execution.order, execution.peak_in_flight
            raise_together(execution.failure, self.schedule, self._group)
        finally:
            self._state = ""
            for stage in self._stages.values():
                stage.kept.clear()
        return execution

    def _require_idle(self, what: str) -> None:
        """Refuse a call during a step (its messages would mix with the step's) or after close().

        Raises:
            ValueError: a module, the loss or a callback called this; where one rank's did, all hear of it.
        """
        if self._state:
            raise ValueError(
                f"rank {self._rank}: {what} was called on a pipeline that is {self._state}; call it between two steps "
                "and before close()"
            )

    def _cut(self, inputs: Any, targets: Any, *, wants_loss: bool) -> tuple[Batch, str]:
        """Cut this rank's inputs and targets into micro-batches; the second value says what is wrong, or is ""."""
        last = self.schedule.num_stages - 1
        wants_loss = wants_loss and last in self._stages
        for name, value, stage, wanted in (
            ("inputs", inputs, 0, 0 in self._stages),
            ("targets", targets, last, wants_loss),
        ):
            if wanted and value is None:
                return Batch(), f"rank {self._rank} has stage {stage} and got no {name}; pass {name} there"
        if wants_loss and self._loss is None:
            return Batch(), f"rank {self._rank} has the last stage, {last}, and no loss; pass loss= to the Pipeline"
        try:
            own = inputs if 0 in self._stages else None, targets if wants_loss else None
            return cut_batch(*own, self.schedule.num_microbatches), ""
        except ValueError as error:
            return Batch(), f"rank {self._rank}: {error}"

    def _agree_on_layouts(self, what: str, batch: Batch, problem: str) -> list[ValueLayout]:
        """Return what each stage makes of a micro-batch; ranks ask each other only when something changed anywhere.

        Cost: `gather_numbers`; when something changed, `negotiate`.
        """
        modes = [
            [stage.module.training, sum(parameter.requires_grad for parameter in stage.module.parameters())]
            for stage in self._stages.values()
        ]
        autocast = torch.is_autocast_enabled(self._device.type)
        facts = json.dumps([what, problem, repr(batch.layout), batch.sizes, modes, autocast])
        number = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
        numbers = tuple(gather_numbers(number, self._group))
        if numbers not in self._known:
            refuse_together(problem, self._group)
            owners, group = self._route.stage_to_rank, self._group
            check_sizes(batch.sizes, owners, group)
            layouts = negotiate(
                self._stages, owners, batch.layout, device=self._device, group=group, on_failure=self.on_failure
            )
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[numbers] = layouts
        return self._known[numbers]
