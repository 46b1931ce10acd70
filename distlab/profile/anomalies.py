"""Find where NaN or infinity began: the step, the rank, the layer, and which pass.

One bad value is everywhere a moment later: backward carries it to all layers, the average of gradients to all ranks,
the optimizer to all weights. So each rank notes the largest magnitude of what every layer makes, in order. The values
stay on the device. Every k steps ranks tell each other whether one of them was bad, and compare where it began.

    watch = AnomalyWatch(model, every=10)   # before the model is wrapped: its hooks then see each rank's own gradients
    for step in range(steps):
        loss = loss_of(model)
        loss.backward()
        replicas.synchronize()
        watch.look(step, loss)              # after gradients are averaged, before the optimizer
        optimizer.step()
    watch.check()                           # what the last steps left

What a program changes by hand between backward and the average looks equal on all ranks: all of them are named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.structures import find
from distlab.comm.agree import all_gather_bytes, ranks_in_words

WEIGHTS, INPUT, FORWARD, LOSS, BACKWARD, GRADIENT, AVERAGED = range(7)
_PLACES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()  # in words, in this order
# Which of two ranks began it, where both saw it first in one step: a layer that made it, before a rank that got it.
_FIRST = {WEIGHTS: 0, FORWARD: 1, INPUT: 2, LOSS: 3, BACKWARD: 4, GRADIENT: 4, AVERAGED: 5}
_WHOLE = "the model"
Label = tuple[int, str]  # in which pass something was made, and whose it is


class AnomalyError(RuntimeError):
    """A value was NaN or infinite; the text says where it was so first."""


class AnomalyWatch(AbstractContextManager["AnomalyWatch"]):
    """Watches what a model's layers make; every rank of the group calls `look` and `check` alike.

    Args:
        model: its layers are watched until `close`.
        group: the ranks that compare; None is all ranks. Without a process group, this process alone.
        every: steps between two comparisons. An anomaly is reported up to this many steps late; no step waits for it.
        gradients: whether gradients count. With a loss scaler they overflow now and then: pass False.

    Cost: every output, gradient and weight is read once per step; no step waits for the device; a comparison reads the
        magnitudes of k steps, and is one all-gather of 8 bytes per rank.
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup | None = None, *, every: int = 10, gradients: bool = True
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}; pass the number of steps between two comparisons, such as 10")
        self._model, self._group, self._every, self._gradients = model, group, every, gradients
        self._next_step = 0
        # what was made since the last look: label, smallest and largest (twenty times as fast as their norm)
        self._made: list[tuple[Label, Any]] = []
        self._steps: list[tuple[int, list[Label], Tensor]] = []
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._inputs, with_kwargs=True)]
        for name, module in model.named_modules():
            if module is model or not [*module.children()] or [*module.parameters(recurse=False)]:
                self._hooks.append(module.register_forward_hook(self._outputs(name or _WHOLE)))
        for name, parameter in model.named_parameters() if gradients else ():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._seen(GRADIENT, name)))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self, step: int, loss: Tensor | None = None) -> None:
        """End a step (its number, this rank's loss) after backward, before the optimizer; every k-th call compares.

        Raises:
            AnomalyError: as `check`.
        """
        if loss is not None:
            last = max((index for index, ((phase, _), _) in enumerate(self._made) if phase <= FORWARD), default=-1)
            self._note(LOSS, "the loss", loss, at=last + 1)
        for name, parameter in self._model.named_parameters() if self._gradients else ():
            if parameter.grad is not None:
                self._note(AVERAGED, name, parameter.grad)
        self._end(step)
        if len(self._steps) >= self._every:
            self._compare()

    def check(self) -> None:
        """Compare what was seen since the last comparison, and the weights as they are now; every rank calls this.

        Raises:
            AnomalyError: on every rank, with the same text: a value was NaN or infinite.
        """
        if not self._made:
            self._weights()
        self._end(self._next_step)
        self._compare()

    def _note(self, phase: int, name: str, tensor: Tensor, at: int | None = None) -> None:
        local: Any = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        local = local.coalesce().values() if local.layout is torch.sparse_coo else local
        if local.numel() and (local.is_floating_point() or local.is_complex()):
            real = local if local.is_floating_point() else torch.view_as_real(local)
            self._made.insert(len(self._made) if at is None else at, ((phase, name), real.aminmax()))

    def _weights(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._note(WEIGHTS, name, parameter)

    def _inputs(self, model: nn.Module, args: Any, named: Any) -> None:
        if model.training:
            if not self._made:
                self._weights()
            for index, tensor in enumerate(find((args, named))[0]):
                self._note(INPUT, f"input {index}", tensor)

    def _outputs(self, name: str) -> Callable[..., None]:
        seen = self._seen(BACKWARD, name)
        counts = self._gradients and (name != _WHOLE or not [*self._model.children()])  # else its last layer's count

        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in find(output)[0] if module.training else ():
                self._note(FORWARD, name, tensor)
                if counts and tensor.requires_grad:
                    tensor.register_hook(seen)

        return hook

    def _seen(self, phase: int, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._note(phase, name, gradient)

    def _end(self, step: int) -> None:
        if self._made:
            device = self._made[0][1].min.device
            sides = zip(*(ends for _, ends in self._made), strict=True)
            low, high = (torch.stack([end.to(device, torch.float64) for end in side]) for side in sides)
            self._steps.append((step, [label for label, _ in self._made], torch.maximum(high, -low)))
        self._made, self._next_step = [], step + 1

    def _compare(self) -> None:
        steps, self._steps = self._steps, []
        mine = next(filter(None, (_first_bad(step, labels, values.tolist()) for step, labels, values in steps)), None)
        if found := self._everyone(mine):
            *first, words = min(found)[0]
            ranks = [rank for (*place, _), rank in found if place == first]
            raise AnomalyError(f"step {first[0]}: {ranks_in_words(ranks)}: {words}")

    def _everyone(self, mine: list[Any] | None) -> list[tuple[list[Any], int]]:
        """Return what ranks report, with the rank. If none does, the cost is one all-gather of 8 bytes per rank."""
        if not dist.is_available() or not dist.is_initialized():
            return [] if mine is None else [(mine, 0)]
        data = b"" if mine is None else json.dumps(mine).encode()
        lengths = [int.from_bytes(one, "big") for one in all_gather_bytes(len(data).to_bytes(8, "big"), self._group)]
        if not any(lengths):
            return []
        texts = all_gather_bytes(data.ljust(max(lengths), b" "), self._group)
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return [(json.loads(text), rank) for rank, text in zip(ranks, texts, strict=True) if text.strip()]


def _first_bad(step: int, labels: Sequence[Label], values: Sequence[float]) -> list[Any] | None:
    """Return where a step saw NaN or infinity first: step, order, place (the lower was earlier), and words."""
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        if not math.isfinite(value):
            kind = "NaN" if math.isnan(value) else "infinity"
            return [step, _FIRST[label[0]], index, f"{kind} {_place(labels, index)}"]
    return None


def _place(labels: Sequence[Label], index: int) -> str:
    phase, name = labels[index]
    same = FORWARD if phase == FORWARD else BACKWARD
    began = "the model got its input" if phase == FORWARD else "the loss began its backward"
    before = next((other for its, other in reversed(labels[:index]) if its == same), began)
    return _PLACES[phase].format(name=name, before=before)
