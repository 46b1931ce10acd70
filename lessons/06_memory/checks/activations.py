"""Activations: recompute and accumulation must give the same numbers, and hold less at the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.memory import peak_bytes
from distlab.grading.diagnosis.traffic import in_megabytes
from distlab.grading.diagnosis.values import compare, describe, equal, joined, seeded

NUM_BLOCKS, WIDTH, ROWS = 6, 16, 64
SIZES = (4, 4, 4, 2)  # samples of each micro-batch
VOCABULARY, LENGTH = 11, 24
NUM_TOKENS = [size * LENGTH for size in SIZES]


class Counted(nn.Module):
    """A block that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.25), nn.Linear(4 * WIDTH, WIDTH)
        self.inner = nn.Sequential(*layers).double()
        self.num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block finds."""
        self.num_runs += 1
        return x + self.inner(x)


def run_blocks(call: Callable[..., Any], *, needs_gradient: bool) -> dict[str, Any]:
    """Run a chain of blocks forward and backward, each through `call`; return gradients, runs and the peak."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Counted() for _ in range(NUM_BLOCKS)]
        x = seeded(0, ROWS, WIDTH, purpose="recompute").requires_grad_(needs_gradient)
        weights = seeded(0, ROWS, WIDTH, purpose="loss")  # each element of the output counts another amount

        def step() -> Tensor:
            y = x
            for block in blocks:
                y = call(block, y)
            total = (y * weights).sum()
            if total.requires_grad:
                total.backward()
            return y.detach()

        output, peak = peak_bytes(step)
        draw = torch.rand(4, dtype=torch.float64)
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    runs = [block.num_runs for block in blocks]
    return {"output": output, "gradients": gradients, "x": x.grad, "runs": runs, "peak": peak, "draw": draw}


def drive_recompute(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the chain through fn and plainly, on an input that needs a gradient and on one that does not."""
    return {
        "hidden": run_blocks(fn, needs_gradient=True),
        "data": run_blocks(fn, needs_gradient=False),
        "plain": run_blocks(lambda block, x: block(x), needs_gradient=True),
        "plain data": run_blocks(lambda block, x: block(x), needs_gradient=False),
    }


class Tiny(nn.Module):
    """A model of tokens whose activations are much larger than its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.widen = nn.Linear(8, 64)
        self.output = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score every next token."""
        return self.output(F.gelu(self.widen(self.embedding(tokens))))


def tiny_and_batches() -> tuple[Tiny, list[tuple[Tensor, Tensor]]]:
    """Make the model and micro-batches of different sizes, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Tiny().double()
        tokens = [torch.randint(VOCABULARY, (2, size, LENGTH)) for size in SIZES]
    return model, [(inputs, targets) for inputs, targets in tokens]


def sum_of_losses(model: Tiny, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of all tokens."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum")


def each_microbatch() -> tuple[list[Tensor], float]:
    """Return the gradients of each micro-batch's sum of losses, as one row, and the mean loss over all tokens."""
    rows, total = [], 0.0
    model, batches = tiny_and_batches()
    for inputs, targets in batches:
        model.zero_grad()
        loss = sum_of_losses(model, inputs, targets)
        loss.backward()
        rows.append(joined(p.grad for p in model.parameters() if p.grad is not None))
        total += loss.item()
    return rows, total / sum(NUM_TOKENS)


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Accumulate; return gradients, the mean, its peak, and the peak of the largest micro-batch alone."""
    model, batches = tiny_and_batches()
    mean, peak = peak_bytes(fn, model, batches)
    alone, others = tiny_and_batches()

    def one() -> None:
        for inputs, targets in others[:2]:  # the second finds gradients to add to
            sum_of_losses(alone, inputs, targets).backward()

    gradients = [parameter.grad for parameter in model.parameters()]
    return {"gradients": gradients, "mean": mean, "peak": peak, "least": peak_bytes(one)[1]}


def judge_recompute(evidence: Evidence) -> Iterator[Fault]:
    """The same numbers as without, two runs of each block, and less at the peak."""
    result = evidence.results[0]
    for name, plain in (("hidden", "plain"), ("data", "plain data")):
        yield from _judge_chain(result[name], result[plain], "" if name == "hidden" else "x needs no gradient: ")
    run, enough = result["hidden"], least_recompute_bytes(result["plain"])
    if run["peak"] > 1.1 * enough:
        text = f"each block runs twice, but {in_megabytes(run['peak'])} are held at the peak, where"
        advice = f"{in_megabytes(enough)} are enough: the first run's activations are still held"
        yield Fault("keeps them too", f"{text} {advice}; run the block without recording, keep x alone")


def least_recompute_bytes(plain: dict[str, Any]) -> float:
    """Return what a chain needs at the peak: gradients of all blocks, each block's input, one block's activations."""
    tensor = 8 * ROWS * WIDTH
    gradients = sum(8 * gradient.numel() for gradient in plain["gradients"])
    inside = (plain["peak"] - 2 * tensor) / NUM_BLOCKS  # a block's activations and outputs, nearly
    return gradients + (NUM_BLOCKS + 2) * tensor + 1.6 * inside


def _judge_chain(run: dict[str, Any], plain: dict[str, Any], when: str) -> Iterator[Fault]:
    yield from found(compare(run["output"], plain["output"], f"{when}the output"))
    runs = run["runs"]
    if all(gradient is None for gradient in run["gradients"]):
        text = f"{when}no parameter has a gradient"
        if min(runs) > 1:
            advice = "the second run was asked for the gradient of x alone; torch.autograd.backward(output, gradient)"
            yield Fault("parameters forgotten", f"{text}: {advice} leaves those of the parameters in .grad")
        advice = "autograd calls backward only if an input of the Function needs a gradient, and parameters that the"
        yield Fault("no gradients", f"{text}: {advice} block uses inside are not inputs; give it one that needs one")
    if set(runs) == {1}:
        text = f"{when}each block runs once and {in_megabytes(run['peak'])} are held at the peak"
        advice = "keep x alone, and run the block again in backward"
        yield Fault("not recomputed", f"{text}, as without recomputing: {advice}")
    yield from _judge_gradients(run, plain, when)
    if set(runs) != {2}:
        yield Fault("runs", f"{when}blocks run {runs} times, expected twice each: forward, and once more in backward")
    if not torch.equal(run["draw"], plain["draw"]):
        text = f"{when}the next random numbers differ from those of a run without recomputing"
        advice = "the second run must leave the generator as it found it (torch.random.fork_rng), or the next step's"
        yield Fault("generator moved", f"{text}: {advice} dropout repeats this one's")


def _judge_gradients(run: dict[str, Any], plain: dict[str, Any], when: str) -> Iterator[Fault]:
    per_block = len(plain["gradients"]) // NUM_BLOCKS
    last, wanted = run["gradients"][-per_block:], plain["gradients"][-per_block:]
    for got, want in zip(last, wanted, strict=True):
        if isinstance(got, Tensor) and equal(got, want):
            continue
        if isinstance(got, Tensor) and _is_bias_of_ones(last[-1], wanted[-1]):
            text = f"{when}the last block's gradients are those of a sum of its outputs"
            yield Fault("gradient ignored", f"{text}: start backward of the second run from the gradient that comes in")
        if isinstance(got, Tensor) and equal(last[-1], wanted[-1]):  # the bias after the dropout: no mask in it
            text = f"{when}gradients differ where dropout is: the second run drops other elements than the first"
            yield Fault("another dropout", f"{text}; keep torch.get_rng_state() and set it again before the second run")
        yield compare(got, want, f"{when}a gradient of the last block") or Fault("values", "gradients differ")
    first = run["gradients"][0]
    if not isinstance(first, Tensor) or (run["x"] is None and plain["x"] is not None):
        text = f"{when}the last block has its gradients, those before it have none"
        yield Fault("input without gradient", f"{text}: backward must return the gradient of x, again.grad")
    everything = zip([*run["gradients"], run["x"]], [*plain["gradients"], plain["x"]], strict=True)
    for index, (got, want) in enumerate(everything):
        if want is not None and (fault := compare(got, want, f"{when}gradient {index}")) is not None:
            advice = "the last block's gradients are right, those before it are not: backward must return again.grad,"
            yield Fault("passed on wrong", f"{when}{advice} the gradient of the block's input ({fault.message})")


def _is_bias_of_ones(got: Any, want: Tensor) -> bool:
    """Tell whether the last bias's gradient counts rows: what a gradient of ones gives."""
    counted = torch.full_like(want, float(ROWS))
    return isinstance(got, Tensor) and equal(got, counted) and not equal(want, counted)


def budget_recompute(evidence: Evidence) -> list[str]:
    """Say what is held and what it costs."""
    held, before = (in_megabytes(evidence.results[0][key]["peak"]) for key in ("hidden", "plain"))
    text = f"each of {NUM_BLOCKS} blocks runs twice forward: a third more work in all"
    return [f"held at the peak: {held}, without recomputing {before}", text]


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """The gradient of the mean over all tokens, and no more memory than one micro-batch needs."""
    result = evidence.results[0]
    sums, mean_loss = each_microbatch()
    yield from found(_gradient_fault(result["gradients"], sums))
    if not isinstance(result["mean"], int | float):
        text = f"it returned {describe(result['mean'])}, expected a number: a tensor may keep what it was made from"
        yield Fault("returned", f"{text}; add up loss.item()")
    yield from found(compare(float(result["mean"]), mean_loss, "the mean loss"))
    if result["peak"] > 1.3 * result["least"]:
        text = f"right gradients, but {in_megabytes(result['peak'])} held at the peak, where one micro-batch needs"
        advice = "the activations of all micro-batches are alive together; call backward after each, which frees them"
        yield Fault("activations pile up", f"{text} {in_megabytes(result['least'])}: {advice}")


def _gradient_fault(got: list[Any], sums: list[Tensor]) -> Fault | None:
    if any(not isinstance(gradient, Tensor) for gradient in got):
        return Fault("no gradients", "a parameter has no gradient: call backward, and leave what it adds in .grad")
    total, num_tokens = torch.stack(sums).sum(0), sum(NUM_TOKENS)
    flat, right = joined(got), total / num_tokens
    means = [row / count for row, count in zip(sums, NUM_TOKENS, strict=True)]
    n, added = len(means), torch.stack(means).sum(0)
    last = "are those of the last micro-batch alone: zero_grad only before the first"
    too_large = f"are {LENGTH}x too large: divide by the number of tokens, not of samples"
    weighing = "the last micro-batch has half as many tokens, and counts as much as the others: divide each sum by the"
    known = (
        ("mean of means", added / n, f"are the mean of the micro-batches' means: {weighing} number of all tokens"),
        ("not divided", added, f"are the sum of {n} means: about {n}x too large; divide by the number of all tokens"),
        ("not divided", total, "are those of the sum over all tokens, not of the mean: divide by their number"),
        ("divided by samples", total / sum(SIZES), too_large),
        ("only the last", sums[-1] / num_tokens, last),
        ("only the last", means[-1], last),
        ("only the first", sums[0] / num_tokens, "are those of the first micro-batch alone: run them all"),
    )
    return known_mistake(flat, right, known, "gradients") or compare(flat, right, "the gradients, as one row")


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say what is held."""
    held, least = (in_megabytes(evidence.results[0][key]) for key in ("peak", "least"))
    return [f"held at the peak: {held} for {len(SIZES)} micro-batches (one needs {least})"]


WRONG_RECOMPUTES = (
    Mutant("keeps all", "not recomputed", "runs once", 1).body("return block(x)"),
    Mutant("recomputes and keeps", "keeps them too", "still held", 1).edit(
        "return block(x)",
        """
        with torch.enable_grad():
            ctx.output = block(x.detach().requires_grad_())
        return ctx.output.detach()
        """,
    ),
    Mutant("other dropout", "another dropout", "get_rng_state", 1, 39).without(
        "torch.set_rng_state(ctx.generator_state)"
    ),
    Mutant("moves the generator", "generator moved", "fork_rng", 1, 39).without(", torch.random.fork_rng(devices=[])"),
    Mutant("data needs no gradient", "no gradients", "are not inputs", 1, 29).without(", requires_grad=True"),
    Mutant("input's gradient lost", "input without gradient", "again.grad", 1, 32).edit(
        "again.grad, None", "None, None"
    ),
    Mutant("gradient of x alone", "parameters forgotten", "leaves those of", 1)
    .without("torch.autograd.backward(output, gradient)")
    .edit("again.grad, None", "torch.autograd.grad(output, again, gradient)[0], None"),
    Mutant("from ones", "gradient ignored", "the gradient that comes in", 1).edit(
        "backward(output, gradient)", "backward(output, torch.ones_like(gradient))"
    ),
)
_LOSS = 'reduction="sum") / num_tokens'
WRONG_ACCUMULATIONS = (
    Mutant("one backward", "activations pile up", "backward after each", 1, 59)
    .edit("mean = 0.0", "mean = torch.zeros((), dtype=next(model.parameters()).dtype)")
    .edit("loss.backward()\nmean += loss.item()", "mean = mean + loss")
    .edit("return mean", "mean.backward()\nreturn mean.item()"),
    Mutant("one batch again", "activations pile up", "alive together", 1, 59).body("""
        inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        return loss.item()
    """),
    Mutant("graphs kept", "activations pile up", "alive together", 1)
    .edit("mean = 0.0", "losses = []")
    .edit("logits = model(inputs)\nloss = F.cross_entropy(logits", "loss = F.cross_entropy(model(inputs)")
    .edit("loss.backward()\nmean += loss.item()", "loss.backward(retain_graph=True)\nlosses.append(loss)")
    .edit("return mean", "return sum(loss.item() for loss in losses)"),
    Mutant("sum of means", "not divided", "the sum of 4 means", 1, 21).edit(_LOSS, 'reduction="mean")'),
    Mutant("mean of means", "mean of means", "half as many tokens", 1, 22).edit(
        _LOSS, 'reduction="mean") / len(microbatches)'
    ),
    Mutant("zeroed", "only the last", "zero_grad only before", 1).edit("logits =", "model.zero_grad()\nlogits ="),
)
