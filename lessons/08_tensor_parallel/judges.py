"""Name what is wrong in lesson 8's cut of a linear layer, its f and g, and two layers between them.

Heads and sequences are judged in judge_splits.py, the vocabulary in judge_vocabulary.py, dropout and norms in
judge_update.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from distlab_lesson_08 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes, over_budget, sent_line
from distlab.grading.values import compare, describe, equal

DOUBLE = 8  # bytes of an element in all cases
ACTIVATION = DOUBLE * cases.SAMPLES * cases.POSITIONS * cases.HIDDEN
CUT = "it has no history: backward stops there. A call to torch.distributed is nothing that autograd goes back through"


def same(got: Any, want: Tensor) -> bool:
    """Whether something is a tensor of this shape with these values."""
    return isinstance(got, Tensor) and got.shape == want.shape and equal(got, want)


def is_times(got: Any, want: Tensor, n: int) -> bool:
    """Whether something is n times what it should be, and not zero."""
    return n > 1 and bool(want.any()) and same(got, n * want)


def total(parts: list[Tensor]) -> Tensor:
    """Add up the ranks' tensors."""
    return torch.stack(parts).sum(0)


def reduce_bytes(num_bytes: float, n: int) -> float:
    """Return what a rank sends in an all-reduce."""
    return 2 * (n - 1) / n * num_bytes


def judge_cut(evidence: Evidence) -> Iterator[Fault]:
    """Each rank's part of a column and of a row layer, the bias once, nothing whole behind it."""
    for (kind, n), row in zip(cases.CUT_CASES, evidence.results[0], strict=True):
        for rank, (got, held) in enumerate(row):
            fault = _judge_cut(got, kind, n, rank) or _judge_held(held, kind, n, rank)
            if fault is not None:
                yield fault
                return


def _judge_cut(got: Any, kind: str, n: int, rank: int) -> Fault | None:
    what = f"{kind}, {n} rank{'s' * (n > 1)}, rank {rank}"
    if not isinstance(got, tuple | list) or len(got) != 2:
        return Fault("returned", f"{what}: expected (weight, bias), got {describe(got)}")
    (weight, bias), (full, full_bias) = got, cases.full_linear()
    dims = {"column": 0, "row": 1}
    want, other = (full.chunk(n, dim)[rank] for dim in (dims[kind], 1 - dims[kind]))
    if n > 1 and same(weight, full):
        text = f"{what} keeps the whole weight: a full layer has taken the place of its part, and {n} ranks hold and"
        return Fault("whole layer", f"{text} compute all of it {n} times")
    if n > 1 and same(weight, other):
        text = f"{what}: the weight was cut along dim {1 - dims[kind]}. torch keeps [output features, input features]:"
        return Fault("column and row swapped", f"{text} a column of the papers' X A is a row of `weight`")
    for place in range(n):
        if place != rank and same(weight, full.chunk(n, dims[kind])[place]):
            return Fault("wrong part", f"{what} has the part of rank {place}")
    if (fault := compare(weight, want, f"{what}: weight", n)) is not None:
        return fault
    return _judge_bias(bias, full_bias, kind, n, rank)


def _judge_bias(bias: Any, full: Tensor, kind: str, n: int, rank: int) -> Fault | None:
    what = f"{kind}, {n} rank{'s' * (n > 1)}, rank {rank}"
    if kind == "row" and rank > 0:
        if bias is None or (isinstance(bias, Tensor) and not bias.any()):
            return None
        if same(bias, full):
            text = f"{what} adds the bias too: the results of {n} ranks are added up, and so the bias counts {n} times"
            return Fault("bias on every rank", f"{text}; return None on all ranks but rank 0")
        text = f"{what}: got {describe(bias)} for the bias"
        return Fault("bias cut", f"{text}; a row layer's ranks make all output features: rank 0 has it whole")
    want = full.chunk(n)[rank] if kind == "column" else full
    if n > 1 and kind == "row" and same(bias, full / n):
        text = (
            f"{what} has the bias divided by {n}: the sum of all is right now, but each rank's gets the whole gradient"
        )
        return Fault("bias divided", f"{text}, so that the bias learns {n} times as fast. Rank 0 has it whole")
    if n > 1 and kind == "row" and same(bias, full.chunk(n)[rank]):
        text = f"{what} has a part of the bias; a row layer's ranks make all {len(full)} output features"
        return Fault("bias cut", f"{text}: rank 0 adds it whole, the others nothing")
    if n > 1 and kind == "column" and same(bias, full):
        text = f"{what} has all {len(full)} numbers of the bias for {len(want)} output features"
        return Fault("bias not cut", f"{text}; cut it as the weight's dim 0")
    return compare(bias, want, f"{what}: bias", n)


def _judge_held(held: int, kind: str, n: int, rank: int) -> Fault | None:
    full = cases.full_linear()[0]
    if n == 1 or held <= DOUBLE * full.numel() // n:
        return None
    text = f"right values, but behind the weight of {kind} rank {rank} of {n} lie {in_megabytes(held)}, where its part"
    text += f" has {in_megabytes(DOUBLE * full.numel() // n)}: a view keeps the whole tensor in memory; clone it"
    return Fault("a view of the whole", text)


def budget_cut(evidence: Evidence) -> list[str]:
    """Say what a rank holds."""
    return [f"{len(cases.CUT_CASES)} cases; a rank holds 1/t of the weight, in memory of its own"]


def judge_way(row: dict[str, Any], want: tuple[Tensor, Tensor], what: str, n: int) -> Fault | None:
    """Say what is wrong with one way through a function and back, in general words."""
    if not row["kept"]:
        text = f"{what} changes what it is given, its input or the gradient: others may hold the same tensor"
        return Fault("changed argument", f"{text}; clone before you sum in place")
    if (fault := compare(row["out"], want[0], f"the output of {what}", n)) is not None:
        return fault
    if not row["went"] or row["grad"] is None:
        return Fault("graph cut", f"the output of {what}: {CUT}. Write forward and backward of an autograd Function")
    return compare(row["grad"], want[1], f"the gradient through {what}", n)


def judge_pair(evidence: Evidence) -> Iterator[Fault]:
    """f: nothing forward, sum backward. g: sum forward, nothing backward. Two all-reduces in all."""
    n, results = evidence.world_size, evidence.results
    x, back = cases.whole_x(), cases.whole_x("gradient of g")
    for rank, result in enumerate(results):
        if "pair" in result:
            yield Fault("returned", f"rank {rank}: expected two functions (f, g), got {describe(result['pair'])}")
            return
        own, partial = (cases.own_x(rank, name) for name in ("gradient of f", "partial"))
        gradients, partials = (total([cases.own_x(r, name) for r in range(n)]) for name in ("gradient of f", "partial"))
        fault = _named_pair(result, own, partial, n)
        fault = fault or judge_way(result["f"], (x, gradients), f"f on rank {rank}", n)
        fault = fault or judge_way(result["g"], (partials, back), f"g on rank {rank}", n)
        if fault is not None:
            yield fault
            return
    wanted = 2 * reduce_bytes(ACTIVATION, n)
    if (fault := over_budget(evidence, wanted, "one all-reduce in f's backward and one in g's forward")) is not None:
        yield fault


def _named_pair(result: dict[str, Any], own: Tensor, partial: Tensor, n: int) -> Fault | None:
    f, g = result["f"], result["g"]
    x, back = cases.whole_x(), cases.whole_x("gradient of g")
    if n == 1:
        return None
    if same(f["out"], n * x) and same(g["out"], partial):
        return Fault("swapped", "f adds up forward and g does not: f begins a region, g ends it; return (f, g)")
    if same(f["out"], n * x):
        text = f"f adds up the ranks' x forward: {n} times what every rank holds"
        return Fault("f sums forward", f"{text}; forward it hands x on, backward it sums the gradients")
    if same(g["out"], partial):
        return Fault("g does not sum", "g hands on this rank's partial result; the layer's output is the ranks' sum")
    if f["went"] and same(f["grad"], own):
        text = "the gradient of f's input is that of this rank's own part: the others' never reach it"
        return Fault("missing f", f"{text}, and every layer below trains on a part; all_reduce it in backward")
    if g["went"] and is_times(g["grad"], back, n):
        text = f"g's backward gives {n} times the gradient: every rank has all of it already, and they are added up"
        return Fault("gradient t times", f"{text}; behind a sum the gradient of each part is the gradient itself")
    return None


def budget_pair(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [sent_line(evidence, 2 * reduce_bytes(ACTIVATION, evidence.world_size), "an all-reduce each way")]


def mlp_truth(n: int) -> tuple[Tensor, dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Return output, gradients, each rank's partial output without bias, and x's gradient through each rank's part."""
    names = cases.mlp_parameters()
    leaves = {name: full.clone().requires_grad_() for name, full in names.items()}
    x = cases.whole_x().requires_grad_()
    hidden = F.gelu(F.linear(x, leaves["widen"], leaves["widen_bias"]))
    y = F.linear(hidden, leaves["output"], leaves["output_bias"])
    y.backward(cases.whole_x("gradient"))  # type: ignore[no-untyped-call]
    partial, through = [], []
    for rank in range(n):
        own = cases.whole_x().requires_grad_()
        widen, bias = names["widen"].chunk(n)[rank], names["widen_bias"].chunk(n)[rank]
        out = F.linear(F.gelu(F.linear(own, widen, bias)), names["output"].chunk(n, 1)[rank])
        out.backward(cases.whole_x("gradient"))  # type: ignore[no-untyped-call]
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
        fault = _judge_output(result["out"], truth, rank, n) or _judge_mlp_grads(result, truth, rank, n)
        if fault is not None:
            yield fault
            return
    wanted = 2 * reduce_bytes(ACTIVATION, n)
    fault = over_budget(evidence, wanted, "one all-reduce of x's size forward and one backward")
    if fault is None:
        return
    if calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: the wide layer's features travel, 4 times as many as x has"
        fault = Fault("features gathered", f"{text}; the row layer takes just those that this rank has made")
    elif len(calls(evidence, 0, "all_reduce")) > 2:
        text = f"{fault.message}, in {len(calls(evidence, 0, 'all_reduce'))} all-reduces; between the two layers"
        fault = Fault("too many all-reduces", f"{text} nothing is exchanged: f before the first, g behind the second")
    yield fault


def _judge_output(got: Any, truth: Any, rank: int, n: int) -> Fault | None:
    y, _, partial, _ = truth
    bias = cases.mlp_parameters()["output_bias"]
    what = f"rank {rank}'s y"
    if n > 1 and same(got, y + (n - 1) * bias):
        text = f"{what} has the bias of `output` {n} times: every rank adds it before the sum"
        return Fault("bias counted t times", f"{text}; add it once, behind the sum")
    if n > 1 and same(got, y - bias):
        return Fault("bias forgotten", f"{what} lacks the bias of `output`")
    if n > 1 and (same(got, partial[rank] + bias) or same(got, partial[rank])):
        text = f"{what} is what its own features give: ranks go on with different activations"
        return Fault("not summed", f"{text}; g (reduce_from_ranks) adds them up")
    names = cases.mlp_parameters()
    hidden = F.linear(cases.whole_x(), names["widen"], names["widen_bias"])
    if same(got, F.linear(hidden, names["output"]) + bias):
        return Fault("no gelu", f"{what} is that of two linear layers without GeLU between them")
    return compare(got, y, what, n)


def _judge_mlp_grads(result: dict[str, Any], truth: Any, rank: int, n: int) -> Fault | None:
    _, grads, _, through = truth
    got = result["grads"]
    if not result["went"] or any(gradient is None for gradient in got.values()):
        missing = [name for name, gradient in got.items() if gradient is None]
        if missing == ["output_bias"]:
            text = f"rank {rank}: output_bias gets no gradient here, and one on other ranks: its copies drift apart"
            return Fault("bias on some ranks", f"{text}. Every rank adds it, behind the sum")
        return Fault("graph cut", f"rank {rank}: no gradient reaches {', '.join(missing) or 'x'}: y or part of {CUT}")
    if n > 1 and same(got["x"], through[rank]):
        text = f"rank {rank}: x's gradient is that of its own features alone, and differs from rank to rank"
        return Fault("missing f", f"{text}: begin the region with f (copy_to_ranks)")
    if n > 1 and same(got["output_bias"], grads["output_bias"] / n):
        text = f"rank {rank}: the gradient of output_bias is {n} times too small: it is divided by {n} before the sum"
        return Fault("bias divided", f"{text}; add it whole, behind the sum")
    for name, full in grads.items():
        dim = cases.CUT_DIM.get(name)
        want = full if dim is None else full.chunk(n, dim)[rank]
        if is_times(got[name], want, n):
            text = f"rank {rank}: the gradient of {name} is {n} times what it should be: backward adds up what every"
            return Fault("gradient t times", f"{text} rank has whole. g's backward is nothing, f's is one sum")
        if (fault := compare(got[name], want, f"rank {rank}'s gradient of {name}", n)) is not None:
            return fault
    return None


def budget_mlp(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    wanted = 2 * reduce_bytes(ACTIVATION, evidence.world_size)
    return [sent_line(evidence, wanted, "one all-reduce of x forward and one backward")]
