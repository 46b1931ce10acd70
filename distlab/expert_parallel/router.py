"""Which experts a token asks, with which weights, and a loss that keeps the load even.

Shapes: T tokens, H hidden size, E experts, K choices per token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Routing(NamedTuple):
    """What each token chose.

    Attributes:
        experts: their numbers, the most probable first [T, K].
        weights: of the experts' outputs in the sum [T, K].
        probabilities: of all experts [T, E].
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """Choose each token's `top_k` experts by a linear layer and a softmax.

    The weights of a token's choices are their probabilities, made to sum to 1 where there are several. With one choice
    the probability stays as it is: normalised it would always be 1, and the router would learn nothing from the task.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: experts that a token asks.
        normalise: whether a token's weights sum to 1; None: where there are several choices.
        capacity_factor: an expert takes at most this many times its even share of one rank's tokens (see `assign`);
            None: no limit, and no token is dropped.

    Raises:
        ValueError: sizes below 1, more choices than experts, one normalised choice, or a factor that is not positive.

    Source: Shazeer et al. 2017, section 2.1 (without noise); Fedus et al. 2021 (Switch), eq. 1 and 2, for one choice;
    weights over the chosen alone as Jiang et al. 2024 (Mixtral), section 2.1. The softmax is taken in float32 at least
    (Switch, section 2.4).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int = 2,
        normalise: bool | None = None,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts), ("top_k", top_k)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Router: {name} is {value!r}; pass a whole number of at least 1")
        if top_k > num_experts:
            raise ValueError(
                f"Router: a token cannot ask {top_k} of {num_experts} experts; pass top_k <= {num_experts}"
            )
        if normalise and top_k == 1:
            raise ValueError(
                "Router: one normalised choice has weight 1, from which none learns; pass normalise=False or top_k 2"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"Router: capacity_factor is {capacity_factor!r}; pass a positive number, or None")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.normalise = top_k > 1 if normalise is None else normalise
        self.capacity_factor = capacity_factor
        self.scores = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        """Route tokens.

        Shapes: x [T, H] -> experts [T, K], weights [T, K], probabilities [T, E]
        """
        scores = self.scores(x)
        probabilities = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(experts, weights, probabilities)

    def settings(self) -> dict[str, object]:
        """Return what must be the same on all ranks."""
        return {
            "hidden_size": self.hidden_size,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "normalise": self.normalise,
            "capacity_factor": self.capacity_factor,
            "dtype": str(self.scores.weight.dtype),
        }

    def extra_repr(self) -> str:
        """Show top_k, normalise and capacity_factor."""
        return f"top_k={self.top_k}, normalise={self.normalise}, capacity_factor={self.capacity_factor}"


def load_sums(routing: Routing) -> Tensor:
    """Return the sums that `switch_loss` needs; those of several ranks add up.

    Shapes: -> [2E + 1]: probabilities summed over tokens [E], choices of each expert [E], tokens [1]; float64
    """
    num_tokens, num_experts = routing.probabilities.shape
    chosen = torch.bincount(routing.experts.flatten(), minlength=num_experts)
    return torch.cat(
        [routing.probabilities.double().sum(dim=0), chosen.double(), chosen.new_tensor([num_tokens]).double()]
    )


def switch_loss(sums: Tensor) -> Tensor:
    """Return the load-balancing loss E sum_e f_e P_e: 1 when experts are asked evenly, E when one is asked alone.

    f_e is the part of all choices that fell on expert e, capacity not yet considered, and P_e the mean probability of
    e. Counts have no gradient: it flows through P, and lowers the probability of those who are asked too often.
    A step's loss adds some 0.01 times this. No tokens give 0.

    Shapes: sums [2E + 1], of `load_sums`, possibly summed over ranks -> []
    Error: the mean of ranks' own losses is a different number than the loss of their sums: each rank would have to be
        balanced in itself.

    Source: Fedus et al. 2021 (Switch), eq. 4 to 6. With K choices f is divided by K as well, so that even is 1 for any
    K (some libraries do not divide, and have K there).
    """
    num_experts = (len(sums) - 1) // 2
    counts = sums.detach()[num_experts:]  # choices of each expert, then tokens
    fraction = counts[:-1] / counts[:-1].sum().clamp(min=1)
    return num_experts * fraction.dot(sums[:num_experts]) / counts[-1].clamp(min=1)
