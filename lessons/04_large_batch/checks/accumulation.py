"""Accumulation: micro-batches of different sizes must give the gradient of the mean over all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import sent_line
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

SIZES = (3, 3, 1)
FEATURES, OUTPUTS = 4, 3


def _cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()
    batches = [
        (seeded(rank, size, FEATURES, purpose=f"inputs {k}"), seeded(rank, size, OUTPUTS, purpose=f"targets {k}"))
        for k, size in enumerate(SIZES)
    ]
    return {"": (model, batches, nn.functional.mse_loss)}


def use_accumulate(
    fn: Callable[..., Any], model: nn.Module, microbatches: list[tuple[Tensor, Tensor]], loss_fn: Callable[..., Any]
) -> dict[str, Any]:
    """Return the gradients, what became of the weights, and whether a loss is one of more than a micro-batch."""
    sizes, largest = [0], max(len(inputs) for inputs, _ in microbatches)

    def counting(outputs: Tensor, targets: Tensor) -> Any:
        sizes.append(len(outputs))
        return loss_fn(outputs, targets)

    fn(model, microbatches, counting)
    parameters = dict(model.named_parameters())
    return {
        "gradients": {name: "no gradient" if p.grad is None else p.grad for name, p in parameters.items()},
        "weights afterwards": {name: p.detach() for name, p in parameters.items()},
        "more samples at once than a micro-batch has": max(sizes) > largest,
    }


drive_accumulate = Cases(_cases, use_accumulate, most_bytes=2.1, needs="one exchange of all gradients, as a ring,")


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    num_bytes = sum(8 * gradient.numel() for gradient in evidence.results[0][""]["result"]["gradients"].values())
    wanted = 2 * (evidence.world_size - 1) / evidence.world_size * num_bytes
    return [f"{len(SIZES)} micro-batches, {sent_line(evidence, wanted, 'one exchange')}"]


_SHARE = " * (len(inputs) / num_samples)"
_AVERAGE = """
for parameter in model.parameters():
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)
""".strip()
_LAST = "something sets gradients back, so that the last micro-batch's alone is left; backward adds to what is there"
_ALONE = "each rank holds the gradient of its own samples, and nothing of the others"
WRONG_ACCUMULATE = (
    Mutant(
        "sum",
        "sum of micro-batches",
        "the gradients of micro-batches are added, not averaged; weight each loss by its samples over all samples",
        1,
        21,
    ).without(_SHARE),
    Mutant(
        "equal weights",
        "uneven micro-batches",
        "a sample of a small micro-batch counts more often; weight each loss by its samples over all samples",
        1,
    ).edit(_SHARE, " / len(microbatches)"),
    Mutant(
        "sum of samples", "sum of samples", "each loss is multiplied by its samples; divide by all samples, too", 1
    ).edit(_SHARE, " * len(inputs)"),
    Mutant("only the last", "only the last", _LAST, 1).edit("loss = ", "model.zero_grad()\nloss = "),
    Mutant("the last as it is", "only the last", _LAST, 1)
    .edit("loss = ", "model.zero_grad()\nloss = ")
    .without(_SHARE),
    Mutant("alone", "not communicated", _ALONE, 2).without(_AVERAGE),
    Mutant("alone, divided", "not communicated", _ALONE, 2).without("dist.all_reduce(parameter.grad)"),
    Mutant("sum over ranks", "sum not mean", "divide by world_size (3)", 3, 9).without(
        "parameter.grad /= dist.get_world_size()"
    ),
    Mutant("divided twice", "divided twice", "divided by world_size (2) once too often", 2).edit(
        "dist.get_world_size()", "dist.get_world_size() ** 2"
    ),
    Mutant(
        "sends each",
        "sends every micro-batch",
        "it sends after every micro-batch what only the last one completes; exchange once, after the last",
        2,
        22,
    )
    .without(_AVERAGE)
    .edit("loss.backward()", f"loss.backward()\n{_AVERAGE}"),
    Mutant(
        "sums again",
        "sums again",
        "what was summed after one micro-batch is summed again after the next; exchange once, after the last",
        2,
        22,
    )
    .without("dist.all_reduce(parameter.grad)")
    .edit("loss.backward()", "loss.backward()\nfor one in model.parameters():\n    dist.all_reduce(one.grad)"),
    Mutant(
        "at once",
        "one large batch",
        "accumulation is for memory that holds one micro-batch only: run them one after the other",
        1,
    ).edit("num_samples =", "microbatches = [tuple(torch.cat(parts) for parts in zip(*microbatches))]\nnum_samples ="),
)
