"""One rank of a pipeline, wrong in the ways of public code; and forward passes that never overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.plan import Action

Loss = Callable[[Tensor, Tensor], Tensor]


class Rank:
    """The parts of a right run_rank, each of which a wrong version replaces."""

    blocking = False

    def __init__(self, stage: nn.Module, data: tuple[Any, Any], loss_fn: Loss, like: Tensor, count: int) -> None:
        self.stage, self.loss_fn, self.like, self.count = stage, loss_fn, like, count
        self.inputs, self.targets = data
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaving: list[Any] = []
        self.total = 0.0

    def send(self, tensor: Tensor, to: int) -> None:
        """Hand over."""
        if self.blocking:
            dist.send(tensor, to)
        else:
            self.leaving.append(dist.isend(tensor, to))

    def received(self) -> Tensor:
        """Receive an activation."""
        x = torch.empty_like(self.like)
        dist.recv(x, self.rank - 1)
        return x.requires_grad_()

    def target(self, i: int) -> Tensor:
        """Choose a target."""
        return self.targets[i]

    def scaled(self, loss: Tensor) -> Tensor:
        """Make the part of the mean loss."""
        return loss / self.count

    def forward(self, i: int) -> None:
        """Run F."""
        x = self.inputs[i] if self.rank == 0 else self.received()
        y = self.stage(x)
        if self.rank == self.last:
            y = self.scaled(self.loss_fn(y, self.target(i)))
            self.total += y.item()
        else:
            self.send(y.detach(), self.rank + 1)
        self.kept[i] = x, y

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        """Find what a forward pass has kept."""
        return self.kept.pop(i)

    def grad_of(self, x: Tensor) -> Any:
        """Find what to send back."""
        return x.grad

    def backward(self, i: int) -> None:
        """Run B."""
        x, y = self.take(i)
        if self.rank == self.last:
            y.backward()  # type: ignore[no-untyped-call]
        else:
            grad = torch.empty_like(self.like)
            dist.recv(grad, self.rank + 1)
            y.backward(grad)  # type: ignore[no-untyped-call]
        if self.rank > 0:
            self.send(self.grad_of(x), self.rank - 1)

    def run(self, actions: list[Action]) -> float | None:
        """Run all actions."""
        for _, kind, i in actions:
            (self.forward if kind == "F" else self.backward)(i)
        for work in self.leaving:
            work.wait()
        return self.total if self.rank == self.last else None


class Unscaled(Rank):
    """Gradients of the sum."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Forget to divide."""
        return loss

    def run(self, actions: list[Action]) -> float | None:
        """Divide the number that is printed."""
        total = super().run(actions)
        return None if total is None else total / self.count


class NoGrad(Rank):
    """The received activation is a plain tensor."""

    def received(self) -> Tensor:
        """Forget requires_grad."""
        return super().received().detach()


class ZeroGrad(NoGrad):
    """And nobody notices."""

    def grad_of(self, x: Tensor) -> Any:
        """Send zeros where there is nothing."""
        return torch.zeros_like(x)


class Stack(Rank):
    """Last in, first out."""

    def take(self, i: int) -> tuple[Tensor, Tensor]:
        """Take what was kept last."""
        return self.kept.pop(max(self.kept))


class NextTarget(Rank):
    """Targets run ahead of outputs."""

    def target(self, i: int) -> Tensor:
        """Take the next one."""
        return self.targets[(i + 1) % self.count]


class Blocking(Rank):
    """Wait in every send."""

    blocking = True


class AtTheEnd(Rank):
    """All forward passes first, whatever was asked."""

    def run(self, actions: list[Action]) -> float | None:
        """Sort."""
        return super().run(sorted(actions, key=lambda action: action.kind == "B"))


class OwnOrder(Rank):
    """Each micro-batch to its end, whatever was asked."""

    def run(self, actions: list[Action]) -> float | None:
        """Sort by micro-batch."""
        return super().run(sorted(actions, key=lambda action: action.microbatch))


class OneBuffer(Rank):
    """Receive every micro-batch into the same memory."""

    def received(self) -> Tensor:
        """Overwrite what the micro-batch before has kept."""
        self.buffer = getattr(self, "buffer", torch.empty_like(self.like))
        dist.recv(self.buffer, self.rank - 1)
        return self.buffer.detach().requires_grad_()


class LossEverywhere(Rank):
    """Return a number on every rank."""

    def run(self, actions: list[Action]) -> float | None:
        """Return zero where there is no loss."""
        return super().run(actions) or 0.0


class OneByOne(Rank):
    """Everybody meets after each micro-batch."""

    def forward(self, i: int) -> None:
        """Run F, then meet, where all ranks run F's at the same place in their orders."""
        super().forward(i)
        if self.is_gpipe:
            dist.barrier()

    def run(self, actions: list[Action]) -> float | None:
        """See which order it is."""
        kinds = [action.kind for action in actions]
        self.is_gpipe = "F" not in kinds[self.count :]
        self.is_gpipe = self._everywhere()
        return super().run(actions)

    def _everywhere(self) -> bool:
        found = torch.tensor(float(self.is_gpipe))
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)


class ToEverybody(Rank):
    """Send what was received on to the rank after, too: twice the bytes."""

    def forward(self, i: int) -> None:
        """Run F; tell the next rank the loss's place as well."""
        if self.rank > 0:
            dist.recv(torch.empty_like(self.like), self.rank - 1)
        if self.rank < self.last:
            self.send(self.like, self.rank + 1)
        super().forward(i)


def runner(kind: type[Rank]) -> Callable[..., float | None]:
    """Return a wrong run_rank."""

    def run_rank(
        stage: nn.Module, actions: list[Action], inputs: Any, targets: Any, loss_fn: Loss, like: Tensor
    ) -> float | None:
        count = sum(action.kind == "F" for action in actions)
        return kind(stage, (inputs, targets), loss_fn, like, count).run(actions)

    return run_rank


def _hand_on(
    stage: nn.Module, inputs: list[Tensor], i: int, like: Tensor, *, send: Callable[[Tensor, int], object] = dist.send
) -> Tensor:
    rank, x = dist.get_rank(), torch.empty_like(like)
    if rank == 0:
        x = inputs[i]
    else:
        dist.recv(x, rank - 1)
    y: Tensor = stage(x).detach()
    if rank < dist.get_world_size() - 1:
        send(y, rank + 1)
    return y


def forward_with_barrier(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Meet after each micro-batch."""
    outputs = []
    for i in range(num_microbatches):
        outputs.append(_hand_on(stage, inputs, i, like))
        dist.barrier()
    return _told(outputs)


def _told(outputs: list[Tensor]) -> list[Tensor]:
    for y in outputs:
        dist.broadcast(y, dist.get_world_size() - 1)
    return outputs


def forward_of_own(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Return what the own stage gave."""
    return [_hand_on(stage, inputs, i, like) for i in range(num_microbatches)]


def forward_all_then_send(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Run all micro-batches, and send all results."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    received = inputs
    if rank > 0:
        received = [torch.empty_like(like) for _ in range(num_microbatches)]
        for x in received:
            dist.recv(x, rank - 1)
    outputs = [stage(x).detach() for x in received]
    if rank < last:
        for y in outputs:
            dist.send(y, rank + 1)
    return _told(outputs)


def forward_left_alone(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Start every send and forget it; of a copy, so that what arrives here is no matter of luck."""

    def send(y: Tensor, to: int) -> None:
        dist.isend(y.clone(), to)

    return _told([_hand_on(stage, inputs, i, like, send=send) for i in range(num_microbatches)])


def forward_in_one(stage: nn.Module, inputs: list[Tensor], num_microbatches: int, like: Tensor) -> list[Tensor]:
    """Run all micro-batches as one batch."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.cat(inputs) if rank == 0 else torch.cat([like] * num_microbatches)
    if rank > 0:
        dist.recv(x, rank - 1)
    y = stage(x).detach()
    if rank < last:
        dist.send(y, rank + 1)
    dist.broadcast(y, last)
    return list(y.chunk(num_microbatches))
