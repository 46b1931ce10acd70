"""Matrix products in 8 bits: each operand gets a scale, is rounded, and the product is summed in float32.

Forward takes float8_e4m3fn for inputs and weights, backward float8_e5m2 for gradients, which reach further. Three ways
to find a scale:

- "tensor": from the largest magnitude of now. A pass over the tensor before the cast.
- "delayed": from the largest magnitude of the last steps: known before the tensor is. What grows past it saturates.
- "block": one for each 32 numbers along the sum (MX). An outlier spoils 32 numbers, not a tensor.

On the CPU values are those of 8 bits, and the product is float32's: it shows what training loses, not what it gains.
Embeddings, norms and the head stay as they are, as in published recipes.

Source: Micikevicius et al. 2022 (2209.05433); NVIDIA Transformer Engine's delayed scaling (the largest of a history).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.eight_bits import (
    E4M3,
    E5M2,
    agree_on_largest,
    block_scales,
    from_eight,
    largest_of,
    scale_of,
    to_eight,
)
from distlab.plan.require import chosen

SCALINGS = ("tensor", "delayed", "block")


class DelayedScale(nn.Module):
    """A scale from the largest magnitudes of the last uses.

    Attributes:
        history: [length] the newest last; zeros where there was none.
    """

    history: Tensor

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(length))

    def forward(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scale that history gives, the tensor's own at first; then note the tensor's largest magnitude.

        Shapes: any -> []
        """
        found, known = largest_of(tensor), torch.where(self.history.isfinite(), self.history, 0).max()
        self.history.copy_(torch.cat([self.history[1:], found[None]]))
        return scale_of(torch.where(known > 0, known, found), dtype)


class EightBitLinear(nn.Linear):
    """A linear layer whose three products are made of 8-bit numbers.

    Attributes:
        scaling: one of "tensor", "delayed", "block".

    Error: a number of e4m3 is within 1/16 of what it stands for, of e5m2 within 1/8, if it is not among the smallest.
    """

    def __init__(self, layer: nn.Linear, scaling: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scaling = layer.in_features, layer.out_features, scaling
        self.weight, self.bias = layer.weight, layer.bias
        self.scales = nn.ModuleList(DelayedScale() for _ in range(3 if scaling == "delayed" else 0))

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, and add the bias, which is not rounded."""
        flat = input.reshape(-1, self.in_features)
        made: Tensor = EightBitProduct.apply(flat, self.weight, self)  # type: ignore[no-untyped-call]
        rows = made.view(*input.shape[:-1], self.out_features)
        return rows if self.bias is None else rows + self.bias.to(rows.dtype)

    def rounded(self, operand: int, tensor: Tensor) -> Tensor:
        """Return an operand (0 input, 1 weight, 2 gradient) as 8 bits have it, with the sum along its last dim."""
        dtype = E5M2 if operand == 2 else E4M3
        if self.scaling == "block":
            scale = block_scales(tensor, dtype)
        else:
            scale = self.scales[operand](tensor, dtype) if self.scales else scale_of(largest_of(tensor), dtype)
        return from_eight(to_eight(tensor, dtype, scale), scale, tensor.dtype)


class EightBitProduct(torch.autograd.Function):
    """x [M, K] and w [N, K] -> x w^T [M, N]; both sums of backward run along other dims, so blocks are cut anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: EightBitLinear) -> Tensor:
        """Round both, and multiply."""
        x8, w8 = layer.rounded(0, x), layer.rounded(1, weight)
        ctx.layer = layer
        ctx.save_for_backward(*((x, weight) if layer.scaling == "block" else (x8, w8)))
        return x8 @ w8.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Round the gradient, and multiply with what forward had."""
        gradient, x, weight = (one.to(ctx.saved_tensors[1].dtype) for one in (gradient, *ctx.saved_tensors))  # autocast
        if ctx.layer.scaling != "block":
            g = ctx.layer.rounded(2, gradient)
            return g @ weight, g.T @ x, None
        of = ctx.layer.rounded
        return of(2, gradient) @ of(1, weight.T).T, of(2, gradient.T) @ of(0, x.T).T, None


def to_eight_bits(module: nn.Module, scaling: str = "tensor", *, keep: Iterable[str] = ("output",)) -> nn.Module:
    """Let a model's linear layers multiply in 8 bits, in place; parameters stay what they are.

    Args:
        module: the model.
        scaling: "tensor", "delayed" or "block".
        keep: names of layers that stay, of a GPT its head: what is first or last loses most.
    """
    chosen("scaling", scaling, SCALINGS)
    for path, parent in [*module.named_modules()]:
        for name, layer in [*parent._modules.items()]:  # a layer that is used twice comes twice
            if type(layer) is nn.Linear and f"{path}.{name}".removeprefix(".") not in keep:
                setattr(parent, name, EightBitLinear(layer, scaling))
    return module


@torch.no_grad()
def agree_on_scales(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Give all ranks the largest of their newest magnitudes, so that delayed scales stay equal; once after backward.

    Cost: one all-reduce of 12 bytes for each layer of delayed scaling.
    """
    found = {name: one.history for name, one in module.named_modules() if isinstance(one, DelayedScale)}
    if found:
        newest = torch.cat(last := [history[-1:] for history in found.values()])
        torch._foreach_zero_(last)  # should this step be skipped on all ranks
        torch._foreach_copy_(last, agree_on_largest(newest, group, [*found]).split(1))
