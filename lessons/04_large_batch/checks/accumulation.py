"""Accumulation: micro-batches of different sizes must give the gradient of the mean over all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.provenance import weights_of
from distlab.grading.diagnosis.traffic import num_calls, over_budget, sent_line
from distlab.grading.diagnosis.values import equal, joined, seeded, times_of

SIZES = (3, 3, 1)
SHARES = [size / sum(SIZES) for size in SIZES]
FEATURES, OUTPUTS = 4, 3


def net() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches, of sizes that differ."""
    return [
        (seeded(rank, size, FEATURES, purpose=f"inputs {k}"), seeded(rank, size, OUTPUTS, purpose=f"targets {k}"))
        for k, size in enumerate(SIZES)
    ]


def _gradients(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model = net()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    nn.functional.mse_loss(model(inputs), targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Accumulate over this rank's micro-batches; keep what one process, and each micro-batch alone, would give."""
    rank, model, calls = dist.get_rank(), net(), []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        return nn.functional.mse_loss(outputs, targets)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fn(model, data(rank), loss_fn)
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "parts": [_gradients([batch]) for batch in data(rank)],
        "calls": calls,
        "changed": [name for name, p in model.named_parameters() if not torch.equal(p, before[name])],
    }


NUM_GRADIENTS = 4


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """Every gradient must be that of the mean over all samples, and must have been sent once."""
    for rank, result in enumerate(evidence.results):
        if result["changed"]:
            name = result["changed"][0]
            yield Fault("weights changed", f"rank {rank}'s {name} itself has changed; only gradients are asked for")
        missing = [name for name, gradient in result["gradients"].items() if gradient is None]
        if missing:
            yield Fault("no gradient", f"rank {rank}'s gradient of {missing[0]} is None: was backward called?")
    wanted = combined(evidence, SHARES, 1 / evidence.world_size)
    if not _all_equal(evidence, wanted):
        yield _wrong_sum(evidence, wanted)
    yield from _sent_once(evidence)


def combined(
    evidence: Evidence, weights: Sequence[float], rank_weight: float, only: int | None = None
) -> dict[str, Tensor]:
    """Add the gradients of all micro-batches, each with its weight; of all ranks, or of one only."""
    results = evidence.results if only is None else [evidence.results[only]]
    parts = [(weight, part) for result in results for weight, part in zip(weights, result["parts"], strict=True)]
    return {
        name: rank_weight * sum(weight * part[name] for weight, part in parts)
        for name in evidence.results[0]["gradients"]
    }


def _all_equal(evidence: Evidence, wanted: dict[str, Tensor]) -> bool:
    return all(_is(result, wanted) for result in evidence.results)


def _is(result: dict[str, Any], wanted: dict[str, Tensor]) -> bool:
    return all(equal(result["gradients"][name], want) for name, want in wanted.items())


def _wrong_sum(evidence: Evidence, wanted: dict[str, Tensor]) -> Fault:
    n, k, num_samples = evidence.world_size, len(SIZES), sum(SIZES)
    equally = f"micro-batches of {', '.join(map(str, SIZES))} samples count equally: a sample of the last one counts 3"
    added = f"the gradients of {k} micro-batches are added, not averaged: divide each loss, or weight it by its samples"
    last = "only the last micro-batch's gradient is left: something sets gradients back between micro-batches"
    samples = f"gradients are {num_samples}x too large: each loss is multiplied by its samples, but not divided"
    known: tuple[tuple[str, Sequence[float], float, str], ...] = (
        ("uneven micro-batches", [1 / k] * k, 1 / n, f"{equally} times; weight each by its samples over all samples"),
        ("sum of micro-batches", [1] * k, 1 / n, f"{added} over all samples"),
        ("only the last", [0] * (k - 1) + [1], 1 / n, f"{last}; backward adds to what is there"),
        ("only the last", [0] * (k - 1) + SHARES[-1:], 1 / n, f"{last}; backward adds to what is there"),
        ("sum not mean", SHARES, 1, f"gradients are {n}x too large: the sum over ranks; divide by world_size ({n})"),
        ("divided twice", SHARES, 1 / n**2, f"gradients are {n}x too small: divided by world_size ({n}) twice"),
        ("sum of samples", SIZES, 1 / n, f"{samples} by all samples ({num_samples} per rank)"),
    )
    for code, weights, rank_weight, text in known:
        if _all_equal(evidence, combined(evidence, weights, rank_weight)):
            return Fault(code, text)
    if all(_is(result, combined(evidence, SHARES, 1, only=rank)) for rank, result in enumerate(evidence.results)):
        return Fault("not communicated", "each rank holds the gradient of its own samples: nothing of the others")
    if n > 1 and num_calls(evidence, rank=0) > NUM_GRADIENTS:
        text = f"rank 0 made {num_calls(evidence, rank=0)} calls for {NUM_GRADIENTS} gradients: what was summed after"
        return Fault("sums again", f"{text} one micro-batch is summed again after the next; exchange once, at last")
    if (weighted := _other_weights(evidence)) is not None:
        return weighted
    for rank, result in enumerate(evidence.results):
        for name, want in wanted.items():
            got = result["gradients"][name]
            if not equal(got, want):
                ratio = float(got.flatten() @ want.flatten() / (want.flatten() @ want.flatten()))
                factor = f", {times_of(ratio)}" if equal(got, ratio * want) else ""
                return Fault("values", f"rank {rank}'s gradient of {name} is not that of all samples{factor}")
    return Fault("only some ranks", "some ranks hold the right gradients, others do not; all need them")


def _other_weights(evidence: Evidence) -> Fault | None:
    """Say how often each micro-batch counts on rank 0, where its gradients are a sum of theirs."""
    parts = [joined(part.values()) for result in evidence.results for part in result["parts"]]
    weights = weights_of(joined(evidence.results[0]["gradients"].values()), parts)
    if weights is None:
        return None
    want = [share / evidence.world_size for share in SHARES] * evidence.world_size
    listed = [", ".join(f"{one:.3g}" for one in each) for each in (weights, want)]
    sizes = ", ".join(map(str, SIZES * evidence.world_size))
    text = f"in rank 0's gradients the micro-batches of {sizes} samples count {listed[0]} times; expected {listed[1]}"
    return Fault("weights", f"{text}: each its samples over all samples of all ranks")


def _sent_once(evidence: Evidence) -> Iterator[Fault]:
    num_bytes = sum(8 * gradient.numel() for gradient in evidence.results[0]["gradients"].values())
    n = evidence.world_size
    over = over_budget(evidence, 2 * (n - 1) / n * num_bytes, "one exchange of all gradients, as a ring,")
    if over is not None:
        text = f"{over.message}: it sends after every micro-batch what only the last one completes"
        yield Fault("sends every micro-batch", text)
    for rank, result in enumerate(evidence.results):
        if max(result["calls"], default=0) > max(SIZES):
            text = f"rank {rank} ran {max(result['calls'])} samples at once; accumulation is for memory that holds one"
            yield Fault("one large batch", f"{text} micro-batch only: run them one after the other")


def accumulate_budget(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    num_bytes = sum(8 * gradient.numel() for gradient in evidence.results[0]["gradients"].values())
    wanted = 2 * (evidence.world_size - 1) / evidence.world_size * num_bytes
    return [f"{len(SIZES)} micro-batches, {sent_line(evidence, wanted, 'one exchange')}"]


_AVERAGE = """
for parameter in model.parameters():
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)
""".strip()
WRONG_ACCUMULATIONS = (
    Mutant("sum", "sum of micro-batches", "added, not averaged", 1, 21).without(" * (len(inputs) / num_samples)"),
    Mutant("equal weights", "uneven micro-batches", "weight each by its samples", 1, "common").edit(
        "* (len(inputs) / num_samples)", "/ len(microbatches)"
    ),
    Mutant("only the last", "only the last", "sets gradients back", 1, "common").edit(
        "loss = ", "model.zero_grad()\nloss = "
    ),
    Mutant("alone", "not communicated", "nothing of the others", 2, "common").without(_AVERAGE),
    Mutant("sum over ranks", "sum not mean", "3x too large", 3, 9).without("parameter.grad /= dist.get_world_size()"),
    Mutant("divided twice", "divided twice", "2x too small", 2, "common").edit(
        "dist.get_world_size()", "dist.get_world_size() ** 2"
    ),
    Mutant("sends each", "sends every micro-batch", "sends after every", 2, 22)
    .without(_AVERAGE)
    .edit("loss.backward()", f"loss.backward()\n{_AVERAGE}"),
    Mutant("sums again", "sums again", "summed again", 2, 22)
    .without("dist.all_reduce(parameter.grad)")
    .edit(
        "loss.backward()",
        """
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        """,
    ),
    Mutant("at once", "one large batch", "memory that holds one", 1, "common").edit(
        "num_samples =", "microbatches = [tuple(torch.cat(parts) for parts in zip(*microbatches))]\nnum_samples ="
    ),
)
