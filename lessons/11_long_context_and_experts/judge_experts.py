"""Name what is wrong with a routing and with a balance loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_11 import cases
from distlab_lesson_11.judge_attention import same
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import compare, describe


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
    chosen, experts = cases.probabilities_of(tokens, num_experts).topk(top_k, dim=-1)
    weights = chosen / chosen.sum(-1, keepdim=True) if top_k > 1 else chosen
    by_choice = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    kept = kept_in_turn(by_choice, experts, capacity)
    return experts, weights, kept, int((~kept).sum())


def judge_route(evidence: Evidence) -> Iterator[Fault]:
    """Right experts, weights, kept choices and count of dropped ones; gradients through the weights."""
    for case, result in zip(cases.ROUTE_CASES, evidence.results[0], strict=True):
        tokens, num_experts, top_k, capacity = case
        what = f"{tokens} tokens, {num_experts} experts, top {top_k}, capacity {capacity}"
        got = result["got"]
        if not isinstance(got, list) or len(got) != 4:
            yield Fault("returned", f"{what}: expected (experts, weights, kept, dropped), got {describe(got)}")
            return
        want = right_routing(case)
        fault = compare(got[0], want[0], f"{what}: experts", 1)
        fault = fault or _weights_fault(got[1], case, what) or _kept_fault(got, case, what)
        if fault is None and not result["graded"]:
            text = f"{what}: weights do not require grad: the router would learn nothing from the task"
            fault = Fault("no gradient", f"{text}; they are probabilities, so leave them in the graph")
        if fault is not None:
            yield fault
            return


def _weights_fault(got: Any, case: tuple[int, int, int, int], what: str) -> Fault | None:
    _, want, kept, _ = right_routing(case)
    fault = compare(got, want, f"{what}: weights", 1)
    if fault is None:
        return None
    chosen = cases.probabilities_of(*case[:2]).topk(case[2], dim=-1).values
    over_kept = torch.where(kept, chosen, 0.0)
    over_kept = over_kept / over_kept.sum(-1, keepdim=True).clamp(min=1e-300)
    if case[2] == 1 and same(got, torch.ones_like(chosen)):
        text = f"{what}: a single choice's weight is always 1 when it is divided by itself, and the router has no"
        return Fault("one choice normalised", f"{text} gradient; leave the probability as it is")
    if same(got, chosen):
        text = f"{what}: a token's weights sum to {float(chosen[0].sum()):.2f}; divide by the sum of its chosen"
        return Fault("not normalised", f"{text} probabilities")
    if case[2] > 1 and same(got, chosen.softmax(-1)):
        text = f"{what}: a softmax of the chosen probabilities, which went through a softmax already: it evens them out"
        return Fault("softmax twice", f"{text}; divide by their sum")
    if same(got, over_kept) or same(got, torch.where(kept, want, 0.0)):
        text = f"{what}: weights depend on what was dropped; a dropped choice adds nothing, and the weights of the"
        return Fault("weights after drops", f"{text} others stay as they were")
    return fault


def _kept_fault(got: list[Any], case: tuple[int, int, int, int], what: str) -> Fault | None:
    tokens, _, top_k, capacity = case
    experts, _, kept, dropped = right_routing(case)
    fault = compare(got[2], kept, f"{what}: kept", 1)
    if fault is not None:
        orders = {
            "by token": [(token, choice) for token in range(tokens) for choice in range(top_k)],
            "later first": [(token, choice) for choice in range(top_k) for token in reversed(range(tokens))],
        }
        if same(got[2], torch.ones_like(kept)):
            most = int(torch.bincount(experts.flatten()).max())
            text = f"{what}: an expert keeps {most} choices; its capacity is {capacity}, and memory was set aside for"
            return Fault("capacity ignored", f"{text} no more")
        if same(got[2], kept_in_turn(orders["by token"], experts, capacity)):
            text = f"{what}: a second choice of an early token takes the place of a later token's first choice"
            return Fault("by token", f"{text}; place all first choices, then all second ones (experts.T)")
        if same(got[2], kept_in_turn(orders["later first"], experts, capacity)):
            return Fault("later first", f"{what}: among equals the later token is kept; the earlier one comes first")
        if (slip := _kept_slip(got[2], case, what)) is not None:
            return slip
        by_choice = [(token, choice) for choice in range(top_k) for token in range(tokens)]
        for off, words in ((-1, "one fewer"), (1, "one more")):
            if same(got[2], kept_in_turn(by_choice, experts, capacity + off)):
                text = f"{what}: an expert keeps {words} than its capacity: places count from"
                return Fault("off by one", f"{text} 0 with <, or from 1 with <=")
        return fault
    if type(got[3]) is int and got[3] == dropped:
        return None
    if isinstance(got[3], Tensor) and same(got[3], torch.tensor(dropped)):
        return Fault("count is a tensor", f"{what}: dropped is right, but a tensor; make it a number: int(...)")
    if isinstance(got[3], Tensor) and got[3].numel() != 1:
        return compare(got[3], dropped, f"{what}: dropped", 1)
    if isinstance(got[3], int | Tensor) and int(got[3]) == int(kept.sum()):
        text = f"{what}: {int(kept.sum())} choices are kept; the last result is how many are dropped ({dropped})"
        return Fault("kept counted", text)
    if isinstance(got[3], int | Tensor) and int(got[3]) == 0:
        text = f"{what}: {dropped} choices are dropped, and the count says 0: nobody would hear that tokens are lost"
        return Fault("drops uncounted", text)
    lost = int((~kept.any(-1)).sum())
    if isinstance(got[3], int) and got[3] == lost:
        text = f"{what}: {lost} is the number of tokens that lost all their choices; count choices ({dropped})"
        return Fault("tokens counted", text)
    return compare(got[3], dropped, f"{what}: dropped", 1)


def _kept_slip(got: Any, case: tuple[int, int, int, int], what: str) -> Fault | None:
    """Name a choice of who stays that follows another rule than the one asked for."""
    tokens, _, top_k, capacity = case
    experts, _, kept, _ = right_routing(case)
    if same(got, ~kept):
        return Fault("turned round", f"{what}: kept is true where a choice is dropped; it says who stays")
    if same(got, kept.T.reshape(tokens, top_k)):
        text = f"{what}: kept has the right values at the wrong places: they are in the order of experts.T;"
        return Fault("not transposed", f"{text} make them [K, T], then transpose")
    by_choice = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    by_token = kept_in_turn([(token, choice) for token in range(tokens) for choice in range(top_k)], experts, capacity)
    if same(got, by_token.reshape(top_k, tokens).T):
        text = f"{what}: places were counted token by token and read choice by choice, so that kept belongs to other"
        return Fault("orders mixed", f"{text} choices; take experts.T before you count")
    if same(got, kept.all(-1, keepdim=True).expand_as(kept)):
        text = f"{what}: a token is dropped with all its choices where one finds no room"
        return Fault("whole token dropped", f"{text}; its other choice stays, if that expert has room")
    chosen = cases.probabilities_of(*case[:2]).gather(1, experts)
    surest = sorted(by_choice, key=lambda one: -float(chosen[one]))
    if same(got, kept_in_turn(surest, experts, capacity)):
        text = f"{what}: the most probable choices find room, wherever their tokens stand; asked for was the order of"
        return Fault("by probability", f"{text} choices, and among equals the earlier token first")
    apart = [kept_in_turn([(token, choice) for token in range(tokens)], experts, capacity) for choice in range(top_k)]
    if same(got, torch.stack([one[:, choice] for choice, one in enumerate(apart)], 1)):
        text = f"{what}: an expert keeps {capacity} first choices and {capacity} second ones"
        return Fault("capacity a choice", f"{text}; its capacity is for all choices together: go on counting")
    return None


def budget_route(evidence: Evidence) -> list[str]:
    """Say what was dropped."""
    case = cases.ROUTE_CASES[0]
    dropped = right_routing(case)[3]
    return [f"{case[0]} tokens x {case[2]} choices, {case[1]} experts of capacity {case[3]}: {dropped} choices dropped"]


def true_loss(case: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the loss of a case, and its gradient."""
    tokens, num_experts, top_k = case
    probabilities = cases.probabilities_of(tokens, num_experts).float().requires_grad_()
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
    for case, result in zip(cases.BALANCE_CASES, evidence.results[0], strict=True):
        what = f"{case[0]} tokens, {case[1]} experts, top {case[2]}"
        want, gradient = true_loss(case)
        got = result["got"]
        fault = compare(got, want, f"{what}: the loss", 1)
        if fault is not None:
            yield _loss_slip(got, case, what) or fault
            return
        if result["gradient"] is None:
            text = f"{what}: right number, but no gradient reaches the probabilities"
            yield Fault("no gradient", f"{text}: the loss would change nothing")
            return
        fault = compare(result["gradient"], gradient, f"{what}: the gradient of the probabilities", 1)
        if fault is not None:
            yield fault
            return


def _loss_slip(got: Any, case: tuple[int, int, int], what: str) -> Fault | None:
    tokens, num_experts, top_k = case
    probabilities = cases.probabilities_of(tokens, num_experts).float()
    mean, fraction = probabilities.mean(0), fractions_of(probabilities, top_k)
    chosen = probabilities.topk(top_k, dim=-1)
    sparse = torch.zeros_like(probabilities).scatter(1, chosen.indices, chosen.values).mean(0)
    words = {
        "probabilities twice": (
            mean @ mean * num_experts,
            "takes f from probabilities too; f counts who was really chosen, which is what takes time",
        ),
        "not times E": (fraction @ mean, "lacks the factor E: it should be 1 where experts are asked evenly"),
        "not over choices": (
            num_experts * top_k * fraction @ mean,
            f"divides counts by tokens; there are {top_k} choices a token, and even is {top_k} then, not 1",
        ),
        "first choices alone": (
            num_experts * fractions_of(probabilities, 1) @ mean,
            "counts first choices alone; a second choice is as much work",
        ),
        "chosen alone": (
            num_experts * fraction @ sparse,
            "takes the mean of chosen probabilities; P is over all tokens, also those that chose others",
        ),
        "unasked forgotten": (
            (int(chosen.indices.max()) + 1) * fraction @ mean,
            "leaves out experts that nobody asked: torch.bincount needs minlength, and E counts all of them",
        ),
        "softmax twice": (
            num_experts * fraction @ probabilities.softmax(-1).mean(0),
            "puts probabilities through a softmax; they come from a softmax already, and a second evens them out",
        ),
        "sum over tokens": (tokens * num_experts * fraction @ mean, "sums probabilities over tokens; P is their mean"),
    }
    for code, (wrong, text) in words.items():
        if isinstance(got, Tensor) and got.shape == wrong.shape and same(got, wrong):
            return Fault(code, f"{what}: the loss {text}")
    return None


def budget_balance(evidence: Evidence) -> list[str]:
    """Say what the cases give."""
    return [f"{case[1]} experts, top {case[2]}: {float(true_loss(case)[0]):.3f}" for case in cases.BALANCE_CASES]
