"""Which experts a token gets, which choices find room, and the loss that evens them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from distlab_lesson_11.checks.dispatch import detached
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found, known_mistake
from distlab.grading.diagnosis.values import compare, describe, same, seeded

ROUTE_CASES = ((8, 4, 2, 3), (6, 3, 1, 2), (5, 4, 2, 8), (1, 4, 2, 1))  # tokens, experts, choices, capacity
BALANCE_CASES = ((8, 4, 1), (9, 3, 2), (4, 5, 1))  # tokens, experts, choices; no token asks the last of 5


def probabilities_of(tokens: int, experts: int) -> Tensor:
    """Return what a router would say, leaning to the first expert so that capacity binds."""
    scores = seeded(-1, tokens, experts, purpose=f"router {tokens}")
    scores[:, 0] += 1.5
    return scores.softmax(-1)


def drive_route(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Route each case; see whether weights hand gradients on."""
    results = []
    for tokens, experts, top_k, capacity in ROUTE_CASES:
        probabilities = probabilities_of(tokens, experts).requires_grad_()
        got = fn(probabilities, top_k, capacity)
        weights = got[1] if isinstance(got, tuple | list) and len(got) > 1 else None
        graded = isinstance(weights, Tensor) and weights.requires_grad
        results.append({"got": detached(got), "graded": graded})
    return results


def drive_balance(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Ask for the loss of uneven choices, and its gradient."""
    results = []
    for tokens, num_experts, top_k in BALANCE_CASES:
        probabilities = probabilities_of(tokens, num_experts).float().requires_grad_()
        got = fn(probabilities, probabilities.detach().topk(top_k, dim=-1).indices)
        if isinstance(got, Tensor) and got.requires_grad and got.numel() == 1:
            got.backward()  # type: ignore[no-untyped-call]
        wide = fn(probabilities.detach().double(), probabilities.detach().topk(top_k, dim=-1).indices)
        dtype = str(wide.dtype) if isinstance(wide, Tensor) else ""
        results.append({"got": detached(got), "gradient": probabilities.grad, "wide": dtype})
    return results


def kept_in_turn(order: list[tuple[int, int]], experts: Tensor, capacity: int) -> Tensor:
    """Return which choices are kept when they come in this order of (token, choice)."""
    kept, taken = torch.zeros_like(experts, dtype=torch.bool), [0] * (int(experts.max()) + 1)
    for token, choice in order:
        expert = int(experts[token, choice])
        kept[token, choice] = taken[expert] < capacity
        taken[expert] += 1
    return kept


def right_routing(case: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return what a case should give."""
    tokens, num_experts, top_k, capacity = case
    chosen, experts = probabilities_of(tokens, num_experts).topk(top_k, dim=-1)
    weights = chosen / chosen.sum(-1, keepdim=True) if top_k > 1 else chosen
    by_choice = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    kept = kept_in_turn(by_choice, experts, capacity)
    return experts, weights, kept, int((~kept).sum())


def judge_route(evidence: Evidence) -> Iterator[Fault]:
    """Right experts, weights, kept choices and count of dropped ones; gradients through the weights."""
    for case, result in zip(ROUTE_CASES, evidence.results[0], strict=True):
        tokens, num_experts, top_k, capacity = case
        what = f"{tokens} tokens, {num_experts} experts, top {top_k}, capacity {capacity}"
        got = result["got"]
        if not isinstance(got, list) or len(got) != 4:
            yield Fault("returned", f"{what}: expected (experts, weights, kept, dropped), got {describe(got)}")
        experts, weights, kept, dropped = right_routing(case)
        yield from found(compare(got[0], experts, f"{what}: experts", 1))
        if fault := compare(got[1], weights, f"{what}: weights", 1):
            yield known_mistake(got[1], weights, _wrong_weights(case), f"{what}:") or fault
        if fault := compare(got[2], kept, f"{what}: kept", 1):
            yield known_mistake(got[2], kept, _wrongly_kept(case), f"{what}:") or fault
        yield from found(_count_fault(got[3], kept, dropped, what))
        if not result["graded"]:
            text = f"{what}: weights do not require grad: the router would learn nothing from the task"
            yield Fault("no gradient", f"{text}; they are probabilities, so leave them in the graph")


def _wrong_weights(case: tuple[int, int, int, int]) -> Iterator[tuple[str, Tensor, str]]:
    """Known mistakes in the weights: what they give, and what to say."""
    _, want, kept, _ = right_routing(case)
    chosen = probabilities_of(*case[:2]).topk(case[2], dim=-1).values
    over_kept = torch.where(kept, chosen, 0.0)
    over_kept = over_kept / over_kept.sum(-1, keepdim=True).clamp(min=1e-300)
    if case[2] == 1:
        text = (
            "a single choice's weight is always 1 when it is divided by itself, and the router has no gradient; leave"
        )
        yield "one choice normalised", torch.ones_like(chosen), f"{text} the probability as it is"
    text = f"a token's weights sum to {float(chosen[0].sum()):.2f}; divide by the sum of its chosen probabilities"
    yield "not normalised", chosen, text
    if case[2] > 1:
        text = "a softmax of the chosen probabilities, which went through a softmax already: it evens them out"
        yield "softmax twice", chosen.softmax(-1), f"{text}; divide by their sum"
    text = "weights depend on what was dropped; a dropped choice adds nothing, and the weights of the others stay as"
    for wrong in (over_kept, torch.where(kept, want, 0.0)):
        yield "weights after drops", wrong, f"{text} they were"


def _wrongly_kept(case: tuple[int, int, int, int]) -> Iterator[tuple[str, Tensor, str]]:
    """Known mistakes in who stays: what they give, and what to say."""
    tokens, num_experts, top_k, capacity = case
    experts, _, kept, _ = right_routing(case)
    by_choice = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    by_token = kept_in_turn(sorted(by_choice), experts, capacity)
    most = int(torch.bincount(experts.flatten()).max())
    text = f"an expert keeps {most} choices; its capacity is {capacity}, and memory was set aside for no more"
    yield "capacity ignored", torch.ones_like(kept), text
    text = "a second choice of an early token takes the place of a later token's first choice; place all first choices,"
    yield "by token", by_token, f"{text} then all second ones (experts.T)"
    later_first = sorted(by_choice, key=lambda one: (one[1], -one[0]))
    text = "among equals the later token is kept; the earlier one comes first"
    yield "later first", kept_in_turn(later_first, experts, capacity), text
    yield "turned round", ~kept, "kept is true where a choice is dropped; it says who stays"
    text = "kept has the right values at the wrong places: they are in the order of experts.T; make them [K, T], then"
    yield "not transposed", kept.T.reshape(tokens, top_k), f"{text} transpose"
    text = "places were counted token by token and read choice by choice, so that kept belongs to other choices; take"
    yield "orders mixed", by_token.reshape(top_k, tokens).T, f"{text} experts.T before you count"
    text = "a token is dropped with all its choices where one finds no room; its other choice stays, if that expert has"
    yield "whole token dropped", kept.all(-1, keepdim=True).expand_as(kept), f"{text} room"
    chosen = probabilities_of(tokens, num_experts).gather(1, experts)
    surest = sorted(by_choice, key=lambda one: -float(chosen[one]))
    text = "the most probable choices find room, wherever their tokens stand; asked for was the order of choices, and"
    yield "by probability", kept_in_turn(surest, experts, capacity), f"{text} among equals the earlier token first"
    apart = [kept_in_turn([(token, choice) for token in range(tokens)], experts, capacity) for choice in range(top_k)]
    text = f"an expert keeps {capacity} first choices and {capacity} second ones; its capacity is for all choices"
    together = torch.stack([one[:, choice] for choice, one in enumerate(apart)], 1)
    yield "capacity per choice", together, f"{text} together: go on counting"
    for off, words in ((-1, "one fewer"), (1, "one more")):
        text = f"an expert keeps {words} than its capacity: places count from 0 with <, or from 1 with <="
        yield "off by one", kept_in_turn(by_choice, experts, capacity + off), text


def _count_fault(got: Any, kept: Tensor, dropped: int, what: str) -> Fault | None:
    if type(got) is int and got == dropped:
        return None
    if isinstance(got, Tensor) and same(got, torch.tensor(dropped)):
        return Fault("count is a tensor", f"{what}: dropped is right, but a tensor; make it a number: int(...)")
    number = int(got) if isinstance(got, int) or (isinstance(got, Tensor) and got.numel() == 1) else -1
    if number == int(kept.sum()):
        text = f"{what}: {number} choices are kept; the last result is how many are dropped ({dropped})"
        return Fault("kept counted", text)
    if number == 0:
        text = f"{what}: {dropped} choices are dropped, and the count says 0: a user would not see that tokens are lost"
        return Fault("drops uncounted", text)
    if number == int((~kept.any(-1)).sum()):
        text = f"{what}: {number} is the number of tokens that lost all their choices; count choices ({dropped})"
        return Fault("tokens counted", text)
    return compare(got, dropped, f"{what}: dropped", 1)


def budget_route(evidence: Evidence) -> list[str]:
    """Say what was dropped."""
    tokens, num_experts, top_k, capacity = ROUTE_CASES[0]
    dropped = right_routing(ROUTE_CASES[0])[3]
    return [
        f"{tokens} tokens x {top_k} choices, {num_experts} experts of capacity {capacity}: {dropped} choices dropped"
    ]


def true_loss(case: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the loss of a case, and its gradient."""
    tokens, num_experts, top_k = case
    probabilities = probabilities_of(tokens, num_experts).float().requires_grad_()
    fraction = fractions_of(probabilities.detach(), top_k)
    loss = num_experts * (fraction * probabilities.mean(0)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert probabilities.grad is not None, "it took part"
    return loss.detach(), probabilities.grad


def fractions_of(probabilities: Tensor, top_k: int) -> Tensor:
    """Return the part of all choices that fell on each expert."""
    experts = probabilities.topk(top_k, dim=-1).indices
    counts = torch.bincount(experts.flatten(), minlength=probabilities.shape[1])
    return counts.to(probabilities.dtype) / counts.sum()


def judge_balance(evidence: Evidence) -> Iterator[Fault]:
    """The value, and a gradient that flows through the probabilities alone."""
    for case, result in zip(BALANCE_CASES, evidence.results[0], strict=True):
        what = f"{case[0]} tokens, {case[1]} experts, top {case[2]}"
        want, gradient = true_loss(case)
        if fault := compare(result["got"], want, f"{what}: the loss", 1):
            yield known_mistake(result["got"], want, _wrong_losses(case), f"{what}: the loss") or fault
        if result["wide"] not in ("", "torch.float64"):
            text = f"{what}: the loss of float64 probabilities is {result['wide']}"
            yield Fault("dtype", f"{text}, expected torch.float64: take the dtype from the argument")
        if result["gradient"] is None:
            text = f"{what}: right number, but no gradient reaches the probabilities"
            yield Fault("no gradient", f"{text}: the loss would change nothing")
        yield from found(compare(result["gradient"], gradient, f"{what}: the gradient of the probabilities", 1))


def _wrong_losses(case: tuple[int, int, int]) -> Iterator[tuple[str, Tensor, str]]:
    """Known mistakes: what they give, and what to say."""
    tokens, num_experts, top_k = case
    probabilities = probabilities_of(tokens, num_experts).float()
    mean, fraction = probabilities.mean(0), fractions_of(probabilities, top_k)
    chosen = probabilities.topk(top_k, dim=-1)
    sparse = torch.zeros_like(probabilities).scatter(1, chosen.indices, chosen.values).mean(0)
    text = "takes f from probabilities too; f counts who was really chosen, which is what takes time"
    yield "probabilities twice", mean @ mean * num_experts, text
    yield "not times E", fraction @ mean, "lacks the factor E: it should be 1 where experts are asked evenly"
    text = f"divides counts by tokens; there are {top_k} choices per token, and even is {top_k} then, not 1"
    yield "not over choices", num_experts * top_k * fraction @ mean, text
    text = "counts first choices alone; a second choice is as much work"
    yield "first choices alone", num_experts * fractions_of(probabilities, 1) @ mean, text
    text = "takes the mean of chosen probabilities; P is over all tokens, also those that chose others"
    yield "chosen alone", num_experts * fraction @ sparse, text
    text = "leaves out experts that no token asked: torch.bincount needs minlength, and E counts all of them"
    yield "unasked forgotten", (int(chosen.indices.max()) + 1) * fraction @ mean, text
    text = "puts probabilities through a softmax; they come from a softmax already, and a second evens them out"
    yield "softmax twice", num_experts * fraction @ probabilities.softmax(-1).mean(0), text
    text = "sums probabilities over tokens; P is their mean"
    yield "sum over tokens", tokens * num_experts * fraction @ mean, text


def budget_balance(evidence: Evidence) -> list[str]:
    """Say what the cases give."""
    return [f"{case[1]} experts, top {case[2]}: {float(true_loss(case)[0]):.3f}" for case in BALANCE_CASES]


_KEPT = "kept = (place <= capacity).view(top_k, -1).T"

WRONG_ROUTES = (
    Mutant("by token", "by token", "takes the place of a later token's first", 1)
    .edit("experts.T.reshape", "experts.reshape")
    .edit(".view(top_k, -1).T", ".view(-1, top_k)"),
    Mutant("each choice", "capacity per choice", "all choices together", 1)
    .edit("F.one_hot(wanted, probabilities.shape[1])", "F.one_hot(experts, probabilities.shape[1])")
    .edit("gather(1, wanted[:, None])[:, 0]", "gather(2, experts[..., None])[..., 0]")
    .without(".view(top_k, -1).T"),
    Mutant("off by one", "off by one", "one more than its capacity", 1).edit(
        "place <= capacity", "place - 1 <= capacity"
    ),
    Mutant("unlimited", "capacity ignored", "its capacity is 3", 1).edit("place <= capacity", "place > 0"),
    Mutant("silent", "drops uncounted", "a user would not see", 1).edit("int((~kept).sum())", "0"),
    Mutant("tokens", "tokens counted", "count choices", 1).edit("(~kept)", "(~kept.any(-1))"),
    Mutant("not normalised", "not normalised", "divide by the sum", 1).edit("if top_k > 1:", "if False:"),
    Mutant("one normalised", "one choice normalised", "leave the probability", 1).edit("if top_k > 1:", "if True:"),
    Mutant("softmax", "softmax twice", "went through a softmax already", 1).edit(
        "weights / weights.sum(dim=-1, keepdim=True)", "weights.softmax(-1)"
    ),
    Mutant("by probability", "by probability", "earlier token first", 1)
    .edit("asked = F", "order = probabilities.gather(1, experts).T.reshape(-1).argsort(descending=True)\nasked = F")
    .edit("one_hot(wanted", "one_hot(wanted[order]")
    .edit("gather(1, wanted[:, None])[:, 0]", "gather(1, wanted[order][:, None])[order.argsort(), 0]"),
    Mutant("whole tokens", "whole token dropped", "its other choice stays", 1).edit(
        _KEPT, f"{_KEPT}.all(-1, keepdim=True).expand_as(experts)"
    ),
    Mutant("mixed up", "orders mixed", "token by token", 1).edit("experts.T.reshape", "experts.reshape"),
    Mutant("after drops", "weights after drops", "stay as they were", 1).edit(
        _KEPT, f"{_KEPT}\nweights = weights * kept\nweights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)"
    ),
    Mutant("detached", "no gradient", "the router would learn nothing", 1).edit(
        "probabilities.topk", "probabilities.detach().topk"
    ),
)
WRONG_LOSSES = (
    Mutant("probabilities", "probabilities twice", "really chosen", 1).edit(
        "fraction @", "probabilities.mean(dim=0) @"
    ),
    Mutant("no E", "not times E", "lacks the factor E", 1).without("num_experts * "),
    Mutant("over tokens", "not over choices", "2 choices per token", 1).edit("counts.sum()", "len(experts)"),
    Mutant("first choices", "first choices alone", "as much work", 1).edit("experts.flatten()", "experts[:, 0]"),
    Mutant("softmax", "softmax twice", "a softmax already", 1).edit(
        "probabilities.mean", "probabilities.softmax(-1).mean"
    ),
    Mutant("chosen", "chosen alone", "also those that chose others", 1).edit(
        "probabilities.mean",
        "torch.zeros_like(probabilities).scatter(1, experts, probabilities.gather(1, experts)).mean",
    ),
    Mutant("asked alone", "unasked forgotten", "needs minlength", 1)
    .edit(", minlength=num_experts)", ")\nnum_experts = len(counts)")
    .edit("mean(dim=0)", "mean(dim=0)[:num_experts]"),
    Mutant("detached", "no gradient", "the loss would change nothing", 1).edit(
        "probabilities.mean", "probabilities.detach().mean"
    ),
)
