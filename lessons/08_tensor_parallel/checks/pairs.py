"""f and g, through which a region of cut layers is entered and left, and two layers between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from distlab_lesson_08.checks.shared import (
    ACTIVATION,
    CUT,
    HIDDEN,
    JOIN,
    WIDE,
    backward,
    is_times,
    judge_way,
    one_way,
    own_x,
    part,
    plain,
    reduce_bytes,
    total,
    whole_x,
)
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.provenance import explain_sum
from distlab.grading.diagnosis.traffic import calls, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, describe, same, seeded


def drive_pair(fn: Callable[[], Any]) -> dict[str, Any]:
    """Send something through f, and something else through g."""
    pair = fn()
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(callable(one) for one in pair):
        return {"pair": pair if not callable(pair) else "a function"}
    rank = dist.get_rank()
    return {
        "f": one_way(pair[0], whole_x(), own_x(rank, "gradient of f")),
        "g": one_way(pair[1], own_x(rank, "partial"), whole_x("gradient of g")),
    }


def judge_pair(evidence: Evidence) -> Iterator[Fault]:
    """f: nothing forward, sum backward. g: sum forward, nothing backward. Two all-reduces in all."""
    n = evidence.world_size
    x, back = whole_x(), whole_x("gradient of g")
    gradients, partials = (total([own_x(r, name) for r in range(n)]) for name in ("gradient of f", "partial"))
    for rank, result in enumerate(evidence.results):
        if "pair" in result:
            yield Fault("returned", f"rank {rank}: expected two functions (f, g), got {describe(result['pair'])}")
        if n > 1:
            yield from _judge_pair(result["f"], result["g"], rank, [each.get("f") for each in evidence.results])
        yield from judge_way(result["f"], (x, gradients), f"f on rank {rank}", n)
        yield from judge_way(result["g"], (partials, back), f"g on rank {rank}", n)
    wanted = 2 * reduce_bytes(ACTIVATION, n)
    yield from found(over_budget(evidence, wanted, "one all-reduce in f's backward and one in g's forward"))


def _judge_pair(f: dict[str, Any], g: dict[str, Any], rank: int, all_f: list[Any]) -> Iterator[Fault]:
    n = len(all_f)
    x, back, partial = whole_x(), whole_x("gradient of g"), own_x(rank, "partial")
    gradients = [own_x(other, "gradient of f") for other in range(n)]
    if same(f["out"], n * x) and same(g["out"], partial):
        yield Fault("swapped", "f adds up forward and g does not: f begins a region, g ends it; return (f, g)")
    if same(f["out"], n * x):
        text = f"f adds up the ranks' x forward: {n} times what every rank holds"
        yield Fault("f sums forward", f"{text}; forward it hands x on, backward it sums the gradients")
    if same(g["out"], partial):
        yield Fault("g does not sum", "g hands on this rank's partial result; the layer's output is the ranks' sum")
    if all(each and each["went"] and same(each["grad"], own) for each, own in zip(all_f, gradients, strict=True)):
        text = "the gradient of f's input is that of this rank's own part: the others' never reach it"
        yield Fault("missing f", f"{text}, and every layer below trains on a part; all_reduce it in backward")
    if f["went"] and f["kept"] and same(f["out"], x):
        what = f"the gradient through f on rank {rank}"
        yield from found(explain_sum(f["grad"], gradients, expected=[1.0] * n, what=what))
    if g["went"] and is_times(g["grad"], back, n):
        text = f"g's backward gives {n} times the gradient: every rank has all of it already, and they are added up"
        yield Fault("gradient t times", f"{text}; behind a sum the gradient of each part is the gradient itself")


def budget_pair(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [sent_line(evidence, 2 * reduce_bytes(ACTIVATION, evidence.world_size), "an all-reduce each way")]


def mlp_parameters() -> dict[str, Tensor]:
    """Return the parameters of the full layers."""
    shapes = {"widen": (WIDE, HIDDEN), "widen_bias": (WIDE,), "output": (HIDDEN, WIDE), "output_bias": (HIDDEN,)}
    return {name: seeded(-1, *shape, purpose=name) for name, shape in shapes.items()}


CUT_DIM = {"widen": 0, "widen_bias": 0, "output": 1, "output_bias": None}


def drive_mlp(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the parts forward and backward."""
    parts = {}
    for name, full in mlp_parameters().items():
        dim = CUT_DIM[name]
        parts[name] = full.clone().requires_grad_() if dim is None else part(full, dim)
    x = whole_x().requires_grad_()
    y = fn(x, *parts.values())
    value = plain(y)
    went = backward(y, whole_x("gradient"))
    return {
        "out": value,
        "went": went,
        "grads": {"x": plain(x.grad), **{name: plain(one.grad) for name, one in parts.items()}},
    }


def mlp_truth(n: int) -> tuple[Tensor, dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Return output, gradients, each rank's partial output without bias, and x's gradient through each rank's part."""
    names = mlp_parameters()
    leaves = {name: full.clone().requires_grad_() for name, full in names.items()}
    x = whole_x().requires_grad_()
    hidden = F.gelu(F.linear(x, leaves["widen"], leaves["widen_bias"]))
    y = F.linear(hidden, leaves["output"], leaves["output_bias"])
    y.backward(whole_x("gradient"))  # type: ignore[no-untyped-call]
    partial, through = [], []
    for rank in range(n):
        own = whole_x().requires_grad_()
        widen, bias = names["widen"].chunk(n)[rank], names["widen_bias"].chunk(n)[rank]
        out = F.linear(F.gelu(F.linear(own, widen, bias)), names["output"].chunk(n, 1)[rank])
        out.backward(whole_x("gradient"))  # type: ignore[no-untyped-call]
        assert own.grad is not None, "it took part"
        partial.append(out.detach())
        through.append(own.grad)
    grads = {name: leaf.grad for name, leaf in {"x": x, **leaves}.items() if leaf.grad is not None}
    return y.detach(), grads, partial, through


def judge_mlp(evidence: Evidence) -> Iterator[Fault]:
    """Output and all gradients as of the full layers, with one all-reduce each way."""
    n = evidence.world_size
    truth = mlp_truth(n)
    for rank, result in enumerate(evidence.results):
        yield from _judge_output(result["out"], truth, rank, n)
        yield from _judge_gradients(result, truth, rank, n)
    fault = over_budget(
        evidence, 2 * reduce_bytes(ACTIVATION, n), "one all-reduce of x's size forward and one backward"
    )
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: the wide layer's features travel, 4 times as many as x has"
        yield Fault("features gathered", f"{text}; the row layer takes just those that this rank has made")
    reduced = len(calls(evidence, 0, "all_reduce"))
    if fault is not None and reduced > 2:
        text = f"{fault.message}, in {reduced} all-reduces; between the two layers"
        yield Fault("too many all-reduces", f"{text} nothing is exchanged: f before the first, g behind the second")
    yield from found(fault)


def _judge_output(got: Any, truth: Any, rank: int, n: int) -> Iterator[Fault]:
    y, _, partial, _ = truth
    full = mlp_parameters()
    bias, what = full["output_bias"], f"rank {rank}'s y"
    if n > 1 and same(got, y + (n - 1) * bias):
        text = f"{what} has the bias of `output` {n} times: every rank adds it before the sum"
        yield Fault("bias counted t times", f"{text}; add it once, behind the sum")
    if n > 1 and same(got, y - bias):
        yield Fault("bias forgotten", f"{what} lacks the bias of `output`")
    if n > 1 and (same(got, partial[rank] + bias) or same(got, partial[rank])):
        text = f"{what} is what its own features give: ranks go on with different activations"
        yield Fault("not summed", f"{text}; g (reduce_from_ranks) adds them up")
    hidden = F.linear(whole_x(), full["widen"], full["widen_bias"])
    if same(got, F.linear(hidden, full["output"]) + bias):
        yield Fault("no gelu", f"{what} is that of two linear layers without GeLU between them")
    yield from found(compare(got, y, what, n))


def _judge_gradients(result: dict[str, Any], truth: Any, rank: int, n: int) -> Iterator[Fault]:
    _, grads, _, through = truth
    got = result["grads"]
    missing = [name for name, gradient in got.items() if gradient is None]
    if missing == ["output_bias"]:
        text = f"rank {rank}: output_bias gets no gradient here, and one on other ranks: its copies drift apart"
        yield Fault("bias on some ranks", f"{text}. Every rank adds it, behind the sum")
    if missing or not result["went"]:
        yield Fault("graph cut", f"rank {rank}: no gradient reaches {', '.join(missing) or 'x'}: y or part of {CUT}")
    if n > 1 and same(got["x"], through[rank]):
        text = f"rank {rank}: x's gradient is that of its own features alone, and differs from rank to rank"
        yield Fault("missing f", f"{text}: begin the region with f (copy_to_ranks)")
    if n > 1 and same(got["output_bias"], grads["output_bias"] / n):
        text = f"rank {rank}: the gradient of output_bias is {n} times too small: it is divided by {n} before the sum"
        yield Fault("bias divided", f"{text}; add it whole, behind the sum")
    for name, full in grads.items():
        dim = CUT_DIM.get(name)
        want = full if dim is None else full.chunk(n, dim)[rank]
        if is_times(got[name], want, n):
            text = f"rank {rank}: the gradient of {name} is {n} times what it should be: backward adds up what every"
            yield Fault("gradient t times", f"{text} rank has whole. g's backward is nothing, f's is one sum")
        yield from found(compare(got[name], want, f"rank {rank}'s gradient of {name}", n))


def budget_mlp(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of x forward and one backward")]


_GATHERED_SUM = """
parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(parts, total.contiguous())
total = torch.stack(parts).sum(0)
"""
_CUT = """
    class Cut(torch.autograd.Function):
        forward, backward = staticmethod(Join.backward), staticmethod(Join.forward)
"""
_SUM_OF_GRADIENTS = "total = gradient.clone()\ndist.all_reduce(total)\nreturn total"

WRONG_PAIRS = (
    Mutant("no f", "missing f", "all_reduce it in backward", 2, 35).edit(_SUM_OF_GRADIENTS, "return gradient"),
    Mutant("plain call", "graph cut", "it has no history", 2, 32).edit(
        "Reduce.apply", "lambda x: Reduce.apply(x.detach())"
    ),
    Mutant("two sums", "gradient t times", "3 times the gradient", 3, 33).edit("return gradient", _SUM_OF_GRADIENTS),
    Mutant("in place", "changed argument", "clone before you sum", 2).edit(".clone()", "", times=2),
    Mutant("swapped", "swapped", "return (f, g)", 2).edit("Copy.apply, Reduce.apply", "Reduce.apply, Copy.apply"),
    Mutant("by gathering", "too many bytes", "one all-reduce in f's backward", 4).edit(
        "dist.all_reduce(total)", _GATHERED_SUM, times=2
    ),
)
WRONG_MLPS = (
    Mutant("bias inside", "bias counted t times", "4 times", 4, 34).edit(
        "output)) + output_bias", "output, output_bias))"
    ),
    Mutant("bias on one", "bias on some ranks", "copies drift apart", 2).edit(
        "output)) + output_bias", "output, output_bias if dist.get_rank() == 0 else None))"
    ),
    Mutant("no f", "missing f", "differs from rank to rank", 2, 35).edit("copy_to_ranks(x)", "x"),
    Mutant("no g", "not summed", "different activations", 2).edit("return reduce_from_ranks(", "return ("),
    Mutant("features gathered", "features gathered", "4 times as many as x has", 2)
    .setup(f"{JOIN}\n{_CUT}")
    .edit("F.gelu(", "Cut.apply(F.gelu(Join.apply(")
    .edit("widen_bias))", "widen_bias))))"),
    Mutant("plain all-gather", "graph cut", "no gradient reaches", 2, 32).edit(
        "F.linear(hidden, output)", "F.linear(hidden, output).detach()"
    ),
    Mutant("two sums", "gradient t times", "2 times what it should be", 2, 33).edit(
        "F.linear(hidden, output)", "copy_to_ranks(F.linear(hidden, output))"
    ),
    Mutant("no gelu", "no gelu", "without GeLU", 1).edit("F.gelu(", "("),
)
