"""Whole models: give a GPT experts, spread them over ranks, and collect the balance loss of all layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.models import GPT, Block, FeedForward
from distlab.expert_parallel.layer import ExpertParallel, broadcast_state
from distlab.expert_parallel.plain import MixtureOfExperts
from distlab.expert_parallel.router import Router


def mix_experts(
    model: GPT,
    num_experts: int,
    generator: torch.Generator | None = None,
    *,
    top_k: int = 2,
    capacity_factor: float | None = None,
) -> GPT:
    """Replace the feed-forward layer of every block by a mixture of new experts.

    Weights are drawn as the model's own; the router's too.

    Returns:
        The model itself, changed.

    Raises:
        ValueError: as `Router`.
    """
    like = next(model.parameters())
    for index, block in enumerate(cast(Iterable[Block], model.blocks)):
        router = Router(model.config.hidden_size, num_experts, top_k=top_k, capacity_factor=capacity_factor)
        mixture = MixtureOfExperts(router, [FeedForward(model.config) for _ in range(num_experts)])
        for name, parameter in mixture.named_parameters():
            model.draw_weight(f"blocks.{index}.feed_forward.{name}", parameter, generator)
        block.feed_forward = mixture.to(like.device, like.dtype)  # type: ignore[assignment]
    return model


def expert_parallel(
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    balance_over: Literal["group", "rank"] | ProcessGroup = "group",
) -> nn.Module:
    """Spread the experts of every `MixtureOfExperts` in a model over a group; all values are those of its first rank.

    Everything but the experts stays whole on every rank; after backward call `reduce_gradients`.

    Returns:
        The model itself, changed.

    Raises:
        ValueError: on every rank: ranks' models differ, or there is no mixture in them.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]
    if not names or "" in names:
        raise ValueError(
            "expert_parallel: the model holds no MixtureOfExperts; call mix_experts, or from_full on a layer. "
            "In a model of your own put MixtureOfExperts(router, experts) in the place of its mixture"
        )
    broadcast_state(model, group, what="the models given to expert_parallel")
    for name in names:
        full = cast(MixtureOfExperts, model.get_submodule(name))
        parent, _, last = name.rpartition(".")
        layer = ExpertParallel.from_equal(full, group, balance_over=balance_over)
        setattr(model.get_submodule(parent), last, layer)
    return model


def balance_loss(model: nn.Module) -> Tensor:
    """Return the mean over layers of the last forward pass's balance losses: 1 where all experts are asked evenly.

    Shapes: -> []

    Raises:
        ValueError: no layer has one: no mixture, no forward pass yet, or not in training.
    """
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts | ExpertParallel)]
    losses = [layer.balance_loss for layer in layers if layer.balance_loss is not None]
    if not losses or len(losses) != len(layers):
        raise ValueError(
            f"{len(losses)} of {len(layers)} mixtures have a balance loss; run a forward pass in training mode first"
        )
    return torch.stack(losses).mean()
