"""Turn choices into rows for experts: who comes first, and whom an expert's capacity turns away."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.expert_parallel.router import Routing


class Assignment(NamedTuple):
    """One rank's choices that are kept, sorted by expert; R of them.

    Attributes:
        tokens: whose choice a row is [R].
        slots: which of the T K choices a row is, counted along `routing.weights.T` [R].
        counts: rows of each expert; they sum to R.
        choices: what tokens asked for, capacity not considered.
        dropped_tokens: tokens of which no choice was kept.
    """

    tokens: Tensor
    slots: Tensor
    counts: tuple[int, ...]
    choices: tuple[int, ...]
    dropped_tokens: int


def capacity_of(num_tokens: int, num_experts: int, *, top_k: int, factor: float | None) -> int:
    """Return how many of one rank's rows an expert takes: `factor` times an even share, rounded up.

    Source: Fedus et al. 2021 (Switch), eq. 3; with K choices as Lepikhin et al. 2020 (GShard), section 2.2.
    """
    if factor is None:
        return num_tokens  # a token asks an expert once
    return min(num_tokens, math.ceil(factor * top_k * num_tokens / num_experts))


def assign(routing: Routing, capacity_factor: float | None = None) -> Assignment:
    """Sort choices by expert, and drop those beyond an expert's capacity.

    The rule: all first choices come before all second ones, and among equals the earlier token. A choice that an expert
    has no room for is dropped: it adds nothing to the token's output, and the weights of its other choices stay as they
    were. A token that loses all its choices has the output 0; the residual connection around the layer carries it on.

    Capacity counts one rank's tokens. So no rank waits to hear who else came, and each expert gets from each rank at
    most that rank's capacity; one process with all tokens would drop others.

    Source: Lepikhin et al. 2020 (GShard), algorithm 1: local groups, first choices first (there a second choice is
    taken with a probability).
    """
    num_tokens, num_experts = routing.probabilities.shape
    top_k = routing.experts.shape[1]
    wanted = routing.experts.T.reshape(-1)  # [K T], first choices first
    slots = wanted.argsort(stable=True)
    chosen = torch.bincount(wanted, minlength=num_experts)
    choices = tuple(chosen.tolist())
    capacity = capacity_of(num_tokens, num_experts, top_k=top_k, factor=capacity_factor)
    if max(choices, default=0) <= capacity:
        return Assignment(slots % max(num_tokens, 1), slots, choices, choices, 0)
    begins = (chosen.cumsum(0) - chosen).repeat_interleave(chosen)  # where each row's expert begins
    place = torch.arange(len(slots), device=slots.device) - begins
    slots = slots[place < capacity]
    tokens = slots % num_tokens
    dropped = num_tokens - int(tokens.unique().numel())
    return Assignment(tokens, slots, tuple(min(count, capacity) for count in choices), choices, dropped)


def combine(outputs: Tensor, assignment: Assignment, routing: Routing) -> Tensor:
    """Sum the experts' outputs of each token, weighted; zero for a token whose choices were all dropped.

    Shapes: outputs [R, H] -> [T, H]
    Error: the additions of a token's K outputs are in the order of its experts' numbers.
    """
    weights = routing.weights.T.reshape(-1).index_select(0, assignment.slots).unsqueeze(1)  # [R, 1]
    total = torch.zeros(
        len(routing.weights), outputs.shape[1], dtype=torch.promote_types(weights.dtype, outputs.dtype),
        device=outputs.device,
    )  # fmt: skip
    return total.index_add(0, assignment.tokens, outputs * weights).to(outputs.dtype)
