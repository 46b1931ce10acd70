"""Name what is wrong in lesson 6's recompute and accumulation: values first, then what was held at the peak.

Judges of counts are in judge_counts.py, of scaling and master weights in judge_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_06 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import in_megabytes
from distlab.grading.values import compare, describe, equal

MOST = 1.10  # times the peak that is needed


def judge_recompute(evidence: Evidence) -> Iterator[Fault]:
    """The same numbers as without, two runs of each block, and less at the peak."""
    result = evidence.results[0]
    for name, plain in (("hidden", "plain"), ("data", "plain data")):
        yield from _judge_chain(result[name], result[plain], "" if name == "hidden" else "x needs no gradient: ")
    run, plain = result["hidden"], result["plain"]
    if run["peak"] > MOST * least_recompute_bytes(plain):
        text = f"each block runs twice, but {in_megabytes(run['peak'])} are held at the peak, where"
        advice = f"{in_megabytes(least_recompute_bytes(plain))} are enough: the first run's activations are still held"
        yield Fault("keeps them too", f"{text} {advice}; run the block without recording, keep x alone")


def least_recompute_bytes(plain: dict[str, Any]) -> float:
    """Return what a chain needs at the peak: gradients of all blocks, each block's input, one block's activations."""
    tensor = 8 * cases.ROWS * cases.WIDTH
    gradients = sum(8 * gradient.numel() for gradient in plain["gradients"])
    inside = (plain["peak"] - 2 * tensor) / cases.NUM_BLOCKS  # a block's activations and outputs, nearly
    return gradients + (cases.NUM_BLOCKS + 2) * tensor + 1.6 * inside


def _judge_chain(run: dict[str, Any], plain: dict[str, Any], when: str) -> Iterator[Fault]:
    form = compare(run["output"], plain["output"], f"{when}the output")
    if form is not None:
        yield form
        return
    runs = run["runs"]
    gradients = run["gradients"]
    if all(gradient is None for gradient in gradients):
        text = f"{when}no parameter has a gradient"
        if min(runs) > 1:
            advice = "the second run was asked for the gradient of x alone; torch.autograd.backward(output, gradient)"
            yield Fault("parameters forgotten", f"{text}: {advice} leaves those of the parameters in .grad")
            return
        advice = "autograd calls backward only if an input of the Function needs a gradient, and parameters that the"
        yield Fault("no gradients", f"{text}: {advice} block uses inside are no inputs; give it one that needs one")
        return
    if set(runs) == {1}:
        text = f"{when}each block runs once and {in_megabytes(run['peak'])} are held at the peak"
        yield Fault(
            "not recomputed", f"{text}, as without recomputing: keep x alone, and run the block again in backward"
        )
        return
    yield from _judge_gradients(run, plain, when)
    if set(runs) != {2}:
        yield Fault("runs", f"{when}blocks run {runs} times, expected twice each: forward, and once more in backward")
    if not torch.equal(run["draw"], plain["draw"]):
        text = f"{when}the next random numbers differ from those of a run without recomputing"
        advice = "the second run must leave the generator as it found it (torch.random.fork_rng), or the next step's"
        yield Fault("generator moved", f"{text}: {advice} dropout repeats this one's")


def _judge_gradients(run: dict[str, Any], plain: dict[str, Any], when: str) -> Iterator[Fault]:
    per_block = len(plain["gradients"]) // cases.NUM_BLOCKS
    last, wanted = run["gradients"][-per_block:], plain["gradients"][-per_block:]
    for got, want in zip(last, wanted, strict=True):
        if isinstance(got, Tensor) and equal(got, want):
            continue
        if isinstance(got, Tensor) and _is_bias_of_ones(last[-1], wanted[-1]):
            text = f"{when}the last block's gradients are those of a sum of its outputs"
            yield Fault("gradient ignored", f"{text}: start backward of the second run from the gradient that comes in")
        elif isinstance(got, Tensor) and equal(last[-1], wanted[-1]):  # the bias after the dropout: no mask in it
            text = f"{when}gradients differ where dropout is: the second run drops other elements than the first"
            yield Fault("another dropout", f"{text}; keep torch.get_rng_state() and set it again before the second run")
        else:
            yield compare(got, want, f"{when}a gradient of the last block") or Fault("values", "gradients differ")
        return
    first = run["gradients"][0]
    if not isinstance(first, Tensor) or (run["x"] is None and plain["x"] is not None):
        text = f"{when}the last block has its gradients, those before it have none"
        yield Fault("input without gradient", f"{text}: backward must return the gradient of x, again.grad")
        return
    everything = zip([*run["gradients"], run["x"]], [*plain["gradients"], plain["x"]], strict=True)
    for index, (got, want) in enumerate(everything):
        if want is not None and (fault := compare(got, want, f"{when}gradient {index}")) is not None:
            advice = "the last block's gradients are right, those before it are not: backward must return again.grad,"
            yield Fault("passed on wrong", f"{when}{advice} the gradient of the block's input ({fault.message})")
            return


def _is_bias_of_ones(got: Any, want: Tensor) -> bool:
    """Tell whether the last bias's gradient counts rows: what a gradient of ones gives."""
    counted = torch.full_like(want, float(cases.ROWS))
    return isinstance(got, Tensor) and equal(got, counted) and not equal(want, counted)


def budget_recompute(evidence: Evidence) -> list[str]:
    """Say what is held and what it costs."""
    run, plain = evidence.results[0]["hidden"], evidence.results[0]["plain"]
    return [
        f"held at the peak: {in_megabytes(run['peak'])}, without recomputing {in_megabytes(plain['peak'])}",
        f"each of {cases.NUM_BLOCKS} blocks runs twice forward: a third more work in all",
    ]


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """The gradient of the mean over all tokens, and no more memory than one micro-batch needs."""
    result = evidence.results[0]
    sums = cases.microbatch_gradients("sum")
    count = sum(size * cases.LENGTH for size in cases.SIZES)
    want = [sum(parts) / count for parts in zip(*sums, strict=True)]
    fault = _gradient_fault(result["gradients"], want, sums)
    if fault is not None:
        yield fault
        return
    if not isinstance(result["mean"], int | float):
        text = f"it returned {describe(result['mean'])}, expected a number: a tensor may keep what it was made from"
        yield Fault("returned", f"{text}; add up loss.item()")
        return
    fault = compare(float(result["mean"]), mean_loss(), "the mean loss")
    if fault is not None:
        yield fault
    if result["peak"] > 1.3 * result["least"]:
        text = f"right gradients, but {in_megabytes(result['peak'])} held at the peak, where one micro-batch needs"
        advice = "the activations of all micro-batches are alive together; call backward after each, which lets them go"
        yield Fault("activations pile up", f"{text} {in_megabytes(result['least'])}: {advice}")


def mean_loss() -> float:
    """Return the mean loss over all tokens."""
    model, batches = cases.tiny_and_batches()
    total, count = 0.0, 0
    for inputs, targets in batches:
        logits = model(inputs).flatten(0, -2)
        total += float(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").detach())
        count += targets.numel()
    return total / count


def _gradient_fault(got: list[Any], want: list[Tensor], sums: list[list[Tensor]]) -> Fault | None:
    if any(not isinstance(gradient, Tensor) for gradient in got):
        return Fault("no gradients", "a parameter has no gradient: call backward, and leave what it adds in .grad")
    flat, right = _row(got), _row(want)
    if equal(flat, right):
        return None
    tokens = [size * cases.LENGTH for size in cases.SIZES]
    means = [_row(row) / count for row, count in zip(sums, tokens, strict=True)]
    n, total = len(means), torch.stack([_row(row) for row in sums]).sum(0)
    added = torch.stack(means).sum(0)
    weighing = "the last micro-batch has half as many tokens, and counts as much as the others: divide each sum by the"
    known = (
        ("mean of means", added / n, f"are the mean of the micro-batches' means: {weighing} number of all tokens"),
        ("not divided", added, f"are the sum of {n} means: about {n}x too large; divide by the number of all tokens"),
        ("not divided", total, "are those of the sum over all tokens, not of the mean: divide by their number"),
        (
            "divided by samples",
            total / sum(cases.SIZES),
            f"are {cases.LENGTH}x too large: divide by the number of tokens, not of samples",
        ),
        (
            "only the last",
            _row(sums[-1]) / sum(tokens),
            "are those of the last micro-batch alone: zero_grad only before the first",
        ),
        ("only the last", means[-1], "are those of the last micro-batch alone: zero_grad only before the first"),
        ("only the first", _row(sums[0]) / sum(tokens), "are those of the first micro-batch alone: run them all"),
    )
    for code, version, words in known:
        if equal(flat, version):
            return Fault(code, f"gradients {words}")
    return compare(flat, right, "the gradients, as one row")


def _row(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say what is held."""
    result = evidence.results[0]
    text = f"held at the peak: {in_megabytes(result['peak'])} for {len(cases.SIZES)} micro-batches"
    return [f"{text} (one needs {in_megabytes(result['least'])})"]
