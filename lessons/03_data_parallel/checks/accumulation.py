"""Accumulation over micro-batches: weights that stand still, so that every part of a gradient is seen."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import each_rank, found
from distlab.grading.diagnosis.traffic import calls
from distlab.grading.diagnosis.values import compare, seeded, times_of

NUM_MICROBATCHES, NUM_ACCUMULATED = 6, 3
NUM_UPDATES = NUM_MICROBATCHES // NUM_ACCUMULATED
SMALL = 1e-6


class Watched(DistributedDataParallel):
    """torch's own, which also notes what ran inside no_sync, and how many forwards still lacked their backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.num_entered = 0
        self.quiet: list[bool] = []
        self.num_open = 0
        self.most_open = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Note that a caller asked for silence."""
        self.num_entered += 1
        with super().no_sync():
            yield

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Note whether this forward pass is inside no_sync, and how many wait for their backward."""
        self.quiet.append(not self.require_backward_grad_sync)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        outputs = super().forward(*inputs, **named)
        outputs.register_hook(self._backward_began)
        return outputs

    def _backward_began(self, _: Tensor) -> None:
        self.num_open -= 1


class _Still(torch.optim.SGD):
    """Notes the gradients of every step and moves nothing: gradients of later micro-batches stay what they were."""

    def __init__(self, parameters: Any) -> None:
        self.noted: list[Tensor] = []
        super().__init__(parameters, lr=0.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note the gradients."""
        self.noted.append(_gradients(self.param_groups[0]["params"]))


def _gradients(parameters: Any) -> Tensor:
    filled = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([gradient.detach().flatten() for gradient in filled])


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Give fn a wrapped model, an optimizer that stands still and six micro-batches, three for each update."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    alone = copy.deepcopy(net)
    pairs = [
        (seeded(rank, 4, 5, purpose=f"inputs {i}"), seeded(rank, 4, 3, purpose=f"targets {i}"))
        for i in range(NUM_MICROBATCHES)
    ]
    own = []
    for inputs, targets in pairs:
        alone.zero_grad()
        nn.functional.mse_loss(alone(inputs), targets).backward()
        own.append(_gradients(alone.parameters()))
    model = Watched(net)
    optimizer = _Still(net.parameters())
    start_ns = time.monotonic_ns()
    fn(
        model,
        optimizer,
        microbatches=pairs,
        num_accumulated=NUM_ACCUMULATED,
        loss_fn=nn.functional.mse_loss,
    )
    return {
        "own": own,
        "updates": optimizer.noted,
        "num_entered": model.num_entered,
        "quiet": model.quiet,
        "most_open": model.most_open,
        "start_ns": start_ns,
    }


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """Each update must hold the mean of its own micro-batches of all ranks, and be sent once."""
    yield from each_rank(evidence, _judge_form)
    own = [result["own"] for result in evidence.results]
    for update in range(NUM_UPDATES):
        for rank, result in enumerate(evidence.results):
            yield from found(_judge_update(own, result["updates"][update], update, rank))
    yield from each_rank(evidence, _judge_memory)
    yield from _judge_calls(evidence)


def _judge_form(rank: int, result: dict[str, Any]) -> Fault | None:
    made = len(result["updates"])
    if made != NUM_UPDATES:
        text = f"rank {rank} made {made} updates of {NUM_MICROBATCHES} micro-batches"
        return Fault("updates", f"{text}, {NUM_UPDATES} are asked: one for each {NUM_ACCUMULATED}")
    if not result["quiet"]:
        text = f"rank {rank} never called model(inputs): model.module goes around DDP, which then sends nothing"
        return Fault("around DDP", f"{text}; call model(inputs)")
    return None


def _judge_memory(rank: int, result: dict[str, Any]) -> Fault | None:
    """Each micro-batch must have a forward of its own, and its backward before the next one's forward."""
    made, most_open = len(result["quiet"]), result["most_open"]
    if made != NUM_MICROBATCHES:
        text = f"right gradients, but rank {rank} ran {made} forward passes for {NUM_MICROBATCHES} micro-batches"
        return Fault("all at once", f"{text}: run them one by one; together they may not fit into memory")
    if most_open > 1:
        text = f"right gradients, but rank {rank} held the activations of {most_open} micro-batches at once"
        return Fault("backward too late", f"{text}: run each one's backward before the next one's forward")
    return None


def _judge_update(own: Sequence[Sequence[Tensor]], got: Tensor, update: int, rank: int) -> Fault | None:
    """Say which micro-batches of which ranks are in one update, and how often, where that is not what was asked."""
    world_size, num_each = len(own), len(own[0])
    parts = torch.stack([gradient for each in own for gradient in each])
    window = range(update * NUM_ACCUMULATED, (update + 1) * NUM_ACCUMULATED)
    want = torch.stack([own[r][m] for r in range(world_size) for m in window]).mean(0)
    what = f"rank {rank}'s gradient at update {update}"
    fault = compare(got, want, what, 1)
    if fault is None:
        return None
    share = torch.linalg.lstsq(parts.T, got[:, None]).solution[:, 0]
    if float((share @ parts - got).abs().max()) > SMALL:
        return fault
    share = share.view(world_size, num_each)
    held = [m for m in range(num_each) if bool((share[:, m].abs() > SMALL).any())]
    if held != list(window):
        return _wrong_window(held, list(window), what, update)
    others = [m for m in window if all(abs(float(share[r, m])) < SMALL for r in range(world_size) if r != rank)]
    if world_size > 1 and others:
        return _not_averaged(others, what)
    ratios = share[:, window.start : window.stop].flatten() * world_size * NUM_ACCUMULATED
    ratio = float(ratios.mean())
    if float((ratios - ratio).abs().max()) > SMALL:
        return Fault("uneven shares", f"{what} counts its micro-batches for different amounts: {_shown(ratios)}")
    if abs(ratio - NUM_ACCUMULATED) < SMALL:
        text = (
            f"{what} is {NUM_ACCUMULATED}x too large: it is the sum of {NUM_ACCUMULATED} micro-batches, not their mean"
        )
        return Fault("loss not divided", f"{text}; divide each loss by num_accumulated")
    if abs(ratio * NUM_ACCUMULATED - 1) < SMALL:
        text = f"{what} is {NUM_ACCUMULATED}x too small: it was divided by num_accumulated once too often"
        return Fault("divided twice", text)
    if abs(ratio * world_size - 1) < SMALL:
        text = f"{what} is {world_size}x too small: it was divided by world_size once too often"
        return Fault("divided by ranks", f"{text}; DDP averages by itself")
    return Fault("scale", f"{what} is {times_of(ratio)}")


def _shown(ratios: Tensor) -> str:
    return ", ".join(f"{ratio:.3g}" for ratio in ratios.tolist())


def _wrong_window(held: list[int], window: list[int], what: str, update: int) -> Fault:
    text = f"{what} holds {_batches(held)}, not {_batches(window)}"
    if not held:
        return Fault("zeroed early", f"{text}: it is zero; zero_grad() belongs after step(), not before it")
    if set(window) < set(held) and min(held) < min(window):
        return Fault(
            "old gradients", f"{text}: what the update before it used is still there; zero_grad() after step()"
        )
    if update == 0 and held == [0]:
        why = f"it comes after the first micro-batch. Counted from 0, index % {NUM_ACCUMULATED} == 0 is true at once"
        return Fault("early update", f"{text}: {why}; ask for (index + 1) % {NUM_ACCUMULATED} == 0")
    if held == window[-1:]:
        return Fault("only the last", f"{text}: the others were thrown away; zero_grad() belongs after step() only")
    return Fault("wrong micro-batches", text)


def _batches(numbers: list[int]) -> str:
    if not numbers:
        return "no micro-batch"
    return f"micro-batch{'es' if len(numbers) > 1 else ''} {listed(numbers)}"


def listed(numbers: list[int]) -> str:
    """Return numbers in words, such as "1, 2 and 3"."""
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def _not_averaged(alone: list[int], what: str) -> Fault:
    if len(alone) == NUM_ACCUMULATED:
        text = f"{what} holds nothing of the other ranks: it was never averaged"
        return Fault("never averaged", f"{text}; the last micro-batch of an update must run outside no_sync()")
    text = f"{what} holds {_batches(alone)} of this rank only, not averaged"
    why = "DDP decides in forward whether the backward that follows sends"
    return Fault("last not averaged", f"{text}, so replicas drift apart; {why}: set it before forward")


def _judge_calls(evidence: Evidence) -> Iterator[Fault]:
    for rank, result in enumerate(evidence.results):
        made = [call for call in calls(evidence, rank, "all_reduce") if call.start_ns >= result["start_ns"]]
        if len(made) <= NUM_UPDATES:
            continue
        text = f"right gradients, but rank {rank} made {len(made)} all-reduces for {NUM_UPDATES} updates"
        if result["num_entered"] == 0:
            yield Fault("sends every time", f"{text}: no_sync() was never entered, so each backward sends")
        elif not any(result["quiet"]):
            why = f"no_sync() was entered {result['num_entered']} times, but every forward ran outside of it, and DDP"
            yield Fault("forward outside", f"{text}: {why} decides in forward: put forward and backward inside")
        elif all(result["quiet"]):
            why = "every micro-batch ran inside no_sync(), and your own calls do the averaging"
            yield Fault("own calls", f"{text}: {why}; run the last one outside, and DDP sends its buckets")
        elif result["quiet"] == [number % NUM_ACCUMULATED == 0 for number in range(1, len(result["quiet"]) + 1)]:
            why = "the last micro-batch of an update ran inside no_sync() and the others outside"
            yield Fault("the wrong ones quiet", f"{text}: {why}; it must be the other way round")
        else:
            yield Fault("too many calls", f"{text}: only the last of {NUM_ACCUMULATED} micro-batches should send")


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say how often it sent."""
    start_ns = evidence.results[0]["start_ns"]
    made = sum(call.start_ns >= start_ns for call in calls(evidence, 0, "all_reduce"))
    return [f"{made} all-reduces for {NUM_MICROBATCHES} micro-batches of one bucket"]


_QUIETLY = "with nullcontext() if is_last else model.no_sync():"
WRONG_ACCUMULATIONS = (
    Mutant("around backward only", "forward outside", "forward and backward inside", 2, 13).edit(
        f"{_QUIETLY}\n    loss = loss_fn(model(inputs), targets)", f"loss = loss_fn(model(inputs), targets)\n{_QUIETLY}"
    ),
    Mutant("flag before backward", "last not averaged", "set it before forward", 2, 14)
    .edit(_QUIETLY, "if True:")
    .edit("(loss / num_acc", "model.require_backward_grad_sync = is_last\n(loss / num_acc"),
    Mutant("not divided", "loss not divided", "3x too large: it is the sum of 3", 1, 21).edit(
        "(loss / num_accumulated)", "loss"
    ),
    Mutant("counts from 0", "early update", "(index + 1) % 3 == 0", 2, 24).edit("start=1", "start=0"),
    Mutant("no no_sync", "sends every time", "no_sync() was never entered", 2, 13).edit(_QUIETLY, "if True:"),
    Mutant("all inside no_sync", "never averaged", "must run outside no_sync()", 3, 14).edit(
        _QUIETLY, "with model.no_sync():"
    ),
    Mutant("never zeroed", "old gradients", "zero_grad() after step()", 2, 21).without("optimizer.zero_grad()"),
    Mutant("around DDP", "around DDP", "call model(inputs)", 2, 12).edit("model(inputs)", "model.module(inputs)"),
    Mutant("zeroes too often", "only the last", "the others were thrown away", 2, 24)
    .without("optimizer.zero_grad()")
    .edit("(loss / num_acc", "optimizer.zero_grad()\n(loss / num_acc"),
)
