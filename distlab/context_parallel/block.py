"""Attention of some queries to some of the keys: a mean, its log-sum-exp, and the backward pass of just this block.

Blocks work because backward needs only two numbers per query from the other blocks. With the log-sum-exp L
over *all* keys, the weight of key j is exp(score_j - L), whichever block it lies in. And the softmax's gradient is
weight_j (g_j - delta), with g_j the gradient of the weight and delta = sum_j weight_j g_j, which is output * gradient
summed over the head: no block of it is needed either.

torch's fused kernel for the CPU gives and takes exactly these (output and log-sum-exp), so without dropout it does the
work there. With dropout, and on other devices, the plain products below do; those hold a block's scores.

Source: Dao et al. 2022 (FlashAttention), appendix B.2 (delta) and B.3 (merging by log-sum-exp); Liu et al. 2023
    (Ring Attention). Here the merge is a linear interpolation with the sigmoid of the difference as its weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.rng import generator

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Rule:
    """How queries weigh keys.

    Attributes:
        causal: a query sees its own position and those before.
        scale: factor of the scores.
        dropout: probability of dropping a weight.
        seed: of the dropped weights; backward draws the same ones again.
    """

    causal: bool
    scale: float
    dropout: float = 0.0
    seed: int = 0


class BlockPart(NamedTuple):
    """The part of a block that has to be computed.

    Attributes:
        rows: which of the rank's queries.
        columns: which of the keys at hand.
        masked: whether the causal mask cuts through it; it is square then.
        step: tells the blocks of a rank apart (for dropout).
    """

    rows: slice
    columns: slice
    masked: bool
    step: int = 0


def attend(query: Tensor, key_value: Tensor, rule: Rule, part: BlockPart) -> tuple[Tensor, Tensor]:
    """Return the mean of the visible values, and the log-sum-exp of their scores.

    Shapes: query [B, A, s, D], key_value [2, B, A/g, k, D] -> [B, A, s', D], [B, A, s'], s' rows of the part
    """
    query, key, value = _cut(query, key_value, part)
    if _has_kernel(query, rule):
        output, lse = _fused(query, key, value, 0.0, part.masked, scale=rule.scale)
        return output, lse
    weights, lse = _weights(query, key, rule, part)
    kept = _kept(weights, rule, part)
    return (weights if kept is None else weights * kept).to(value.dtype) @ value, lse


def attend_backward(
    gradient: Tensor, query: Tensor, key_value: Tensor, saved: tuple[Tensor, Tensor], rule: Rule, part: BlockPart
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's part of the gradients of query, key and value.

    Args:
        gradient: of the output over all keys.
        query: of the rank.
        key_value: at hand.
        saved: the output and the log-sum-exp over all keys.
        rule: as in forward.
        part: as in forward.

    Shapes: gradient, query [B, A, s, D], key_value [2, B, A/g, k, D] -> [B, A, s', D], [B, A/g, k', D] twice
    """
    num_heads = key_value.shape[2]
    query, key, value = _cut(query, key_value, part)
    gradient, output = (tensor[:, :, part.rows] for tensor in (gradient, saved[0]))
    lse = saved[1][:, :, part.rows].contiguous()  # in one piece, as the kernel made it
    if _has_kernel(query, rule):
        found = _fused_backward(gradient, query, key, value, output, lse, 0.0, part.masked, scale=rule.scale)
    else:
        found = _plain_backward(gradient, (query, key, value), (output, lse), rule, part)
    of_query, of_key, of_value = found
    if of_key.shape[1] != num_heads:  # several query heads share a key head: their gradients add up
        of_key, of_value = (tensor.unflatten(1, (num_heads, -1)).sum(2) for tensor in (of_key, of_value))
    return of_query, of_key, of_value


def merge_(output: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge the mean over some keys with that over others, in place.

    Shapes: output, new [B, A, s, D], lse, new_lse [B, A, s]
    Error: exact up to rounding.
    """
    share = torch.sigmoid(new_lse - lse)
    output.lerp_(new.to(output.dtype), share[..., None])
    lse.copy_(torch.logaddexp(lse, new_lse))


def _cut(query: Tensor, key_value: Tensor, part: BlockPart) -> tuple[Tensor, Tensor, Tensor]:
    key, value = key_value[:, :, :, part.columns]
    if key.shape[1] != query.shape[1]:
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return query[:, :, part.rows], key, value


def _has_kernel(query: Tensor, rule: Rule) -> bool:
    return query.device.type == "cpu" and not rule.dropout and query.numel() > 0


def _weights(
    query: Tensor, key: Tensor, rule: Rule, part: BlockPart, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights under a log-sum-exp, by default the block's own; half precision is computed in float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) @ key.to(wide).mT) * rule.scale
    if part.masked:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return scores.sub_(lse[..., None]).exp_(), lse


def _kept(weights: Tensor, rule: Rule, part: BlockPart) -> Tensor | None:
    """Return the factor of each weight under dropout: 0, or what keeps the mean."""
    if not rule.dropout:
        return None
    draw = generator(rule.seed, part.step, "attention dropout", weights.device)
    drawn = torch.rand(weights.shape, generator=draw, device=weights.device, dtype=weights.dtype)
    return (drawn >= rule.dropout).to(weights.dtype) / (1 - rule.dropout)


def _plain_backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, Tensor], rule: Rule, part: BlockPart
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs
    output, lse = saved
    weights, _ = _weights(query, key, rule, part, lse)
    gradient, output, query, key, value = (x.to(weights.dtype) for x in (gradient, output, query, key, value))
    kept = _kept(weights, rule, part)
    of_weights = gradient @ value.mT
    of_value = (weights if kept is None else weights * kept).mT @ gradient
    if kept is not None:
        of_weights *= kept
    delta = (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - delta) * rule.scale
    return of_scores @ key, of_scores.mT @ query, of_value
