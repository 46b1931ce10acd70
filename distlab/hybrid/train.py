"""Hybrid: train a GPT by any plan: data x expert x context x tensor x pipeline, with sharded states where they fit.

A rank that raises in the middle of a step tells whom it can. Some ranks meet between layers: copies exchange gradients,
stages hand activations on. A rank that fails there goes on to the end of the step, computes nothing more, gives what it
is asked for, and at the end all hear of it.

Others meet inside of a layer. Tensor-parallel ranks add their parts of one product up, ranks of one sequence pass keys
on, experts wait for tokens. A sharded block waits for its parameters, and with sharding stage 2 a micro-batch waits for
the sum of its gradients. They wait in a call that nothing but this rank's own part can end, and this rank cannot
compute it. So it leaves at once, with its error: the launcher sees that, says whose fault it was and ends the others
within seconds; without one, their calls end with the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.clip import NotFiniteError, clip_counted_
from distlab.blocks.models import GPT
from distlab.blocks.replicate import parameter_facts
from distlab.comm import agree
from distlab.comm.agree import group_device
from distlab.hybrid.build import build
from distlab.hybrid.gradients import GradientAveraging, MakeOptimizer, WholeGradients
from distlab.hybrid.layout import checksum, lay_out, problem_of_batch
from distlab.hybrid.rules import problem_of, problem_of_balance
from distlab.hybrid.shards import ShardedParameters, ShardedStates
from distlab.hybrid.state import HybridState
from distlab.pipeline import Pipeline
from distlab.pipeline.faults import gather_numbers, gather_texts
from distlab.plan import AXES, Plan, mesh_of
from distlab.precision import HALF, as_dtype, autocast
from distlab.trace import SpanWriter


class LeftError(BaseException):
    """Carries an error past those who would go on with the step: it is not an Exception."""


class Hybrid(HybridState):
    """A GPT on a mesh of ranks, trained as one process would train it.

        hybrid = Hybrid(GPT(config), Plan(data=2, tensor=2, pipeline=2, num_microbatches=4), make_optimizer)
        for step in range(steps):
            loss = hybrid.train_step(*corpus.batch(step, batch_size), max_norm=1.0)

    It takes all ranks of the job, and makes the groups of the mesh itself. Every rank calls the same methods with the
    same arguments; each takes its own part of a batch.

    Args:
        model: the same module on all ranks; the first rank's values are used. Do not use this model afterwards. It may
            hold mixtures of experts (`mix_experts`).
        plan: degrees, schedule, micro-batches, sharding, compression, recompute, precision.
        make_optimizer: builds an optimizer of a list of parameters. Ranks hold parts of tensors, and sharding pieces of
            them: element-wise ones only (SGD, Adam, AdamW).
        order: axes of the mesh from the slowest to the fastest: neighbours in the last one are neighbouring ranks.
        spans: draws passes, the wait for gradients ("synchronize") and the update ("optimizer") on the lane "compute",
            and a pipeline's sends. Gradient and state exchanges get lanes of their own. Names and order match a
            simulated step, so the two can be overlaid. A recorder sees what layers send inside of passes.
        balance: weight of the mixtures' mean balance loss. It is made of a micro-batch's tokens of all ranks, and so is
            one process' where there is one micro-batch.

    Attributes:
        plan, mesh: as given, and as laid out.
        coordinates: this rank's place on each axis.
        groups: by axis, the ranks that differ from this one there alone.
        stages: this rank's modules by number of the stage.
        optimizers: of what this rank updates; learning-rate schedules take them.
        pipeline: None where the plan has one stage.

    Cost: what the techniques say of a step, each on its axis; and over all ranks two all-reduces of 8 n and 16 bytes
        for n ranks. With one rank nothing is sent.
    Error: losses, gradients, norms and weights as one process' on the whole batch, up to the order of additions.
        Dropout draws other masks: seed torch's generator by data, expert and context, and alike along tensor. Experts
        with a capacity count a micro-batch's tokens of one rank.

    Raises:
        ValueError: on every rank: plans or models differ; degrees whose product is not the number of ranks; what
            cannot be split or combined, with the reason and what to use.
    """

    def __init__(
        self,
        model: GPT,
        plan: Plan,
        make_optimizer: MakeOptimizer,
        *,
        order: Sequence[str] = AXES,
        spans: SpanWriter | None = None,
        balance: float = 0.0,
    ) -> None:
        _agree(model, plan, order, balance=balance)
        self.plan, self.mesh, self._spans = plan, mesh_of(plan, order=order), spans
        self._layout = lay_out(plan, self.mesh)
        self.coordinates, self.groups = self._layout.coordinates, self._layout.groups
        self._context, self._everyone = model.config.context, self._layout.everyone
        self._built = build(model, self._layout, balance=balance)
        self.stages = self._built.stages
        self.pipeline = self._make_pipeline()
        self._averaging = self._make_averaging(make_optimizer)
        self.optimizers = self._averaging.optimizers
        self._state = ""  # "been closed", or "failed" where others could not be told

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a batch; gradients of its mean loss add up until `zero_grad`.

        Args:
            inputs: the whole batch [B, S], on every rank.
            targets: of the whole batch [B, S], on every rank.

        Returns:
            The mean loss over the batch, on every rank.

        Raises:
            ValueError: on every rank, before anything runs: batches differ, or cannot be cut.
            NotFiniteError: on every rank: a gradient is NaN or infinite, and was seen before it was given to others.
            RuntimeError: a rank raised; who hears of it stands above. Where all do, call zero_grad() and go on.
        """
        self._check(inputs, targets)
        batch = self._layout.own_part(inputs), self._layout.own_part(targets)
        loss, failure = None, None
        try:
            with self._precision():
                loss = self._run(*batch)
        except (LeftError, Exception) as error:  # whatever a layer raises: the others wait for this rank
            failure = error.__cause__ if isinstance(error, LeftError) else error
            if _meets_inside(self.plan):
                self._state = "failed"
                raise RuntimeError(f"rank {dist.get_rank()}: the step failed: {_said(failure)}") from failure
        try:
            with self._span("synchronize", "wait") if self.plan.copies > 1 else nullcontext():
                self._averaging.finish()
        except RuntimeError as error:  # told to all copies already
            failure = failure or error
        return self._mean(loss, failure)

    def clip_gradients_(self, max_norm: float) -> Tensor:
        """Scale gradients so that the whole model's norm is at most `max_norm`; return what it was.

        Cost: an all-reduce of 8 bytes.
        Error: as one process', up to the order of additions; the same bits on every rank.

        Raises:
            ValueError: max_norm is not a positive number.
            NotFiniteError: on every rank, naming parameters and ranks: the norm is not finite; nothing is changed.
        """
        return clip_counted_(self._averaging.gradients(), max_norm, [self._everyone])

    def update(self) -> None:
        """Update the parameters, and bring new values to the ranks that hold them."""
        with self._span("optimizer", "optimizer"):
            self._averaging.update()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._averaging.zero_grad()

    def train_step(self, inputs: Tensor, targets: Tensor, max_norm: float | None = None) -> Tensor:
        """Forget gradients, run a batch, clip if a norm is given, and update; return the batch's mean loss."""
        self.zero_grad()
        loss = self.step(inputs, targets)
        if max_norm is not None:
            self.clip_gradients_(max_norm)
        self.update()
        return loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what this rank updates, or shares in updating."""
        for optimizer in self.optimizers:
            for one in optimizer.param_groups:
                yield from one["params"]

    def close(self) -> None:
        """Take the hooks off and destroy the groups; every rank calls this, when no rank waits for a different one."""
        if self._state == "been closed":
            return
        self._state = "been closed"
        self._averaging.close()
        if self.pipeline is not None:
            self.pipeline.close()
        self._layout.close()

    def _make_pipeline(self) -> Pipeline | None:
        if self._built.schedule is None:
            return None
        pipeline = Pipeline(
            self.stages,
            self._built.schedule,
            self.groups["pipeline"],
            loss=self._built.loss,
            tied=self._built.tied,
            spans=self._spans,
        )
        if _meets_inside(self.plan):
            pipeline.on_failure = _leave_at_once
        return pipeline

    def _make_averaging(self, make_optimizer: MakeOptimizer) -> GradientAveraging:
        kinds: dict[int, type[GradientAveraging]] = {0: WholeGradients, 3: ShardedParameters}
        kind = kinds.get(self.plan.sharding.stage, ShardedStates)
        return kind(self._built, self._layout, make_optimizer, pipeline=self.pipeline, spans=self._spans)

    def _run(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Run this rank's part of a batch; return its mean loss where the last stage is."""
        if self.pipeline is not None:
            with self._averaging.accumulating_in(self.pipeline) if self.plan.sharding.stage else nullcontext():
                return self.pipeline.step(inputs, targets)
        model = self._averaging.models[0] if isinstance(self._averaging, ShardedParameters) else self.stages[0]
        num = self.plan.num_microbatches
        losses = []
        for index, (tokens, wanted) in enumerate(zip(inputs.chunk(num), targets.chunk(num), strict=True)):
            with self._averaging.accumulating() if index < num - 1 else nullcontext():
                with self._span(f"0F{index}", "F", stage=0, microbatch=index):
                    loss = self._built.loss(model(tokens), wanted)
                with self._span(f"0B{index}", "B", stage=0, microbatch=index):
                    (loss / num).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _mean(self, loss: Tensor | None, failure: BaseException | None) -> Tensor:
        """Give every rank the mean loss of all, or the failure of any.

        Cost: one all-reduce of 16 bytes.
        """
        counts = loss is not None and self._layout.is_first("tensor")
        mine = float(loss) / self.plan.copies if counts and loss is not None else 0.0
        told = torch.tensor([mine, float(failure is not None)], dtype=torch.float64)
        if self.mesh.size > 1:
            told = told.to(group_device(self._everyone))
            dist.all_reduce(told, group=self._everyone)
        value, num_failed = told.tolist()
        if num_failed:
            texts = gather_texts("" if failure is None else _said(failure), self._everyone)
            said: dict[str, list[str]] = {}
            for rank, text in enumerate(texts):
                said.setdefault(text, []).append(str(rank))
            named = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items() if text)
            is_finite = [not text.startswith(NotFiniteError.__name__) for text in said if text]
            kind = RuntimeError if any(is_finite) else NotFiniteError
            raise kind(
                f"the step failed and its gradients are not usable: call zero_grad() to go on. {named}"
            ) from failure
        return torch.tensor(value, dtype=next(self.parameters()).dtype)

    def _check(self, inputs: Tensor, targets: Tensor) -> None:
        """Refuse, on every rank, a batch that cannot be cut, or that is not the same everywhere.

        Cost: one all-reduce of 8 bytes per rank.
        """
        if self._state:
            raise ValueError(f"step was called on a Hybrid that has {self._state}; build it anew")
        problem = problem_of_batch(self.plan, inputs, targets, self._context)
        if self.mesh.size > 1:
            number = 2**62 if problem else checksum((inputs, targets))
            numbers = gather_numbers(number, self._everyone)
            if len(set(numbers)) > 1 or 2**62 in numbers:
                text = problem or f"inputs {list(inputs.shape)}, targets {list(targets.shape)}, checksum {number}"
                agree(text, self._everyone, what="the batch, which each rank is given whole")
        if problem:
            raise ValueError(problem)

    def _precision(self) -> AbstractContextManager[Any]:
        precision = self.plan.precision
        if precision is None or self.plan.sharding.stage == 3 or as_dtype(precision.compute) not in HALF:
            return nullcontext()
        return autocast(precision.compute, group_device(self._everyone).type)

    def _span(self, name: str, kind: str, **place: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._spans is None else self._spans.span(name, kind, **place)


def _meets_inside(plan: Plan) -> bool:
    """Return whether ranks of this plan wait for each other inside of layers, or of passes."""
    sums_each_pass = plan.sharding.stage == 2 and max(plan.num_microbatches, plan.pipeline) > 1
    return max(plan.tensor, plan.context, plan.expert) > 1 or plan.sharding.stage == 3 or sums_each_pass


def _leave_at_once(error: Exception) -> NoReturn:
    raise LeftError from error


def _said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _agree(model: GPT, plan: Plan, order: Sequence[str], *, balance: float) -> None:
    """Refuse, on every rank, a plan that cannot be, or on which the ranks differ.

    Raises:
        ValueError: the same on every rank.
    """
    world_size = dist.get_world_size()
    problem = problem_of(plan, model, order, world_size)
    problem = problem or problem_of_balance(balance, model)
    wanted = {"plan": str(plan), "order": list(order), "balance": balance, "problem": problem}
    if isinstance(model, GPT):
        wanted["config"] = str(model.config)
        wanted["parameters"] = parameter_facts(model.named_parameters())
    if world_size > 1:
        agree(wanted, None, what="plan and model of Hybrid")
    if problem:
        raise ValueError(f"Hybrid: {problem}")
