"""GPT: the work, parameters and activations of a GPT, layer by layer, from its sizes alone; and published formulas.

Symbols: B micro-batch, s sequence, h hidden, l layers, a heads, V vocabulary; the feed-forward part is 4h wide. The
embedding is tied to the head: its parameters sit in the first layer. The last norm is left out, as in the sources.

Each block says what ranks can share of it (see `distlab.plan.regions`): heads of attention, width of the feed-forward
part, positions of the rest. `mix_experts` puts mixtures of experts in place of the feed-forward parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distlab.plan import Attention, Layer, Product, Region, Work, Workload
from distlab.plan.require import changed
from simulator.models.parts import (
    PASSES,
    Mixture,
    Parts,
    adam_work,
    embedding_layer,
    head_layer,
    parameters,
    require_sizes,
    trained_by_adam,
    with_experts,
    with_operators,
)


def gpt_workload(
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    sequence_length: int,
    vocab_size: int,
    microbatch_size: int = 1,
    bytes_per_parameter: int = 2,
) -> Workload:
    """Return the workload of a GPT, forward and backward without recomputing.

    Matrix products and parameters are exact by the sources' formulas. Activations are 16-bit; dropout masks take one
    byte per element; one copy of the logits is in float32. With 16-bit parameters Adam keeps a master copy of 4 bytes.
    Bytes of other kernels are an estimate: every activation that is kept was written once and is read once, in
    forward and again in backward.

    Cost: forward 24 B s h^2 + 4 B s^2 h FLOPs per layer and 2 B s h V for the head; backward twice that.
    Source: Narayanan et al. 2021 (2104.04473), equations 2 and 3; Korthikanti et al. 2022 (2205.05198), equation 2 and
        section 4.3.

    Raises:
        ValueError: a size is less than 1, or the heads do not divide the hidden size.
    """
    h, s, batch = hidden_size, sequence_length, microbatch_size
    sizes = {"hidden_size": h, "num_layers": num_layers, "num_heads": num_heads, "sequence_length": s}
    require_sizes("GPT", **sizes, vocab_size=vocab_size, microbatch_size=batch)
    if h % num_heads:
        raise ValueError(f"GPT: {num_heads} heads do not divide hidden_size {h}; use a divisor of {h}")
    block = _block(h, s, batch, num_heads)
    blocks = tuple(changed(block, name=f"block {index}") for index in range(num_layers))
    layers = (_embedding(h, s, batch, vocab_size), *blocks, head_layer((batch * s, vocab_size, h), None))
    return trained_by_adam(_name(layers), layers, batch, bytes_per_parameter)


def mix_experts(workload: Workload, num_experts: int, *, top_k: int = 1) -> Workload:
    """Return a GPT's workload with a mixture of experts in place of the feed-forward part of each block.

    Each of the experts is as wide as the part that it replaces; a token goes to `top_k` of them.

    Cost: forward (8 + 16 k) B s h^2 + 2 B s h E FLOPs per layer in place of 24 B s h^2.

    Raises:
        ValueError: a number that cannot be, or a workload without the blocks that `gpt_workload` makes.
    """
    embedding, first, *rest = workload.layers
    found, batch = first.regions[0].attention if first.regions else None, workload.samples
    h = first.output_bytes // (2 * batch * found.num_positions) if found else 0
    if not found or first != replace(_block(h, found.num_positions, batch, found.num_heads), name=first.name):
        raise ValueError(f"{workload.name} has no feed-forward part to replace; pass a workload of gpt_workload")
    block = _block(h, found.num_positions, batch, found.num_heads, Mixture(num_experts, top_k))
    blocks = [changed(block, name=each.name) for each in (first, *rest[:-1])]
    return _with_layers(workload, (embedding, *blocks, rest[-1]))


def as_released(workload: Workload, num_positions: int) -> Workload:
    """Return a GPT with the last norm, and with learned positions as it was released, whatever its sequences.

    0 positions (ALiBi) have no parameters, and a norm follows the embedding, as in BLOOM.
    """
    vocabulary, (_, h) = workload.layers[0].parameter_shapes
    own: Parts = [((num_positions, h), "")] if num_positions else [((h,), "")] * 2
    call = ("all_gather", num_positions * h) if num_positions else ("all_reduce", 2 * h)
    return _with_ends(workload, [(vocabulary, "tensor"), *own], (call,), [])


def with_own_head(workload: Workload) -> Workload:
    """Return a GPT with the last norm, a head that is not tied, and rotary positions, as GPT-NeoX was released."""
    embedding: Parts = [(workload.layers[0].parameter_shapes[0], "tensor")]
    return _with_ends(workload, embedding, (), embedding)


def _with_ends(workload: Workload, first: Parts, calls: tuple[tuple[str, int], ...], head: Parts) -> Workload:
    """Return a GPT whose first layer has these parameters and calls, and whose head has these behind a last norm."""
    embedding, *blocks, last = workload.layers
    h = embedding.parameter_shapes[0][1]
    layers = (
        replace(embedding, **parameters(first), sequence_calls=calls),
        *blocks,
        replace(last, **parameters([((h,), ""), ((h,), ""), *head]), sequence_calls=(("all_reduce", 2 * h),)),
    )
    return _with_layers(workload, layers)


def _with_layers(workload: Workload, layers: tuple[Layer, ...]) -> Workload:
    return replace(workload, name=_name(layers), layers=layers, optimizer=adam_work(layers))


def _name(layers: Sequence[Layer]) -> str:
    num_parameters = sum(layer.num_parameters for layer in layers)
    return f"GPT {num_parameters / 1e9:.3g}B" if num_parameters >= 1e8 else f"GPT {num_parameters / 1e6:.3g}M"


def gpt_num_parameters(hidden_size: int, num_layers: int, sequence_length: int, vocab_size: int) -> int:
    """Return 12 l h^2 (1 + 13/12h + (V + s)/12lh), exactly."""
    h = hidden_size
    return 12 * num_layers * h * h + 13 * num_layers * h + (vocab_size + sequence_length) * h


def gpt_step_flops(
    hidden_size: int,
    num_layers: int,
    sequence_length: int,
    vocab_size: int,
    batch_size: int,
    *,
    recompute: str = "none",
) -> float:
    """Return the FLOPs that a step executes: 72 B s l h^2 (1 + s/6h + V/12lh), or 96 (1 + s/6h + V/16lh) recomputing.

    Source: Narayanan et al. 2021 (2104.04473), equation 3, whose TFLOP/s count what is recomputed (hardware
        utilisation, HFU); without recomputing it is model utilisation (MFU). Selective recompute adds 4 B s^2 h a layer
        (2205.05198).

    Raises:
        ValueError: recompute is not "none", "selective" or "full".
    """
    h, s, layers = hidden_size, sequence_length, num_layers
    base = float(batch_size) * s * layers * h * h
    if recompute == "full":
        return 96 * base * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
    if recompute not in ("none", "selective"):
        raise ValueError(f"recompute is {recompute!r}; choose none, selective or full")
    flops = 72 * base * (1 + s / (6 * h) + vocab_size / (12 * layers * h))
    return flops + (4.0 * batch_size * s * s * h * layers if recompute == "selective" else 0.0)


def adam_state_bytes(num_parameters: float, *, zero_stage: int = 0, num_ranks: int = 1) -> float:
    """Return bytes per rank of mixed-precision Adam: 2 per parameter, 2 for its gradient, 12 for the optimizer.

    Stage 1 shards the optimizer over the ranks, stage 2 gradients too, stage 3 parameters too.

    Source: Rajbhandari et al. 2020 (1910.02054), section 3 and Table 1.

    Raises:
        ValueError: the stage is not 0 to 3, or there is less than one rank.
    """
    if zero_stage not in (0, 1, 2, 3) or num_ranks < 1:
        raise ValueError(
            f"ZeRO stage {zero_stage} over {num_ranks} ranks; choose a stage of 0 to 3 and at least one rank"
        )
    shards = [num_ranks if zero_stage >= needed else 1 for needed in (3, 2, 1)]  # parameters, gradients, optimizer
    return num_parameters * sum(size / parts for size, parts in zip((2, 2, 12), shards, strict=True))


def activation_bytes_per_layer(
    hidden_size: int,
    num_heads: int,
    sequence_length: int,
    microbatch_size: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return bytes that one transformer layer keeps for backward, in 16-bit precision.

    Args:
        hidden_size: h.
        num_heads: a.
        sequence_length: s.
        microbatch_size: B.
        tensor: degree t of tensor parallelism.
        sequence_parallel: whether the parts outside tensor parallelism are split along the sequence too.
        recompute: "none"; "selective" (the attention scores, as flash attention does); "full" (only the layer's input).

    Source: Korthikanti et al. 2022 (2205.05198), equations 1 to 4 and Table 2, s B h (34 + 5 a s / h) on one rank.

    Raises:
        ValueError: recompute is not one of the three, or a size is less than 1.
    """
    sizes = (hidden_size, num_heads, sequence_length, microbatch_size, tensor)
    if min(sizes) < 1:
        raise ValueError(f"sizes are {sizes}; pass hidden size, heads, sequence, micro-batch and degree of at least 1")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {recompute!r}; choose none, selective or full")
    unit = sequence_length * microbatch_size * hidden_size
    if recompute == "full":
        return 2.0 * unit / (tensor if sequence_parallel else 1)
    scores = 5 * num_heads * sequence_length / hidden_size if recompute == "none" else 0.0
    if sequence_parallel:
        return unit * (34 + scores) / tensor
    return unit * (10 + (24 + scores) / tensor)


def _embedding(h: int, s: int, batch: int, vocab_size: int) -> Layer:
    """Return the embedding of tokens and of positions, and a dropout, of which a mask is kept."""
    plain, stream = embedding_layer((batch * s, vocab_size, h), s), 4 * batch * s * h
    return replace(
        plain,
        forward=Work(memory_bytes=stream, num_kernels=3),
        weight_gradient=Work(memory_bytes=stream, num_kernels=2),
        activation_bytes=plain.activation_bytes + batch * s * h,
    )


def _block(h: int, s: int, batch: int, num_heads: int, mixture: Mixture | None = None) -> Layer:
    dense, output = _feed_forward(h, s, batch), 2 * batch * s * h
    kept = round(activation_bytes_per_layer(h, num_heads, s, batch)) - (8 * output if mixture else 0)
    scores, score_bytes = 4.0 * batch * s * s * h, 5 * batch * s * s * num_heads
    own: Parts = []
    for wide, deep in (((3 * h, h), (h, h)), ((4 * h, h), (h, 4 * h))):  # cut by columns with their biases, or by rows
        own += [((h,), ""), ((h,), ""), (wide, "tensor"), (wide[:1], "tensor"), (deep, "tensor"), ((h,), "")]
    regions, *experts = [_attention(h, s, batch, num_heads), dense], *own[-4:]  # two matrices and their biases
    if mixture:
        del regions[1:], own[-4:]
    whole = [sum((getattr(region, name) for region in regions), Work()) for name in PASSES]
    outside = [Work(memory_bytes=20 * batch * s * h, num_kernels=4)] * 2 + [Work()]  # norms and sums, whose inputs stay
    forward, inputs, weights = (inside + rest for inside, rest in zip(whole, outside, strict=True))
    block = Layer(
        name="block",
        **parameters(own),
        forward=forward,
        input_gradient=inputs,
        weight_gradient=weights,
        activation_bytes=kept,
        output_bytes=output,
        tensor_activation_bytes=kept - 10 * batch * s * h,
        score_bytes=score_bytes,
        score_forward=Work(scores, 2 * score_bytes, 5),  # two products, scale, softmax, dropout
        kept_until_weights_bytes=None if mixture else min(kept, 32 * batch * s * h),  # 2401.10241, table 1
        input_bytes=output,
        regions=tuple(regions),
        splits_positions=True,
        sequence_calls=(("all_reduce", 2 * h), ("all_reduce", 2 * h)),
    )
    return with_experts(block, dense, tuple(shape for shape, _ in experts), mixture) if mixture else block


def _attention(h: int, s: int, batch: int, num_heads: int) -> Region:
    """Return attention: products of 3h and h, scores between them; 8 s B h bytes kept, and 5 a s^2 B of scores."""
    weights, scores = 8.0 * batch * s * h * h, 4.0 * batch * s * s * h
    inner = 2 * 5 * batch * s * s * num_heads
    stream = 2 * 8 * batch * s * h + inner
    states = 2 * batch * s * h
    sent = (states, 2 * states, 4 * states)  # bytes of queries, of keys and values, and of their gradients in float32
    region = Region(
        "attention",
        forward=Work(weights + scores, stream, 5),
        input_gradient=Work(weights + 2 * scores, stream, 7),
        weight_gradient=Work(weights, 0, 2),
        input_bytes=states,
        output_bytes=states,
        beside=Work(weights * 3 / 4, 0, 1),
        attention=Attention(num_heads, num_heads, s, *sent, Work(scores, inner, 3), Work(2 * scores, inner, 5)),
        products=(Product(batch * s, 3 * h, h, "columns"), Product(batch * s, h, h, "depth")),
    )
    return with_operators(region, ((3 * h, h), (h, h)), batch * s)


def _feed_forward(h: int, s: int, batch: int) -> Region:
    """Return two products of 4h with a GELU between; 16 s B h bytes kept."""
    weights, states = 16.0 * batch * s * h * h, 2 * batch * s * h
    work = Work(weights, 2 * 16 * batch * s * h, 3)
    half = Work(weights / 2, 0, 1)
    products = (Product(batch * s, 4 * h, h, "columns"), Product(batch * s, h, 4 * h, "depth"))
    region = Region("feed-forward", work, work, Work(weights, 0, 2), states, states, half, products=products)
    return with_operators(region, ((4 * h, h), (h, 4 * h)), batch * s, first=2, is_last=True)
