"""The products of attention in a model that Llama's kind is: grouped heads, or latent attention."""

from __future__ import annotations

from typing import NamedTuple

from distlab.plan import Product
from simulator.models.parts import Shapes


class LatentSizes(NamedTuple):
    """Latent attention: keys and values are made from one narrow vector per token, and queries from another.

    Attributes:
        key_value_rank: width of the vector of keys and values.
        query_rank: width of the vector of queries; 0: they are made from the hidden state.
        head_size: of queries and keys, without their rotary part.
        rotary_size: of the rotary part, which all heads of keys share.
        value_size: of a head's values.

    Source: DeepSeek-AI 2024 (2405.04434), section 2.1.
    """

    key_value_rank: int
    query_rank: int
    head_size: int
    rotary_size: int
    value_size: int


class AttentionProducts(NamedTuple):
    """Products of attention as shapes of matrices; `narrow` ones, with `norms`, run whole on every tensor rank."""

    narrow: Shapes
    norms: tuple[int, ...]
    heads: Shapes
    output: tuple[int, int]
    queries: int
    keys_and_values: int
    inputs: int
    convolution: int = 0

    def shapes(self, tokens: int) -> tuple[Product, ...]:
        """Return the products that tensor ranks divide; those with one input, such as queries and keys, run as one."""
        depths = dict.fromkeys(depth for _, depth in self.heads)
        wide = [
            Product(tokens, sum(rows for rows, own in self.heads if own == depth), depth, "columns") for depth in depths
        ]
        return (*wide, Product(tokens, *self.output, "depth"))

    @classmethod
    def of_convolution(cls, h: int, width: int) -> AttentionProducts:
        """Return those of a short convolution in place of attention: one product makes its input and two gates.

        Its channels are divided; rows that context ranks fetch from neighbours (width - 1 each) are not counted.

        Source: Liquid AI 2025, LFM2 (transformers, modeling_lfm2.py, Lfm2ShortConv).
        """
        return cls((), (), ((3 * h, h),), (h, h), h, 2 * h, h, width)

    @classmethod
    def of(cls, h: int, heads: tuple[int, int, int], latent: LatentSizes | None) -> AttentionProducts:
        """Return the products of a hidden size; heads: how many, those of keys and values, and elements of one."""
        a, shared_heads, each = heads
        if latent is None:
            query, shared = a * each, shared_heads * each
            return cls((), (), ((query, h), (shared, h), (shared, h)), (h, query), query, 2 * shared, h)
        rank, wide = latent.key_value_rank, latent.head_size + latent.rotary_size
        both = a * (latent.head_size + latent.value_size)
        own: Shapes = ((rank + latent.rotary_size, h),)
        queries, kept = (a * wide, h), a * (wide + latent.value_size)
        if latent.query_rank:
            own, queries = ((latent.query_rank, h), *own), (a * wide, latent.query_rank)
        norms = (*([latent.query_rank] if latent.query_rank else []), rank)
        inputs = sum(shape[0] for shape in own) + (0 if latent.query_rank else h)
        return cls(own, norms, (queries, (both, rank)), (h, a * latent.value_size), a * wide, kept, inputs)
