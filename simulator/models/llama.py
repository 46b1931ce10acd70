"""Llama: the work, parameters and activations of a decoder with gated feed-forward parts and grouped heads.

Symbols: B micro-batch, s sequence, h hidden, f feed-forward width, l layers, a heads, g key-value heads over heads, V
vocabulary. Norms have no bias, no product has one; the embedding and the head are two tensors; nothing is dropped out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from distlab.plan import Attention, Layer, Region, Work, Workload
from simulator.models.gpt import ADAM_BYTES, LOSS_BYTES, PASSES


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a model of this kind; with `ties_embedding` the head uses the embedding's parameters.

    Raises:
        ValueError: a size is less than 1; heads do not divide the hidden size, or key-value heads the heads.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
    vocab_size: int
    ties_embedding: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "ties_embedding" and value < 1:
                raise ValueError(f"Llama: {name} is {value!r}; pass a whole number of at least 1")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"Llama: hidden_size {self.hidden_size}, {self.num_heads} heads and {self.num_key_value_heads} "
                "key-value heads; heads must divide the hidden size, and key-value heads the heads"
            )

    @property
    def key_value_size(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.hidden_size * self.num_key_value_heads // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters: l (h (2h + 2gh) + 3hf + 2h) + 2Vh + h; tied embeddings have one Vh."""
        h = self.hidden_size
        layer = 2 * h * h + 2 * h * self.key_value_size + 3 * h * self.feed_forward_size + 2 * h
        return self.num_layers * layer + (1 if self.ties_embedding else 2) * self.vocab_size * h + h


def llama_workload(
    sizes: LlamaSizes,
    *,
    sequence_length: int,
    microbatch_size: int = 1,
    bytes_per_parameter: int = 2,
    name: str | None = None,
) -> Workload:
    """Return the workload of such a model, with 16-bit activations.

    A layer keeps the inputs of both norms and of all products, and the gate's two factors: s B h (12 + 4 g) + 8 s B f
    bytes. It also keeps 2 a s^2 B bytes of scores, which `fuse_attention` or selective recompute drops.

    Source: sizes of tensors as Touvron et al. 2023 (2307.09288) describe the model; activations counted tensor by
        tensor as 2205.05198 does for GPT.

    Raises:
        ValueError: a size is less than 1.
    """
    if sequence_length < 1 or microbatch_size < 1:
        raise ValueError(
            f"Llama: sequences of {sequence_length}, {microbatch_size} a micro-batch; pass at least 1 each"
        )
    block = _block(sizes, sequence_length, microbatch_size)
    blocks = tuple(replace(block, name=f"block {index}") for index in range(sizes.num_layers))
    tokens = sequence_length * microbatch_size
    layers = (_embedding(sizes, tokens), *blocks, _head(sizes, tokens))
    tensors = sum(len(layer.parameter_sizes) for layer in layers)
    return Workload(
        name=name or f"Llama {sizes.num_parameters / 1e9:.3g}B",
        layers=layers,
        bytes_per_parameter=bytes_per_parameter,
        optimizer=Work(memory_bytes=ADAM_BYTES * sizes.num_parameters, num_kernels=tensors),
        optimizer_bytes_per_parameter=8,
        samples=microbatch_size,
        master_bytes_per_parameter=4 if bytes_per_parameter == 2 else 0,
        activation_element_bytes=2,
    )


def _embedding(sizes: LlamaSizes, tokens: int) -> Layer:
    output = tokens * sizes.hidden_size * 2
    elements = sizes.vocab_size * sizes.hidden_size
    return Layer(
        name="embedding",
        parameter_sizes=(elements,),
        parameter_shapes=((sizes.vocab_size, sizes.hidden_size),),
        forward=Work(memory_bytes=2 * output, num_kernels=1),
        input_gradient=Work(),
        weight_gradient=Work(memory_bytes=2 * output, num_kernels=1),
        activation_bytes=tokens * 8,  # token numbers
        output_bytes=output,
        tensor_parameters=elements,
        parameter_axes=("tensor",),
        regions=(Region("embedding", output_bytes=output),),
        splits_positions=True,
    )


def _head(sizes: LlamaSizes, tokens: int) -> Layer:
    h, flops, logits = sizes.hidden_size, 2.0 * tokens * sizes.hidden_size * sizes.vocab_size, tokens * sizes.vocab_size
    forward, weights = Work(flops, 8 * logits, 4), Work(flops, 0, 1)
    sums = (LOSS_BYTES * tokens, 2 * LOSS_BYTES * tokens)
    own = sizes.vocab_size * h
    return Layer(
        name="head and loss",
        parameter_sizes=(h,) if sizes.ties_embedding else (h, own),
        parameter_shapes=((h,),) if sizes.ties_embedding else ((h,), (sizes.vocab_size, h)),
        forward=forward,
        input_gradient=forward,
        weight_gradient=weights,
        parameter_axes=("",) if sizes.ties_embedding else ("", "tensor"),
        regions=(Region("head", forward, forward, weights, 2 * tokens * h, 0, weights, sums),),
        splits_positions=True,
        sequence_calls=(("all_reduce", h),),
        activation_bytes=4 * tokens * h + 4 * logits,
        logits_bytes=4 * logits,
        output_bytes=0,
        tensor_parameters=0 if sizes.ties_embedding else own,
    )


def _block(sizes: LlamaSizes, sequence: int, batch: int) -> Layer:
    h, f, tokens, shared = sizes.hidden_size, sizes.feed_forward_size, sequence * batch, sizes.key_value_size
    attention = ((h,), (h, h), (shared, h), (shared, h), (h, h))
    shapes = (*attention, (h,), (f, h), (f, h), (h, f))
    matrices = 2 * h * h + 2 * h * shared + 3 * h * f
    score_bytes = 2 * sizes.num_heads * sequence * tokens
    divided = tokens * (4 * h + 4 * shared + 8 * f) + score_bytes
    regions = (_attention(sizes, sequence, tokens), _feed_forward(sizes, tokens))
    inside = [sum((getattr(region, name) for region in regions), Work()) for name in PASSES]
    norms = Work(memory_bytes=2 * 8 * tokens * h, num_kernels=4)  # and sums
    return Layer(
        name="block",
        parameter_sizes=tuple(math.prod(shape) for shape in shapes),
        parameter_shapes=shapes,
        forward=inside[0] + norms,
        input_gradient=inside[1] + norms,
        weight_gradient=inside[2],
        activation_bytes=divided + 8 * tokens * h,
        output_bytes=2 * tokens * h,
        tensor_activation_bytes=divided,
        score_bytes=score_bytes,
        score_forward=Work(4.0 * tokens * sequence * h, 2 * score_bytes, 3),  # two products and the softmax
        input_bytes=2 * tokens * h,
        tensor_parameters=matrices,
        regions=regions,
        splits_positions=True,
        parameter_axes=tuple("tensor" if len(shape) == 2 else "" for shape in shapes),
        sequence_calls=(("all_reduce", h), ("all_reduce", h)),
    )


def _attention(sizes: LlamaSizes, sequence: int, tokens: int) -> Region:
    """Return attention: products of h, twice g h and h, scores between them; 3 kernels inside, 4 in backward."""
    h, shared = sizes.hidden_size, sizes.key_value_size
    inputs, output = 2.0 * tokens * h * (h + 2 * shared), 2.0 * tokens * h * h
    scores, score_bytes = 4.0 * tokens * sequence * h, 2 * sizes.num_heads * sequence * tokens
    stream = 2 * (tokens * (4 * h + 4 * shared) + score_bytes)
    return Region(
        "attention",
        forward=Work(inputs + output + scores, stream, 7),
        input_gradient=Work(inputs + output + 2 * scores, stream, 8),
        weight_gradient=Work(inputs + output, 0, 4),
        input_bytes=2 * tokens * h,
        output_bytes=2 * tokens * h,
        beside=Work(inputs, 0, 3),
        attention=Attention(
            sizes.num_heads,
            sizes.num_key_value_heads,
            sequence,
            query_bytes=2 * tokens * h,
            key_value_bytes=4 * tokens * shared,
            key_value_gradient_bytes=8 * tokens * shared,  # float32
            forward=Work(scores, 2 * score_bytes, 3),
            backward=Work(2 * scores, 2 * score_bytes, 4),
        ),
    )


def _feed_forward(sizes: LlamaSizes, tokens: int) -> Region:
    """Return the three products of the gated part; 8 f bytes kept per token."""
    weights = 6.0 * tokens * sizes.hidden_size * sizes.feed_forward_size
    states, each = 2 * tokens * sizes.hidden_size, Work(weights, 16 * tokens * sizes.feed_forward_size, 3)
    inputs = replace(each, num_kernels=4)
    return Region("feed-forward", each, inputs, Work(weights, 0, 3), states, states, Work(weights * 2 / 3, 0, 2))
