"""Activations: recompute and accumulation must give the same numbers, and hold less at the peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.course.grading.cases import Cases, Free
from distlab.course.grading.diagnosis.memory import peak_bytes
from distlab.course.grading.diagnosis.traffic import in_megabytes
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

NUM_BLOCKS, WIDTH, ROWS = 6, 16, 64
SIZES = (4, 4, 4, 2)  # samples of each micro-batch
VOCABULARY, LENGTH = 11, 24


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


def _run_blocks(call: Callable[..., Any], needs_gradient: bool) -> tuple[dict[str, Any], int]:
    """Run a chain of blocks forward and backward, each through `call`; return what came of it, and the peak."""
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
    result = {"the output": output, "how often each block runs": [block.num_runs for block in blocks]}
    for number in reversed(range(NUM_BLOCKS)):
        result[f"the gradients of block {number}"] = [one.grad for one in blocks[number].parameters()]
    return result | {"the gradient of x": x.grad, "the next random numbers": draw}, peak


def _use_recompute(fn: Callable[..., Any], needs_gradient: bool) -> dict[str, Any]:
    """Say whether more is held than all gradients, each block's input, and the activations of one block."""
    result, peak = _run_blocks(fn, needs_gradient)
    if not needs_gradient:
        return result
    _, most = _run_blocks(lambda block, x: block(x), needs_gradient)
    tensor, parameters = 8 * ROWS * WIDTH, 8 * (8 * WIDTH * WIDTH + 5 * WIDTH)
    inside = (most - 2 * tensor) / NUM_BLOCKS  # a block's activations and outputs, nearly
    enough = NUM_BLOCKS * parameters + (NUM_BLOCKS + 2) * tensor + 1.6 * inside
    held = "activations of one block" if peak <= 1.1 * enough else "activations of several blocks"
    return result | {"what is held at the peak": held, "peak": Free(peak), "without": Free(most)}


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


def _tiny_and_batches() -> tuple[Tiny, list[tuple[Tensor, Tensor]]]:
    """Make the model and micro-batches of different sizes, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Tiny().double()
        tokens = [torch.randint(VOCABULARY, (2, size, LENGTH)) for size in SIZES]
    return model, [(inputs, targets) for inputs, targets in tokens]


def _use_repair(fn: Callable[..., Any]) -> dict[str, Any]:
    """Say whether more is held than the largest micro-batch needs, when it finds gradients to add to."""
    model, batches = _tiny_and_batches()
    mean, peak = peak_bytes(fn, model, batches)
    alone, others = _tiny_and_batches()

    def one() -> None:
        for inputs, targets in others[:2]:
            F.cross_entropy(alone(inputs).flatten(0, -2), targets.flatten(), reduction="sum").backward()

    _, least = peak_bytes(one)
    return {
        "the gradients": [parameter.grad for parameter in model.parameters()],
        "the mean loss": "a tensor, which may keep what it was made from" if isinstance(mean, Tensor) else mean,
        "micro-batches whose activations are held at once": "one" if peak <= 1.3 * least else "several",
        "peak": Free(peak),
        "least": Free(least),
    }


drive_recompute = Cases({"": (True,), "x needs no gradient": (False,)}, _use_recompute)
drive_repair = Cases({"": ()}, _use_repair)


def budget_recompute(evidence: Evidence) -> list[str]:
    """Say what is held and what it costs."""
    held, before = (in_megabytes(evidence.results[0][""]["result"][key].value) for key in ("peak", "without"))
    text = f"each of {NUM_BLOCKS} blocks runs twice forward: a third more work in all"
    return [f"held at the peak: {held}, without recomputing {before}", text]


def budget_repair(evidence: Evidence) -> list[str]:
    """Say what is held."""
    held, least = (in_megabytes(evidence.results[0][""]["result"][key].value) for key in ("peak", "least"))
    return [f"held at the peak: {held} for {len(SIZES)} micro-batches (one needs {least})"]


_STATE, _FORK = "torch.set_rng_state(ctx.generator_state)", ", torch.random.fork_rng(devices=[])"
_BACKWARD = "torch.autograd.backward(output, gradient)"
_DROPOUT = "the second run drops other elements: keep torch.get_rng_state(), and set it again before the second run"
WRONG_RECOMPUTE = (
    Mutant(
        "keeps all", "not recomputed", "each block runs once: keep x alone, and run the block again in backward", 1
    ).body("return block(x)"),
    Mutant(
        "recomputes and keeps",
        "keeps them too",
        "the first run's activations are still held: run the block without recording, and keep x alone",
        1,
    ).edit(
        "return block(x)",
        """
        with torch.enable_grad():
            ctx.output = block(x.detach().requires_grad_())
        return ctx.output.detach()
        """,
    ),
    Mutant("other dropout", "another dropout", _DROPOUT, 1, 39).without(_STATE),
    Mutant("generator as it is", "another dropout", _DROPOUT, 1, 39).edit(_STATE, "pass").without(_FORK),
    Mutant(
        "moves the generator",
        "generator moved",
        "leave the generator as you found it (torch.random.fork_rng), or the next step's dropout repeats this one's",
        1,
        39,
    ).without(_FORK),
    Mutant(
        "a seed", "a seed", "it seeds the generator, so that all blocks drop the same elements; keep its state", 1
    ).edit("ctx.generator_state =", "torch.manual_seed(0)\nctx.generator_state ="),
    Mutant(
        "data needs no gradient",
        "no gradients",
        "autograd calls backward only if an input needs a gradient, and parameters inside are not inputs: give it one",
        1,
        29,
    ).without(", requires_grad=True"),
    Mutant(
        "input's gradient lost", "input without gradient", "backward must return the gradient of x, again.grad", 1, 32
    ).edit("again.grad, None", "None, None"),
    Mutant(
        "passed on",
        "passed on wrong",
        "backward returns the gradient that came in; return that of the block's input, again.grad",
        1,
    ).edit("again.grad, None", "gradient, None"),
    Mutant(
        "gradient of x alone",
        "parameters forgotten",
        "the gradient of x alone is asked for; torch.autograd.backward(output, gradient) leaves those of parameters "
        "too",
        1,
    )
    .without(_BACKWARD)
    .edit("again.grad, None", "torch.autograd.grad(output, again, gradient)[0], None"),
    Mutant(
        "from ones",
        "gradient ignored",
        "it takes the gradient of the sum of the outputs: begin the second backward at the gradient that comes in",
        1,
    ).edit("backward(output, gradient)", "backward(output, torch.ones_like(gradient))"),
)

_LOSS, _NUMBER = 'reduction="sum") / num_tokens', "targets.numel()"
_ALL_ALIVE = "all activations are alive together: call backward after each micro-batch, and keep no loss"
_ALIKE = "num_tokens / targets.numel() / len(microbatches)"
WRONG_REPAIR = (
    Mutant("one backward", "activations pile up", _ALL_ALIVE, 1, 59)
    .edit("mean = 0.0", "mean = torch.zeros((), dtype=next(model.parameters()).dtype)")
    .edit("loss.backward()\nmean += loss.item()", "mean = mean + loss")
    .edit("return mean", "mean.backward()\nreturn mean.item()"),
    Mutant("one batch again", "activations pile up", _ALL_ALIVE, 1, 59).body("""
        inputs, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        return loss.item()
    """),
    Mutant("the last loss", "last loss alone", "the last micro-batch's share is returned; add up those of all", 1).edit(
        "mean += loss.item()", "mean = loss.item()"
    ),
    Mutant("graphs kept", "activations pile up", _ALL_ALIVE, 1)
    .edit("mean = 0.0", "losses = []")
    .edit("logits = model(inputs)\nloss = F.cross_entropy(logits", "loss = F.cross_entropy(model(inputs)")
    .edit("loss.backward()\nmean += loss.item()", "loss.backward(retain_graph=True)\nlosses.append(loss)")
    .edit("return mean", "return sum(loss.item() for loss in losses)"),
    Mutant(
        "sum of means",
        "not divided",
        "it is the sum of the micro-batches' means: divide by the number of all tokens",
        1,
        21,
    ).edit(_LOSS, 'reduction="mean")'),
    Mutant(
        "sum of all", "not divided", "it is the sum over all tokens, not the mean: divide by their number", 1
    ).without(" / num_tokens"),
    Mutant(
        "mean of means",
        "mean of means",
        "a micro-batch of fewer tokens counts as much as the others: divide each sum by the number of all tokens",
        1,
        22,
    ).edit(_LOSS, 'reduction="mean") / len(microbatches)'),
    *(
        Mutant(name, name, f"gradients are right, but what is returned is {says}", 1).edit(old, new)
        for name, says, old, new in (
            ("sum returned", "the sum over tokens; return their mean", "return mean", "return mean * num_tokens"),
            ("divided again", "divided by the micro-batches, too", "return mean", "return mean / len(microbatches)"),
            ("the mean of means", "the mean of means; weight by tokens", "+= loss", f"+= {_ALIKE} * loss"),
        )
    ),
    Mutant("samples", "divided by samples", "it divides by the number of samples; divide by that of tokens", 1).edit(
        _NUMBER, "len(targets)"
    ),
    Mutant("zeroed", "only the last", "only the last micro-batch's are left: zero_grad only before the first", 1).edit(
        "logits =", "model.zero_grad()\nlogits ="
    ),
    Mutant("first alone", "only the first", "it takes the first micro-batch alone: run them all", 1).edit(
        "in microbatches:", "in microbatches[:1]:"
    ),
)
