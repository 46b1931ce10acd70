"""Llama and its relatives: the work, parameters and activations of decoders with gated feed-forward parts.

Symbols: B micro-batch, s sequence, h hidden, f feed-forward width, l layers, a heads, V vocabulary. No dropout. The
relatives have fewer heads of keys and values (Llama), biases (Qwen 2, Phi), experts or latent attention. Queries and
keys are normed head by head (Qwen 3) or over all heads (OLMo 2). A block has one norm or four (Falcon, Gemma 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from distlab.plan import Attention, Layer, Product, Region, Work, Workload
from distlab.plan.require import changed
from simulator.models.parts import (
    PASSES,
    Mixture,
    Shapes,
    embedding_layer,
    head_layer,
    parameters,
    require_sizes,
    trained_by_adam,
    with_experts,
    with_operators,
)


class LatentSizes(NamedTuple):
    """Latent attention: keys and values are made from one narrow vector per token, and queries from a second one.

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


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a model of this kind.

    Attributes:
        hidden_size: h.
        num_layers: l.
        num_heads: a.
        num_key_value_heads: heads of keys and values.
        feed_forward_size: f.
        vocab_size: V.
        ties_embedding: the head uses the embedding's parameters.
        head_size: elements of a head; None: h / a.
        is_gated: the feed-forward part has a gate: three products, not two.
        attention_biases: queries, keys and values have biases.
        output_bias: the product behind the heads has one.
        feed_forward_biases: the products of the feed-forward part have them; an expert's are not counted.
        head_bias: the head has one.
        num_norms: of a block: 1 where attention and feed-forward part read the same, 4 where their outputs are normed.
        norm_parameters: of an element of a norm: 2 with a bias, 0 without any; norms of queries and keys have one.
        num_positions: that are learned; 0: they are rotary, or have no parameters.
        head_norms: queries and keys are normed head by head.
        wide_norms: queries and keys are normed over all heads, by a weight for each element.
        windows: of each layer, how many positions a token sees, None: all before it; (): all of all layers.
        convolutions: of each layer, how many positions a convolution sees that is there in place of attention (LFM2),
            0: it has attention; (): all have.
        latent: latent attention, or None.
        mixture: experts, or None.

    Raises:
        ValueError: a size is less than 1; heads do not divide the hidden size, or key-value heads the heads; or there
            are more dense layers than layers.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
    vocab_size: int
    ties_embedding: bool = False
    head_size: int | None = None
    is_gated: bool = True
    attention_biases: bool = False
    output_bias: bool = False
    feed_forward_biases: bool = False
    head_bias: bool = False
    num_norms: int = 2
    norm_parameters: int = 1
    num_positions: int = 0
    head_norms: bool = False
    wide_norms: bool = False
    windows: tuple[int | None, ...] = ()
    convolutions: tuple[int, ...] = ()
    latent: LatentSizes | None = None
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        names = ("hidden_size", "num_layers", "num_heads", "num_key_value_heads", "feed_forward_size", "vocab_size")
        require_sizes("Llama", **{name: getattr(self, name) for name in names}, head_size=self.head_size)
        divides = self.head_size or self.latent or self.hidden_size % self.num_heads == 0
        if not divides or self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"Llama: hidden_size {self.hidden_size}, {self.num_heads} heads and {self.num_key_value_heads} "
                "key-value heads; heads must divide the hidden size, and key-value heads the heads"
            )
        if self.mixture and self.mixture.dense_layers > self.num_layers:
            raise ValueError(f"Llama: {self.mixture.dense_layers} of {self.num_layers} layers are dense; use fewer")
        for name in ("windows", "convolutions"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"Llama: {count} {name} for {self.num_layers} layers; pass one for each")

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return llama_workload(self, sequence_length=1).num_parameters


def llama_workload(
    sizes: LlamaSizes,
    *,
    sequence_length: int,
    microbatch_size: int = 1,
    bytes_per_parameter: int = 2,
    name: str | None = None,
) -> Workload:
    """Return the workload of such a model, with 16-bit activations.

    A layer keeps the inputs of both norms and of all products, and the gate's two factors. That is
    s B (8 h + 2 (queries + keys and values + mixed values) + 8 f) bytes; without a gate 4 f. Where queries and keys are
    normed it keeps the norms' inputs too: 2 s B (queries + keys). It also keeps 2 a s^2 B bytes of scores, which
    `fuse_attention` or selective recompute drops.

    Source: sizes of tensors as Touvron et al. 2023 (2307.09288) describe the model; activations counted tensor by
        tensor as 2205.05198 does for GPT.

    Raises:
        ValueError: a size is less than 1.
    """
    require_sizes("Llama", sequence_length=sequence_length, microbatch_size=microbatch_size)
    kinds = [_kind(sizes, layer) for layer in range(sizes.num_layers)]
    made = {kind: _make(sizes, sequence_length, microbatch_size, kind) for kind in dict.fromkeys(kinds)}
    blocks = tuple(changed(made[kind], name=f"block {index}") for index, kind in enumerate(kinds))
    tokens = sequence_length * microbatch_size
    width, vocabulary = sizes.hidden_size, sizes.vocab_size
    head = head_layer(
        (tokens, vocabulary, width), sizes.norm_parameters, is_tied=sizes.ties_embedding, has_bias=sizes.head_bias
    )
    layers = (embedding_layer((tokens, vocabulary, width), sizes.num_positions), *blocks, head)
    made_name = name or f"Llama {sum(layer.num_parameters for layer in layers) / 1e9:.3g}B"
    return trained_by_adam(made_name, layers, microbatch_size, bytes_per_parameter)


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


class _Kind(NamedTuple):
    has_experts: bool
    window: int | None
    convolution: int


def _kind(sizes: LlamaSizes, layer: int) -> _Kind:
    return _Kind(
        bool(sizes.mixture and sizes.mixture.has_experts(layer)),
        sizes.windows[layer] if sizes.windows else None,
        sizes.convolutions[layer] if sizes.convolutions else 0,
    )


def _make(sizes: LlamaSizes, sequence: int, batch: int, kind: _Kind) -> Layer:
    mixture = sizes.mixture if kind.has_experts else None
    block = _block(sizes, sequence, batch, mixture.shared_size if mixture else sizes.feed_forward_size, kind)
    if mixture:
        width = mixture.expert_size or sizes.feed_forward_size
        block = with_experts(block, _feed_forward(sizes, sequence * batch, width), _wide(sizes, width), mixture)
    return block


def _products(sizes: LlamaSizes, convolution: int) -> AttentionProducts:
    """Return the products of attention, or of a short convolution: one makes its input and two gates.

    Its channels are divided; rows that context ranks fetch from neighbours (width - 1 each) are not counted.

    Source: Liquid AI 2025, LFM2 (transformers, modeling_lfm2.py, Lfm2ShortConv).
    """
    h, size = sizes.hidden_size, sizes.head_size or sizes.hidden_size // sizes.num_heads
    if convolution:
        return AttentionProducts((), (), ((3 * h, h),), (h, h), h, 2 * h, h, convolution)
    return AttentionProducts.of(h, (sizes.num_heads, sizes.num_key_value_heads, size), sizes.latent)


def _wide(sizes: LlamaSizes, width: int) -> Shapes:
    """Return the matrices of a feed-forward part."""
    into = ((width, sizes.hidden_size),) * (2 if sizes.is_gated else 1)
    return (*into, (sizes.hidden_size, width)) if width else ()


def _block(sizes: LlamaSizes, sequence: int, batch: int, width: int, kind: _Kind) -> Layer:
    """Return a block with a feed-forward part of a width; 0: it has none, since experts take its place."""
    h, tokens, own, wide = sizes.hidden_size, sequence * batch, _products(sizes, kind.convolution), _wide(sizes, width)
    count = sizes.norm_parameters
    first, others = (count, (sizes.num_norms - 1) * count) if count else (0, 0)
    parts: list[tuple[tuple[int, ...], str]] = [((h,), "")] * first + [(shape, "") for shape in own.narrow]
    parts += [(shape, "tensor") for shape in (*own.heads, own.output)]
    parts += [((rows,), "tensor") for rows, _ in own.heads] if sizes.attention_biases else []
    parts += [((h, own.convolution), "tensor")] if own.convolution else []
    parts += [((size,), "") for size in (*own.norms, *_norms_of_heads(sizes, own), *(h,) * others)]
    parts += [((h,), "")] * sizes.output_bias + [(shape, "tensor") for shape in wide]
    if sizes.feed_forward_biases and width:
        parts += [((width,), "tensor")] * (2 if sizes.is_gated else 1) + [((h,), "")]
    before = (*own.heads, own.output)
    regions = [with_operators(_attention(sizes, own, sequence, tokens, kind.window), before, tokens)]
    if width:
        part = _feed_forward(sizes, tokens, width)
        regions.append(with_operators(part, wide, tokens, first=len(before), is_last=True))
    inside = [sum((getattr(region, name) for region in regions), Work()) for name in PASSES]
    latent = 2.0 * tokens * sum(rows * columns for rows, columns in own.narrow)
    norms = sizes.num_norms  # each is read and written, and so are two sums
    outside = Work(latent, (4 * norms + 8) * tokens * h + 16 * tokens * sum(own.norms), norms + 2 + 2 * len(own.narrow))
    narrow = Work(latent, 0, len(own.narrow))
    scores = _scores(sizes, own, sequence, tokens)
    score_bytes = 0 if own.convolution else 2 * sizes.num_heads * sequence * tokens
    divided = 2 * tokens * (own.queries + own.keys_and_values + own.output[1] + _normed(sizes, own)) + score_bytes
    divided += (8 if sizes.is_gated else 4) * tokens * width + (4 * tokens * h if own.convolution else 0)
    return Layer(
        name="block",
        **parameters(parts),
        forward=inside[0] + outside,
        input_gradient=inside[1] + outside,
        weight_gradient=inside[2] + narrow,
        activation_bytes=divided + (4 + 2 * norms) * tokens * h + 4 * tokens * sum(own.norms),
        output_bytes=2 * tokens * h,
        tensor_activation_bytes=divided,
        score_bytes=score_bytes,
        score_forward=scores if score_bytes else Work(),
        input_bytes=2 * tokens * h,
        regions=tuple(regions),
        splits_positions=True,
        sequence_calls=(("all_reduce", h * count),) * norms if count else (),
    )


def _norms_of_heads(sizes: LlamaSizes, own: AttentionProducts) -> tuple[int, ...]:
    """Return the parameters of the norms of queries and of keys."""
    if own.convolution:
        return ()
    if sizes.wide_norms:
        return own.queries, own.keys_and_values // 2
    return (own.output[1] // sizes.num_heads,) * 2 if sizes.head_norms else ()


def _normed(sizes: LlamaSizes, own: AttentionProducts) -> int:
    """Return how many elements of a token's queries and keys are normed."""
    is_normed = (sizes.wide_norms or sizes.head_norms) and not own.convolution
    return own.queries + own.keys_and_values // 2 if is_normed else 0


def _scores(sizes: LlamaSizes, own: AttentionProducts, sequence: int, tokens: int) -> Work:
    """Return two products over all pairs of positions, and the softmax between them, in three kernels.

    A convolution has three as well: two gates and itself.
    """
    if own.convolution:
        return Work(num_kernels=3)
    flops = 2.0 * tokens * sequence * (own.queries + own.output[1])
    return Work(flops, 4 * sizes.num_heads * sequence * tokens, 3)


def _attention(sizes: LlamaSizes, own: AttentionProducts, sequence: int, tokens: int, window: int | None) -> Region:
    """Return attention: products of heads and of the output, norms and scores between; one kernel more in backward."""
    inputs = 2.0 * tokens * sum(rows * columns for rows, columns in own.heads)
    both, products = inputs + 2.0 * tokens * math.prod(own.output), len(own.heads) + 1
    count = products + (2 if (normed := _normed(sizes, own)) else 0)
    scores = _scores(sizes, own, sequence, tokens)
    stream = 4 * tokens * (own.queries + own.keys_and_values + own.output[1] + normed)
    back = Work(2 * scores.matmul_flops, scores.memory_bytes, 4)
    shared = sizes.num_heads if sizes.latent else sizes.num_key_value_heads
    keys = tokens * own.keys_and_values  # and values; their gradients are in float32
    inner = Attention(
        sizes.num_heads, shared, sequence, 2 * tokens * own.queries, 2 * keys, 4 * keys, scores, back, window
    )
    return Region(
        "convolution" if own.convolution else "attention",
        forward=Work(both, stream, count) + scores,
        input_gradient=Work(both, stream, count) + back,
        weight_gradient=Work(both, 0, products),
        input_bytes=2 * tokens * own.inputs,
        output_bytes=2 * tokens * sizes.hidden_size,
        beside=Work(inputs, 0, products - 1),
        attention=None if own.convolution else inner,
        products=own.shapes(tokens),
    )


def _feed_forward(sizes: LlamaSizes, tokens: int, width: int) -> Region:
    """Return the products of a feed-forward part; 8 f bytes kept per token, 4 f without a gate."""
    count, states = 3 if sizes.is_gated else 2, 2 * tokens * sizes.hidden_size
    weights = 1.0 * count * states * width
    each = Work(weights, (16 if sizes.is_gated else 8) * tokens * width, 3)
    inputs, beside = replace(each, num_kernels=count + 1), Work(weights * (count - 1) / count, 0, count - 1)
    products = (
        Product(tokens, (count - 1) * width, sizes.hidden_size, "columns"),  # with a gate's columns
        Product(tokens, sizes.hidden_size, width, "depth"),
    )
    return Region("feed-forward", each, inputs, Work(weights, 0, count), states, states, beside, products=products)
