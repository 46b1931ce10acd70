"""The products of attention in a model that Llama's kind is: grouped heads, or latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distlab.plan import Product
from simulator.models.mixture_of_experts import Shapes

if TYPE_CHECKING:
    from simulator.models.llama import LlamaSizes


class AttentionProducts(NamedTuple):
    """Products of attention as shapes of matrices; `narrow` ones, with `norms`, run whole on every tensor rank."""

    narrow: Shapes
    norms: tuple[int, ...]
    heads: Shapes
    output: tuple[int, int]
    queries: int
    keys_and_values: int
    inputs: int

    def shapes(self, tokens: int) -> tuple[Product, ...]:
        """Return the products that tensor ranks divide; those with one input, such as queries and keys, run as one."""
        depths = dict.fromkeys(depth for _, depth in self.heads)
        wide = [Product(tokens, sum(rows for rows, own in self.heads if own == depth), depth, "columns") for depth in depths]
        return (*wide, Product(tokens, *self.output, "depth"))

    @classmethod
    def of(cls, sizes: LlamaSizes) -> AttentionProducts:
        h, a, latent = sizes.hidden_size, sizes.num_heads, sizes.latent
        if latent is None:
            each = sizes.head_size or h // a
            query, shared = a * each, sizes.num_key_value_heads * each
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
