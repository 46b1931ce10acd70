"""Wrong versions of a routing: who is chosen, with what weight, and who finds room."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Routed = tuple[Tensor, Tensor, Tensor, int]


def routed(probabilities: Tensor, top_k: int, capacity: int, *, by_token: bool = False, first: int = 1) -> Routed:
    """Route as asked; by_token and first spoil it."""
    weights, experts = probabilities.topk(top_k, dim=-1)
    if top_k > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    wanted = experts.reshape(-1) if by_token else experts.T.reshape(-1)
    places = F.one_hot(wanted, probabilities.shape[1]).cumsum(0).gather(1, wanted[:, None])[:, 0] - 1 + first
    kept = places <= capacity
    kept = kept.view(-1, top_k) if by_token else kept.view(top_k, -1).T
    return experts, weights, kept, int((~kept).sum())


def route_by_token(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Place both choices of a token before the next token's."""
    return routed(probabilities, top_k, capacity, by_token=True)


def route_off_by_one(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Count places from 0, and compare with <=."""
    return routed(probabilities, top_k, capacity, first=0)


def route_unlimited(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Take everybody in."""
    experts, weights, kept, _ = routed(probabilities, top_k, capacity)
    return experts, weights, torch.ones_like(kept), 0


def route_silently(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Drop, and say nothing."""
    return *routed(probabilities, top_k, capacity)[:3], 0


def route_counting_tokens(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Count tokens that lost everything."""
    experts, weights, kept, _ = routed(probabilities, top_k, capacity)
    return experts, weights, kept, int((~kept.any(-1)).sum())


def route_unnormalised(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Leave the probabilities of several choices as they are."""
    experts, _, kept, dropped = routed(probabilities, top_k, capacity)
    return experts, probabilities.gather(1, experts), kept, dropped


def route_normalising_one(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Divide a single choice by itself."""
    experts, weights, kept, dropped = routed(probabilities, top_k, capacity)
    return experts, weights / weights.sum(-1, keepdim=True), kept, dropped


def route_after_drops(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Give a dropped choice's weight to the others."""
    experts, weights, kept, dropped = routed(probabilities, top_k, capacity)
    left = weights * kept
    return experts, left / left.sum(-1, keepdim=True).clamp(min=1e-300) if top_k > 1 else left, kept, dropped


def route_each_choice(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Count first and second choices apart."""
    experts, weights, _, _ = routed(probabilities, top_k, capacity)
    asked = F.one_hot(experts, probabilities.shape[1])  # [T, K, E]
    kept = asked.cumsum(0).gather(2, experts[..., None])[..., 0] <= capacity
    return experts, weights, kept, int((~kept).sum())


def route_detached(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Route outside the graph."""
    return routed(probabilities.detach(), top_k, capacity)


def route_by_probability(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Let the surest choices have the room, wherever their tokens stand."""
    experts, weights, _, _ = routed(probabilities, top_k, capacity)
    wanted = experts.T.reshape(-1)
    order = probabilities.gather(1, experts).T.reshape(-1).argsort(descending=True)
    asked = F.one_hot(wanted[order], probabilities.shape[1]).cumsum(0)
    places = torch.empty_like(wanted)
    places[order] = asked.gather(1, wanted[order][:, None])[:, 0]
    kept = (places <= capacity).view(top_k, -1).T
    return experts, weights, kept, int((~kept).sum())


def route_whole_tokens(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Drop a token altogether where one of its choices finds no room."""
    experts, weights, kept, _ = routed(probabilities, top_k, capacity)
    kept = kept.all(-1, keepdim=True).expand_as(kept)
    return experts, weights, kept, int((~kept).sum())


def route_mixed_up(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Count token by token, and read the places as if they came choice by choice."""
    experts, weights, kept, dropped = routed(probabilities, top_k, capacity, by_token=True)
    return experts, weights, kept.reshape(top_k, -1).T, dropped


def route_with_softmax(probabilities: Tensor, top_k: int, capacity: int) -> Routed:
    """Normalise chosen probabilities by a softmax, as if they were scores."""
    experts, _, kept, dropped = routed(probabilities, top_k, capacity)
    return experts, probabilities.gather(1, experts).softmax(-1), kept, dropped
