"""Wrong versions of recomputing a block in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Block = Callable[[Tensor], Tensor]


def recompute_nothing(block: Block, x: Tensor) -> Tensor:
    """Call the block, and keep all."""
    return block(x)


def _recompute(
    block: Block,
    x: Tensor,
    *,
    record: bool = False,
    same_draw: bool = True,
    fork: bool = True,
    pass_on: bool = True,
    start: Callable[[Tensor], Tensor] = lambda gradient: gradient,
    anchored: bool = True,
) -> Tensor:
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.generator_state = torch.get_rng_state()
            if not record:
                return block(x)
            with torch.enable_grad():
                ctx.output = block(x.detach().requires_grad_())
            return ctx.output.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
            again = ctx.saved_tensors[0].detach().requires_grad_()
            forked: AbstractContextManager[Any] = torch.random.fork_rng(devices=[]) if fork else nullcontext()
            with torch.enable_grad(), forked:
                if same_draw:
                    torch.set_rng_state(ctx.generator_state)
                output = block(again)
            torch.autograd.backward(output, start(gradient))
            return again.grad if pass_on else None, None

    return Recompute.apply(x, torch.zeros((), requires_grad=anchored))


def recompute_and_keep(block: Block, x: Tensor) -> Tensor:
    """Run the block twice, and keep the first run's activations."""
    return _recompute(block, x, record=True)


def recompute_other_dropout(block: Block, x: Tensor) -> Tensor:
    """Draw new random numbers in the second run."""
    return _recompute(block, x, same_draw=False)


def recompute_moves_generator(block: Block, x: Tensor) -> Tensor:
    """Leave the generator where the second run left it."""
    return _recompute(block, x, fork=False)


def recompute_not_anchored(block: Block, x: Tensor) -> Tensor:
    """Rely on an input that needs a gradient."""
    return _recompute(block, x, anchored=False)


def recompute_x_alone(block: Block, x: Tensor) -> Tensor:
    """Ask for the gradient of the input alone."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.generator_state = torch.get_rng_state()
            return block(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            again = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.set_rng_state(ctx.generator_state)
                output = block(again)
            return torch.autograd.grad(output, again, gradient)[0], None

    return Recompute.apply(x, torch.zeros((), requires_grad=True))


def recompute_stops(block: Block, x: Tensor) -> Tensor:
    """Return no gradient of the input."""
    return _recompute(block, x, pass_on=False)


def recompute_from_ones(block: Block, x: Tensor) -> Tensor:
    """Start backward from ones."""
    return _recompute(block, x, start=torch.ones_like)
