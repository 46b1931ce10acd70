"""Backward passes in two halves that are wrong, or have all the work in one half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_now(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Compute everything at once, and hand the rest out later."""
    found = []
    for k in reversed(range(len(weights))):
        grad = grad * (1 - activations[k + 1].square())
        found.append(activations[k].T @ grad)
        grad = grad @ weights[k].T
    return grad, lambda: found[::-1]


def _chain(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    inner = []
    for k in reversed(range(len(weights))):
        grad = grad * (1 - activations[k + 1].square())
        inner.append(grad)
        grad = grad @ weights[k].T
    return grad, inner


def split_twice(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Go through the chain again for the weights."""

    def weight_gradients() -> list[Tensor]:
        inner = _chain(weights, activations, grad)[1]
        return [x.T @ one for x, one in zip(activations, reversed(inner), strict=False)]

    return _chain(weights, activations, grad)[0], weight_gradients


def split_reversed(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Return gradients in backward's order."""
    got, inner = _chain(weights, activations, grad)
    return got, lambda: [x.T @ one for x, one in zip(activations, reversed(inner), strict=False)][::-1]


def split_without_tanh(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Treat layers as linear."""
    flat = [torch.zeros_like(x) for x in activations]
    got, inner = _chain(weights, flat, grad)
    return got, lambda: [x.T @ one for x, one in zip(activations, reversed(inner), strict=False)]


def split_last_grad(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Keep the inputs alone: every layer gets the gradient of the last."""
    got, inner = _chain(weights, activations, grad)
    return got, lambda: [x.T @ inner[0] for x in activations[:-1]]


def split_one_now(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Defer all layers but the last."""
    got, inner = _chain(weights, activations, grad)
    last = activations[-2].T @ inner[0]
    return got, lambda: [*(x.T @ one for x, one in zip(activations, inner[:0:-1], strict=False)), last]


def split_loop_variable(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Make a function a layer, all of which see the loop's last values."""
    got, inner = _chain(weights, activations, grad)
    later = []
    for x, one in zip(reversed(activations[:-1]), inner, strict=True):
        later.append(lambda: x.T @ one)  # noqa: B023 (that is the fault)
    return got, lambda: [multiply() for multiply in later]


def split_before_tanh(weights: list[Tensor], activations: list[Tensor], grad: Tensor) -> tuple[Tensor, Any]:
    """Keep each gradient before it goes through tanh."""
    outer = []
    for k in reversed(range(len(weights))):
        outer.append(grad)
        grad = grad * (1 - activations[k + 1].square()) @ weights[k].T
    return grad, lambda: [x.T @ one for x, one in zip(activations, reversed(outer), strict=False)]
