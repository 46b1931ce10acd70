"""Stages that sleep and note what they do, how far they overlap; and the bug: stages that wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm.record.read import Call
from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

WIDTH, SAMPLES = 6, 2
M = 4  # micro-batches
SLEEP_S = 0.004
TIMES = "times"
TAKES_NO_GROUP = {"sub-group": "takes no group"}


class Pause(torch.autograd.Function):
    """The identity; sleeps in backward and writes down which forward pass it belongs to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, number: int) -> Tensor:  # noqa: D102
        ctx.layer, ctx.number = layer, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        time.sleep(ctx.layer.sleep_s)
        ctx.layer.log.append(("B", ctx.number))
        return grad, None, None


class Layer(nn.Module):
    """A stage that sleeps; it notes its passes, what each forward one read, and when that began and ended."""

    def __init__(self, weight: Tensor, bias: Tensor, *, is_frozen: bool = False, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight / max(weight.shape[0], 1) ** 0.5)
        self.bias = nn.Parameter(bias, requires_grad=not is_frozen)
        self.sleep_s, self.log, self.read, self.times = sleep_s, list[Any](), list[Tensor](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        number, start_ns = len(self.read), time.monotonic_ns()
        time.sleep(self.sleep_s)
        y = torch.tanh(x @ self.weight + self.bias)
        self.read.append(x.detach().clone())
        self.log.append(("F", number))
        self.times.append((start_ns, time.monotonic_ns()))
        return Pause.apply(y, self, number)  # type: ignore[no-any-return, no-untyped-call]


def stage_of(rank: int) -> Layer:
    """Return a rank's stage in the exercises' own cases."""
    bias = seeded(rank, WIDTH, purpose="stage bias")
    return Layer(seeded(rank, WIDTH, WIDTH, purpose="stage weight"), bias, sleep_s=SLEEP_S)


def microbatches(what: str, is_here: bool) -> list[Tensor]:
    """Return the inputs or the targets, where a rank has them."""
    return [seeded(-1, SAMPLES, WIDTH, purpose=f"{what} {i}") for i in range(M if is_here else 0)]


def draw_stage(draw: Draw, *dtypes: str, lead: tuple[int, ...], last_width: int) -> tuple[Layer, list[int], Tensor]:
    """Return this rank's stage, the shapes of its inputs, and a tensor like what is handed over."""
    dtype, width, first_width = draw.dtype(*dtypes), draw.integer(1, 5), draw.integer(1, 5)
    frozen = draw.one_of(False, True)
    into = first_width if draw.rank == 0 else width
    out = width if draw.rank < draw.world_size - 1 or not last_width else last_width
    weight = draw.tensor(into, out).to(dtype)
    stage = Layer(weight, draw.tensor(out).to(dtype), is_frozen=frozen)
    return stage, [*lead, into], draw.tensor(*lead, width).to(dtype)


def made_in(evidence: Evidence, rank: int, case: str, *ops: str) -> tuple[list[Call], list[tuple[int, int]]]:
    """Return the calls that a rank made in a case, and when its forward passes began and ended."""
    (begin_ns, end_ns), passes = evidence.results[rank][case]["result"][TIMES].value
    return [call for call in calls(evidence, rank, *ops) if begin_ns <= call.start_ns <= end_ns], passes


def judge_overlap(evidence: Evidence, case: str) -> Iterator[Fault]:
    """Say that stages never overlap.

    It takes two signs, because a slow machine alone gives one of them: each micro-batch entered after the one before
    had left, and between the two rank 0 made calls that can wait for another rank.
    """
    last = evidence.world_size - 1
    made, entered = made_in(evidence, 0, case)
    left, waits = made_in(evidence, last, case)[1], list[Call]()
    for i in range(M - 1 if last else 0):
        begin_ns, end_ns = entered[i][1], entered[i + 1][0]
        waits = [call for call in made if call.op != "send" and begin_ns < call.start_ns < end_ns]
        if end_ns < left[i][1] or not waits:
            return
    if waits:
        words = ", ".join(dict.fromkeys(call.op for call in waits))
        text = "right result, but stages never overlap: micro-batch 1 enters stage 0 only after micro-batch 0 left"
        yield Fault("stages never overlap", f"{text} stage {last}: rank 0 waits for it ({words}) between the two")


def _forward_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    like = torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)
    return {"": (stage_of(rank), microbatches("input", rank == 0), M, like)}


def _draw_forward(draw: Draw) -> tuple[Any, ...]:
    count = draw.one_of(1, 2, 3, draw.integer(5, 7))
    lead = draw.one_of((3,), (), (0,), (draw.integer(1, 3), 2), (2, draw.integer(1, 3), 2))
    stage, shape, like = draw_stage(draw, "float64", "float32", "bfloat16", lead=lead, last_width=0)
    inputs = [draw.tensor(*shape, strided=True).to(like.dtype) for _ in range(count)]
    return stage, inputs if draw.rank == 0 else [], count, like


def _use_forward(
    fn: Callable[..., Any], stage: Layer, inputs: list[Tensor], num_microbatches: int, like: Tensor
) -> dict[str, Any]:
    begin_ns = time.monotonic_ns()
    outputs = fn(stage, inputs, num_microbatches, like)
    times = Noted(((begin_ns, time.monotonic_ns()), stage.times))
    return {"outputs": outputs, "passes through its stage": len(stage.read), TIMES: times}


drive_repair = Cases(_forward_cases, _use_forward, most_bytes=0)
vary_repair = Vary(_draw_forward, use=_use_forward, left_out=TAKES_NO_GROUP)


def judge_repair(evidence: Evidence) -> Iterator[Fault]:
    """Stages work side by side."""
    yield from judge_overlap(evidence, "")
    sends = [made_in(evidence, rank, "", "send") for rank in range(evidence.world_size - 1)]
    for rank, (made, passes) in enumerate(sends):
        if made and all(call.start_ns > passes[-1][1] for call in made):
            text = f"right result, but rank {rank} sends its first activation only after it has run all {M}"
            text = f"{text} micro-batches: stage {rank + 1} idles until then; send each as soon as it is made"
            yield Fault("sent at the end", text)
    for rank, (made, _) in enumerate(sends):
        if alone := sum(not call.wait_ns for call in made):
            text = f"right result this time, but rank {rank} never waits for {alone} of its {len(made)} sends: the"
            text = f"{text} broadcasts may write into a tensor that is still on its way"
            yield Fault("sends left alone", f"{text}; keep what isend returns, and wait() before you broadcast")


def budget_repair(evidence: Evidence) -> list[str]:
    """Say how many ran at the same time."""
    n = evidence.world_size
    return [f"{M} micro-batches through {n} stage{'s' * (n > 1)} in {M + n - 1} slots, where {M * n} are one by one"]


_SERIAL = "micro-batch 1 enters stage 0 only after micro-batch 0 left stage"
_WAIT, _TELL = "for work in leaving:\n    work.wait()", "for y in outputs:\n    dist.broadcast(y, last)"
_SEND = "leaving.append(dist.isend(y, rank + 1))"
WRONG_REPAIR = (
    Mutant("told at once", "stages never overlap", f"{_SERIAL} 1", 2, 25)
    .edit("outputs, leaving = [], []", "outputs = []")
    .edit(_SEND, "dist.send(y, rank + 1)")
    .edit("outputs.append(y)", "dist.broadcast(y, last)\noutputs.append(y)")
    .edit(f"{_WAIT}\n{_TELL}\nreturn", "return"),
    Mutant("barrier", "stages never overlap", f"{_SERIAL} 2", 3, 25).edit(
        "outputs.append(y)", "outputs.append(y)\ndist.barrier()"
    ),
    Mutant("sent at the end", "sent at the end", "idles until then", 2, 59)
    .edit(_SEND, "pass")
    .edit(_WAIT, f"if rank < last:\n    leaving = [dist.isend(y, rank + 1) for y in outputs]\n{_WAIT}"),
    Mutant("sends left alone", "sends left alone", "never waits for 4 of its 4", 2).edit(
        _SEND, "dist.isend(y.clone(), rank + 1)"
    ),
    Mutant(
        "one batch", "one pass", "all micro-batches go through in one pass; hand each on as soon as it is made", 2, 58
    ).body("""
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        x = torch.cat(inputs) if rank == 0 else torch.cat([like] * num_microbatches)
        if rank > 0:
            dist.recv(x, rank - 1)
        y = stage(x).detach()
        if rank < last:
            dist.send(y, rank + 1)
        dist.broadcast(y, last)
        return list(y.chunk(num_microbatches))
    """),
    Mutant(
        "own output", "own output", "each rank returns its own stage's output; broadcast the last stage's", 2, 28
    ).without(_TELL),
    Mutant("from rank 0", "from rank 0", "it broadcasts rank 0's outputs; the last stage's are asked for", 2).edit(
        "broadcast(y, last)", "broadcast(y, 0)"
    ),
    Mutant(
        "one tensor", "one tensor", "all places hold one tensor; broadcast into a tensor for each micro-batch", 1
    ).edit(
        _TELL,
        _TELL.replace("(y, last)", "(like.copy_(y), last)") + "\noutputs = [like] * len(outputs)",
    ),
    Mutant("float64 written down", "mismatch", "float64[", 2, "one dtype").edit(
        "x = torch.empty_like(like)", "x = torch.empty(like.shape, dtype=torch.float64)"
    ),
    Mutant("outputs kept", "kept", "make a new tensor", 1, "one call", preamble="_outputs = {}").edit(
        "outputs.append(y)", "outputs.append(_outputs.setdefault((i, y.shape, y.dtype), y).copy_(y))"
    ),
    Mutant("last alone", "last alone", "the last rank alone returns the outputs; all ranks return them", 2).edit(
        "return outputs", "return outputs if rank == last else None"
    ),
    Mutant("added up", "added up", "outputs of all stages are added up; broadcast the last stage's", 2).edit(
        "dist.broadcast(y, last)", "dist.all_reduce(y)"
    ),
)
