"""Which experts a token gets, which choices find room, and the loss that evens them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.values import seeded
from distlab.grading import Evidence, Mutant

ROUTE_CASES = ((8, 4, 2, 3), (6, 3, 1, 2), (5, 4, 2, 8), (1, 4, 2, 1))  # tokens, experts, choices, capacity
BALANCE_CASES = ((8, 4, 1), (9, 3, 2), (4, 5, 1))  # tokens, experts, choices; no token asks the last of 5


def probabilities_of(tokens: int, experts: int) -> Tensor:
    """Return what a router would say, leaning to the first expert so that capacity binds."""
    scores = seeded(-1, tokens, experts, purpose=f"router {tokens}")
    scores[:, 0] += 1.5
    return scores.softmax(-1)


def _route_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    words = "{} tokens, {} experts, top {}, capacity {}"
    return {words.format(*case): (probabilities_of(*case[:2]), *case[2:]) for case in ROUTE_CASES}


def _use_route(fn: Callable[..., Any], probabilities: Tensor, top_k: int, capacity: int) -> Any:
    got = fn(probabilities.requires_grad_(), top_k, capacity)
    if not isinstance(got, tuple | list) or len(got) != 4:
        return got
    named = dict(zip(("experts", "weights", "kept", "dropped"), got, strict=True))
    return named | {"weights require grad": getattr(got[1], "requires_grad", False)}


def _balance_cases(rank: int, n: int) -> dict[str, tuple[Any, ...]]:
    found = {}
    for tokens, experts, top_k in BALANCE_CASES:
        probabilities = probabilities_of(tokens, experts)
        for dtype in (torch.float32, torch.float64):
            name = f"{tokens} tokens, {experts} experts, top {top_k}, {str(dtype).removeprefix('torch.')}"
            found[name] = (probabilities.to(dtype), probabilities.float().topk(top_k, dim=-1).indices)
    return found


def use_balance(fn: Callable[..., Any], probabilities: Tensor, experts: Tensor) -> Any:
    """Return the loss and its gradient."""
    leaf = probabilities.detach().requires_grad_()
    loss = fn(leaf, experts)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return loss
    if is_graded := loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss, "a gradient reaches probabilities": is_graded, "gradient": leaf.grad}


drive_route = Cases(_route_cases, _use_route)
drive_balance = Cases(_balance_cases, use_balance)


def budget_route(evidence: Evidence) -> list[str]:
    """Say what was dropped."""
    return [f"{name}: {made['result']['dropped']} choices dropped" for name, made in evidence.results[0].items()][:1]


def budget_balance(evidence: Evidence) -> list[str]:
    """Say what the cases give."""
    return [f"{name}: {float(made['result']['loss']):.3f}" for name, made in evidence.results[0].items()]


_KEPT = "kept = (place <= capacity).view(top_k, -1).T"

WRONG_ROUTE = (
    Mutant(
        "by token",
        "by token",
        "an early token's second choice takes the place of a later token's first: place first choices first "
        "(experts.T)",
        1,
    )
    .edit("experts.T.reshape", "experts.reshape")
    .edit(".view(top_k, -1).T", ".view(-1, top_k)"),
    Mutant("each choice", "capacity per choice", "capacity is for first and second choices together: count on", 1)
    .edit("F.one_hot(wanted, probabilities.shape[1])", "F.one_hot(experts, probabilities.shape[1])")
    .edit("gather(1, wanted[:, None])[:, 0]", "gather(2, experts[..., None])[..., 0]")
    .without(".view(top_k, -1).T"),
    Mutant(
        "off by one", "off by one", "an expert keeps one too many: places count from 0 with <, from 1 with <=", 1
    ).edit("place <= capacity", "place - 1 <= capacity"),
    Mutant(
        "unlimited", "capacity ignored", "an expert keeps all choices: memory is set aside for its capacity alone", 1
    ).edit("place <= capacity", "place > 0"),
    Mutant(
        "silent", "drops uncounted", "choices are dropped, and the count says 0: nobody sees that tokens are lost", 1
    ).edit("int((~kept).sum())", "0"),
    Mutant(
        "tokens", "tokens counted", "the number is that of tokens that lost all their choices; count choices", 1
    ).edit("(~kept)", "(~kept.any(-1))"),
    Mutant(
        "not normalised", "not normalised", "a token's weights do not sum to 1: divide by the chosen ones' sum", 1
    ).edit("if top_k > 1:", "if False:"),
    Mutant(
        "one normalised",
        "one choice normalised",
        "a single choice divided by itself is 1, without gradient: keep it",
        1,
    ).edit("if top_k > 1:", "if True:"),
    Mutant("softmax", "softmax twice", "a second softmax evens the weights out: divide by their sum", 1).edit(
        "weights / weights.sum(dim=-1, keepdim=True)", "weights.softmax(-1)"
    ),
    Mutant("by probability", "by probability", "the most probable go first; asked for is the order of choices", 1)
    .edit("asked = F", "order = probabilities.gather(1, experts).T.reshape(-1).argsort(descending=True)\nasked = F")
    .edit("one_hot(wanted", "one_hot(wanted[order]")
    .edit("gather(1, wanted[:, None])[:, 0]", "gather(1, wanted[order][:, None])[order.argsort(), 0]"),
    Mutant(
        "whole tokens", "whole token dropped", "a token loses all choices with one: keep the other if it has room", 1
    ).edit(_KEPT, f"{_KEPT}.all(-1, keepdim=True).expand_as(experts)"),
    Mutant(
        "mixed up", "orders mixed", "places are counted by token and read by choice: experts.T before you count", 1
    ).edit("experts.T.reshape", "experts.reshape"),
    Mutant(
        "after drops", "weights after drops", "a drop changes the other weights of its token: leave them as they are", 1
    ).edit(
        _KEPT,
        f"{_KEPT}\nif top_k > 1:\n    weights = weights * kept\n"
        "    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)",
    ),
    Mutant(
        "detached", "no gradient", "weights require no grad, so the router learns nothing: keep them in the graph", 1
    ).edit("probabilities.topk", "probabilities.detach().topk"),
    Mutant(
        "one fewer", "off by one", "an expert keeps one fewer than its capacity: places count from 0 with <", 1
    ).edit("place <= capacity", "place < capacity"),
    Mutant("later first", "later first", "among equals the later token is kept; the earlier one comes first", 1).edit(
        "asked.cumsum(dim=0)",
        "asked.view(top_k, -1, asked.shape[1]).flip(1).flatten(0, 1).cumsum(dim=0)"
        ".view(top_k, -1, asked.shape[1]).flip(1).flatten(0, 1)",
    ),
    Mutant("dropped marked", "turned round", "kept is true where a choice is dropped; it says who stays", 1).edit(
        "return experts, weights, kept,", "return experts, weights, ~kept,"
    ),
    Mutant(
        "kept counted", "kept counted", "choices that are kept are counted; the last result is how many are dropped", 1
    ).edit("(~kept)", "kept"),
    Mutant("tensor count", "count is a tensor", "dropped is right, but a tensor; make it a number: int(...)", 1).edit(
        "int((~kept).sum())", "(~kept).sum()"
    ),
    Mutant(
        "not transposed", "not transposed", "kept is in the order of experts.T: make it [K, T], then transpose", 1
    ).edit(".view(top_k, -1).T", ".view(-1, top_k)"),
    Mutant("dropped weigh nothing", "weights after drops", "a dropped choice's weight is 0: leave it as it is", 1).edit(
        _KEPT, f"{_KEPT}\nweights = weights * kept"
    ),
    Mutant(
        "later token first", "later token first", "later tokens find room first; among equals the earlier does", 1
    ).edit("asked.cumsum(dim=0)", "asked.flip(0).cumsum(dim=0).flip(0)"),
    Mutant("second choices first", "second choices first", "second choices find room before first ones", 1)
    .edit("experts.T.reshape(-1)", "experts.T.flip(0).reshape(-1)")
    .edit("kept = (place <= capacity).view(top_k, -1).T", "kept = (place <= capacity).view(top_k, -1).flip(0).T"),
)
WRONG_BALANCE = (
    Mutant(
        "probabilities", "probabilities twice", "f is of probabilities too; it counts who was really chosen", 1
    ).edit("fraction @", "probabilities.mean(dim=0) @"),
    Mutant("no E", "not times E", "it lacks the factor E: it should be 1 where experts are asked evenly", 1).without(
        "num_experts * "
    ),
    Mutant(
        "over tokens", "not over choices", "counts are divided by tokens, so even is K, not 1: divide by choices", 1
    ).edit("counts.sum()", "len(experts)"),
    Mutant(
        "first choices", "first choices alone", "first choices alone are counted; a second choice is as much work", 1
    ).edit("experts.flatten()", "experts[:, 0]"),
    Mutant("softmax", "softmax twice", "probabilities come from a softmax already: a second evens them out", 1).edit(
        "probabilities.mean", "probabilities.softmax(-1).mean"
    ),
    Mutant(
        "chosen", "chosen alone", "P is the mean over all tokens, not only over those that chose the expert", 1
    ).edit(
        "probabilities.mean",
        "torch.zeros_like(probabilities).scatter(1, experts, probabilities.gather(1, experts)).mean",
    ),
    Mutant("asked alone", "unasked forgotten", "experts that nobody asked are left out: bincount needs minlength", 1)
    .edit(", minlength=num_experts)", ")\nnum_experts = len(counts)")
    .edit("mean(dim=0)", "mean(dim=0)[:num_experts]"),
    Mutant("detached", "no gradient", "no gradient reaches the probabilities: the loss would change nothing", 1).edit(
        "probabilities.mean", "probabilities.detach().mean"
    ),
    Mutant("sum over tokens", "sum over tokens", "probabilities are summed over tokens; P is their mean", 1).edit(
        "probabilities.mean", "probabilities.sum"
    ),
    Mutant("choices alone", "choices alone", "f is multiplied by itself, not by the mean probabilities P", 1).edit(
        "probabilities.mean(dim=0)", "fraction"
    ),
    Mutant(
        "largest probability", "largest probability", "P is each expert's largest probability; take the mean", 1
    ).edit("probabilities.mean(dim=0)", "probabilities.amax(dim=0)"),
)
