"""A mixture of experts in one process: ask each token's experts, one expert after the other.

Each expert is a feed-forward layer of its own. A token passes through K of E, so the layer has E times the parameters
and K times the work of one. `ExpertParallel` spreads these experts over ranks; this is what it must be equal to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distlab.expert_parallel.assign import Assignment, assign, combine
from distlab.expert_parallel.router import Router, load_sums, switch_loss


class Load(NamedTuple):
    """How the last batch fell on the experts.

    Attributes:
        tokens: in the batch.
        choices: how many asked each expert.
        kept: how many of those each expert took.
        dropped_tokens: tokens of which no choice was kept.
    """

    tokens: int
    choices: tuple[int, ...]
    kept: tuple[int, ...]
    dropped_tokens: int

    @property
    def dropped_choices(self) -> int:
        """Choices that an expert had no room for."""
        return sum(self.choices) - sum(self.kept)

    @classmethod
    def of(cls, assignment: Assignment, tokens: int) -> Load:
        """Return the load of one assignment."""
        return cls(tokens, assignment.choices, assignment.counts, assignment.dropped_tokens)


class MixtureOfExperts(nn.Module):
    """All experts in one process.

    After a forward pass `load` says how tokens fell on experts, and in training `balance_loss` how unevenly: add some
    0.01 times it to the step's loss.

    Args:
        router: chooses.
        experts: modules that keep the shape [R, H]; each also runs where no token asked it (R = 0), so that its
            gradients are zeros, not None.

    Raises:
        ValueError: not as many experts as the router knows; in forward, a last dimension that is not the router's.
    """

    def __init__(self, router: Router, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(experts) != router.num_experts:
            raise ValueError(f"MixtureOfExperts: {len(experts)} experts, but the router knows {router.num_experts}")
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.load: Load | None = None
        self.balance_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Ask each token's experts and sum their weighted answers.

        Shapes: x [..., H] -> [..., H]
        """
        if x.shape[-1] != self.router.hidden_size:
            raise ValueError(f"MixtureOfExperts: expected [..., {self.router.hidden_size}], got {list(x.shape)}")
        tokens = x.reshape(-1, x.shape[-1])  # [T, H]
        routing = self.router(tokens)
        assignment = assign(routing, self.router.capacity_factor)
        rows = tokens.index_select(0, assignment.tokens)  # [R, H], sorted by expert
        parts = rows.split(list(assignment.counts))
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        self.load = Load.of(assignment, len(tokens))
        self.balance_loss = switch_loss(load_sums(routing)) if self.training else None
        return combine(outputs.to(x.dtype), assignment, routing).view(x.shape)
