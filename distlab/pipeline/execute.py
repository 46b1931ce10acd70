"""One step on one rank: its actions in the plan's order, each looked up in a table of eight lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from distlab.pipeline.route import Route, made, needed, other_end
from distlab.pipeline.shapes import Batch, ValueLayout, take_apart
from distlab.pipeline.stage import Stage
from distlab.pipeline.wire import Wire
from distlab.plan import Action
from distlab.trace import SpanWriter

Result = TypeVar("Result")
Loss = Callable[[Any, Any], Tensor]


class Execution:
    """Runs a route once.

    Args:
        stages: this rank's, by number.
        route: what to run.
        wire: its messages.
        layouts: what each stage makes, as all ranks agreed.
        batch: this rank's inputs and targets.
        loss: of the last stage's output and the targets; None keeps the outputs.
        spans: draws each computation.

    Attributes:
        order: computations in the order in which they ended.
        peak_in_flight: most micro-batches, counted once per stage, that the rank held at once.
        results: by micro-batch, the loss or the output; on the last stage's rank.
        failure: the action that raised, and what; the rest of the route computes nothing.
        on_last_backward: called with a stage's number before its last B or W of the step.
        on_stage_complete: called with a stage's number when its last gradient of the step is there.
        on_failure: called with what was raised, once; what it raises itself ends the route at once.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        route: Route,
        wire: Wire,
        *,
        layouts: Sequence[ValueLayout],
        batch: Batch,
        loss: Loss | None,
        spans: SpanWriter | None,
    ) -> None:
        self._stages, self._route, self._wire = stages, route, wire
        self._layouts, self._batch, self._loss, self._spans = layouts, batch, loss, spans
        self._num_stages = len(route.stage_to_rank)
        self._here: dict[Action, list[Tensor] | None] = {}  # from a stage of this rank to its next: nothing is sent
        self._outbox: dict[Action, list[Tensor] | None] = {}
        self._num_left = Counter(action.stage for action in route.actions if action.kind in ("B", "W"))
        self.order: list[Action] = []
        self.peak_in_flight = 0
        self.results: dict[int, Any] = {}
        self.failure: tuple[Action, Exception] | None = None
        self.on_last_backward: Callable[[int], None] | None = None
        self.on_stage_complete: Callable[[int], None] | None = None
        self.on_failure: Callable[[Exception], None] | None = None

    def run(self) -> None:
        """Run all actions and wait until everything is sent."""
        do = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight_gradient,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._wire.post,  # F and B wait for it, when they come
            "RECV_B": self._wire.post,
        }
        for action in self._route.actions:
            do[action.kind](action)
        self._wire.finish()

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        tensors = self._arrived(action)
        if action.stage == 0:
            tensors = take_apart(self._batch.inputs[microbatch])[0]
        self._hand_over(action, self._attempt(action, lambda: self._compute_forward(stage, microbatch, tensors)))
        held = sum(len(stage.kept) for stage in self._stages.values())
        self.peak_in_flight = max(self.peak_in_flight, held)

    def _compute_forward(self, stage: Stage, microbatch: int, tensors: list[Tensor] | None) -> list[Tensor]:
        given = self._layouts[stage.number - 1] if stage.number else self._batch.layout
        assert tensors is not None, "a rank that failed computes nothing more"
        assert given is not None, "ranks agreed on what comes in"
        if stage.number == self._num_stages - 1:
            output = stage.forward(microbatch, tensors, given, finish=lambda output: self._finish(output, microbatch))
            self.results.setdefault(microbatch, output)
            return []
        made, layout = take_apart(stage.forward(microbatch, tensors, given))
        agreed = self._layouts[stage.number]
        if layout != agreed:
            raise ValueError(
                f"it made {layout}, and ranks agreed on {agreed}; each micro-batch must have the same shapes"
            )
        return made

    def _finish(self, output: Any, microbatch: int) -> Any:
        """Return the loss's part of the batch's mean, or the output without a loss."""
        if self._loss is None:
            return output
        loss = self._loss(output, self._batch.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"the loss is {got}; return one number, the mean over the micro-batch")
        self.results[microbatch] = loss.detach()
        return loss / len(self._batch.targets)  # gradients add up over micro-batches: their mean is the batch's

    def _backward(self, action: Action) -> None:
        """Run B or I: both make the gradients of a stage's inputs."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        gradients = self._arrived(action)
        compute = stage.backward if action.kind == "B" else stage.input_gradient
        if action.kind == "B":
            self._announce_last(action)
        self._hand_over(action, self._attempt(action, lambda: compute(microbatch, gradients)))
        if action.kind == "B":
            self._count_down(action)

    def _weight_gradient(self, action: Action) -> None:
        self._announce_last(action)
        self._attempt(action, lambda: self._stages[action.stage].weight_gradient(action.microbatch))
        self._count_down(action)

    def _send(self, action: Action) -> None:
        tensors = self._outbox.pop(action)
        if tensors is None:  # this rank failed; others must not wait for what it cannot make
            tensors = [kind.zeros(self._wire.device) for kind in self._wire.kinds(action)]
        self._wire.send(action, tensors)

    def _arrived(self, action: Action) -> list[Tensor] | None:
        """Return what an action needs from a neighbouring stage, waiting for it where it comes by message."""
        receive = needed(action, self._num_stages)
        if receive is None:
            return None
        return self._here.pop(receive) if receive in self._here else self._wire.take(receive)

    def _hand_over(self, action: Action, tensors: list[Tensor] | None) -> None:
        """Keep what an action made for the neighbouring stage here, or for the send that follows."""
        send = made(action, self._num_stages)
        if send is not None and (receive := other_end(send)).stage in self._stages:
            self._here[receive] = tensors
        elif send is not None:
            self._outbox[send] = tensors

    def _attempt(self, action: Action, compute: Callable[[], Result]) -> Result | None:
        """Compute, unless this rank failed before; note the order, or the failure."""
        if self.failure is not None:
            return None
        try:
            with self._span(action):
                result = compute()
        except Exception as error:  # whatever a stage raises: see distlab.pipeline.faults
            self._fail(action, error)
            return None
        self.order.append(action)
        return result

    def _announce_last(self, action: Action) -> None:
        if self._num_left[action.stage] == 1 and self.on_last_backward is not None:
            self.on_last_backward(action.stage)

    def _count_down(self, action: Action) -> None:
        self._num_left[action.stage] -= 1
        if self._num_left[action.stage] or self.on_stage_complete is None:
            return
        try:
            self.on_stage_complete(action.stage)
        except Exception as error:  # to the other ranks this is one like any other
            self._fail(action, error)

    def _fail(self, action: Action, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = action, error
        if self.on_failure is not None:
            self.on_failure(error)

    def _span(self, action: Action) -> AbstractContextManager[Any]:
        if self._spans is None:
            return nullcontext()
        return self._spans.span(str(action), action.kind, stage=action.stage, microbatch=action.microbatch)


def mean_of(results: Mapping[int, Tensor]) -> Tensor:
    """Return the mean loss, added up in the order of micro-batches whatever the schedule's order was."""
    return torch.stack([results[microbatch].reshape(()) for microbatch in sorted(results)]).mean()
