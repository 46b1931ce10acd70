"""Accumulation over micro-batches: what is in the gradients at each update, and how often they are sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from distlab_lesson_03.checks.averages import SAME_MODEL
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.course.grading.cases import Cases, Noted
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import seeded
from distlab.course.grading.variation.draw import Draw, Vary, lopsided_loss
from distlab.grading import Evidence, Fault, Mutant

MICROBATCHES, ACCUMULATED = 6, 3
UPDATES = MICROBATCHES // ACCUMULATED


class Watched(DistributedDataParallel):
    """torch's own, which also notes what ran inside no_sync, and how many forwards still lacked their backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.num_entered = self.num_open = self.most_open = 0
        self.quiet: list[bool] = []

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


class Noting(torch.optim.SGD):
    """Notes the gradients of every step."""

    def __init__(self, parameters: Any) -> None:
        self.noted: list[Any] = []
        super().__init__(parameters, lr=0.1, momentum=0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note the gradients, and step."""
        (weight,) = self.param_groups[0]["params"]
        self.noted.append("no gradient" if weight.grad is None else weight.grad.clone())
        super().step()


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    pairs = [
        (seeded(rank, 4, 5, purpose=f"inputs {i}"), seeded(rank, 4, 3, purpose=f"targets {i}"))
        for i in range(MICROBATCHES)
    ]
    return {"": (seeded(-1, 3, 5, purpose="weight"), pairs, ACCUMULATED, lopsided_loss, "list")}


def _draw(draw: Draw) -> tuple[Any, ...]:
    dtype, num_features, num_outputs = draw.dtype("float64", "float32"), draw.integer(1, 4), draw.integer(1, 3)
    weight = draw.tensor(num_outputs, num_features, dtype=dtype, same=True)
    num_accumulated, size = draw.one_of(1, 2, 3), draw.integer(1, 4)
    pairs = [
        (draw.tensor(size, num_features, dtype=dtype), draw.tensor(size, num_outputs, dtype=dtype))
        for _ in range(num_accumulated * draw.integer(1, 3))
    ]
    loss_fn = draw.one_of(lopsided_loss, nn.functional.smooth_l1_loss)
    return weight, pairs, num_accumulated, loss_fn, draw.one_of("list", "generator")


def _use(
    fn: Callable[..., Any],
    weight: Tensor,
    pairs: list[tuple[Tensor, Tensor]],
    num_accumulated: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    kind: str,
) -> dict[str, Any]:
    """Train a wrapped layer; return its gradient at each update, its weight, and how its passes were made."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    model, optimizer, start_ns = Watched(layer), Noting(layer.parameters()), time.monotonic_ns()
    microbatches = pairs if kind == "list" else iter(pairs)
    fn(model, optimizer, microbatches=microbatches, num_accumulated=num_accumulated, loss_fn=loss_fn)
    left = layer.weight.grad
    updates = {f"gradient at update {number}": one for number, one in enumerate(optimizer.noted)}
    missing = range(len(updates), len(pairs) // num_accumulated)
    return {
        "number of updates": len(updates),
        "micro-batches that went through model(inputs)": len(model.quiet),
        "gradients at the updates": [*updates.values(), *("no update" for _ in missing)],
        "weight afterwards": layer.weight.detach(),
        "a gradient is left over": left is not None and bool(left.any()),
        "most micro-batches that waited for their backward pass": model.most_open,
        "notes": Noted((start_ns, model.num_entered, model.quiet)),
    }


drive_accumulate = Cases(_cases, _use, most_bytes=0)
vary_accumulate = Vary(
    _draw,
    use=_use,
    left_out=SAME_MODEL
    | {"empty": "the mean loss of no sample is not a number", "dims": "the text leaves the model open"},
)


def _sent(evidence: Evidence, rank: int) -> int:
    start_ns = evidence.results[rank][""]["result"]["notes"].value[0]
    return sum(call.start_ns >= start_ns for call in calls(evidence, rank, "all_reduce"))


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """Gradients are sent once an update."""
    for rank, made in enumerate(evidence.results):
        _, num_entered, quiet = made[""]["result"]["notes"].value
        if (number := _sent(evidence, rank)) <= UPDATES:
            continue
        text = f"right gradients, but rank {rank} made {number} all-reduces for {UPDATES} updates"
        if num_entered == 0:
            yield Fault("sends every time", f"{text}: no_sync() was never entered, so each backward sends")
        if not any(quiet):
            why = f"no_sync() was entered {num_entered} times, but every forward ran outside of it, and DDP decides in"
            yield Fault("forward outside", f"{text}: {why} forward: put forward and backward inside")
        if all(quiet):
            why = "every micro-batch ran inside no_sync(), and your own calls do the averaging"
            yield Fault("own calls", f"{text}: {why}; run the last one outside, and DDP sends its buckets")
        last = [at for at, is_quiet in enumerate(quiet) if not is_quiet]
        yield Fault(
            "too many calls",
            f"{text}: micro-batches {last} ran outside no_sync(); only the last of each {ACCUMULATED} should",
        )


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say how often it sent."""
    return [f"{_sent(evidence, 0)} all-reduces for {MICROBATCHES} micro-batches of one bucket"]


_QUIETLY, _LOSS = "with nullcontext() if is_last else model.no_sync():", "(loss / num_accumulated)"
_ZERO = "optimizer.zero_grad()"
WRONG_ACCUMULATE = (
    Mutant("around backward only", "forward outside", "forward and backward inside", 2, 13).edit(
        f"{_QUIETLY}\n    loss = loss_fn(model(inputs), targets)", f"loss = loss_fn(model(inputs), targets)\n{_QUIETLY}"
    ),
    Mutant(
        "flag before backward",
        "last not averaged",
        "an update's first micro-batch is sent, and not its last, so that replicas drift apart; run all but the last "
        "inside no_sync(), forward too, where DDP decides whether the backward that follows sends",
        2,
        14,
    )
    .edit(_QUIETLY, "if True:")
    .edit("(loss / num_acc", "model.require_backward_grad_sync = is_last\n(loss / num_acc"),
    Mutant(
        "not divided", "not divided", "gradients are added up, not averaged; divide each loss by num_accumulated", 1, 21
    ).edit(_LOSS, "loss"),
    Mutant("divides twice", "divided too often", "each loss is divided by num_accumulated once too often", 1).edit(
        _LOSS, "(loss / num_accumulated**2)"
    ),
    Mutant(
        "divided by ranks", "divided by ranks", "each loss is divided by world_size; DDP averages by itself", 2
    ).edit(_LOSS, "(loss / num_accumulated / torch.distributed.get_world_size())"),
    Mutant(
        "counts from 0",
        "early update",
        "the first update comes after the first micro-batch: counted from 0, index % num_accumulated == 0 is true at "
        "once; ask for (index + 1) % num_accumulated == 0",
        1,
        24,
    ).edit("start=1", "start=0"),
    Mutant("no no_sync", "sends every time", "no_sync() was never entered", 2, 13).edit(_QUIETLY, "if True:"),
    Mutant(
        "all inside no_sync", "silent", "nothing is sent; run an update's last micro-batch outside no_sync()", 2, 14
    ).edit(_QUIETLY, "with model.no_sync():"),
    Mutant(
        "the others quiet", "turned", "no_sync() is around the last micro-batch; it belongs around the others", 2
    ).edit(_QUIETLY, "with model.no_sync() if is_last else nullcontext():"),
    Mutant(
        "never zeroed",
        "kept on",
        "an update has the gradients of earlier ones too; zero_grad() after each step()",
        1,
        21,
    ).without(_ZERO),
    Mutant(
        "zeroes first", "zeroed early", "gradients are zero at the update; zero_grad() belongs after step()", 1
    ).edit(f"optimizer.step()\n{_ZERO}", f"{_ZERO}\noptimizer.step()"),
    Mutant(
        "around DDP", "around DDP", "model.module goes around DDP, which then sends nothing; call model(inputs)", 1, 12
    ).edit("model(inputs)", "model.module(inputs)"),
    Mutant(
        "zeroes too often",
        "last alone",
        "an update has its last micro-batch alone; zero_grad() comes after step() only",
        1,
        24,
    )
    .without(_ZERO)
    .edit("(loss / num_acc", f"{_ZERO}\n(loss / num_acc"),
    Mutant("steps each time", "steps each time", "step() comes after every micro-batch, not once an update", 1).edit(
        "if is_last:\n    optimizer.step()", "optimizer.step()\nif is_last:"
    ),
    Mutant("divided by all", "divided by all", "it divides by the number of all micro-batches, not of one update's", 1)
    .edit("for number,", "microbatches = list(microbatches)\nfor number,")
    .edit(_LOSS, "(loss / len(microbatches))"),
    Mutant("asks for its length", "raised", "len()", 1, "one kind of argument").edit(
        "for number, (inputs", "num_microbatches = len(microbatches)\nfor number, (inputs"
    ),
)
