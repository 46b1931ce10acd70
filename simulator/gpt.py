"""GPT: the work, parameters and activations of a GPT, layer by layer, from its sizes alone.

Symbols: B micro-batch, s sequence, h hidden, l layers, a heads, V vocabulary; the feed-forward part is 4h wide. The
embedding is tied to the head: its parameters sit in the first layer. The last norm is left out, as in the sources.
"""

from __future__ import annotations

import math
from dataclasses import replace

from distlab.plan.records import Layer, Work, Workload
from simulator.memory_formulas import activation_bytes_per_layer

BLOCK_KERNELS = 12  # 2 norms, 4 products of weights, 2 of attention, softmax, GELU, 2 additions
ADAM_BYTES = 28  # read gradient, parameter and two moments in fp32, write all but the gradient


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

    Matrix products and parameters are exact by the sources' formulas. Activations are 16-bit, with dropout's masks of a
    byte; logits are in float32, once. With 16-bit parameters Adam keeps a master copy of 4 bytes. Bytes of other
    kernels are an estimate: every activation that is kept was written once and is read once, in forward and again in
    backward.

    Cost: forward 24 B s h^2 + 4 B s^2 h FLOPs a layer and 2 B s h V for the head; backward twice that.
    Source: Narayanan et al. 2021 (2104.04473), equations 2 and 3; Korthikanti et al. 2022 (2205.05198), equation 2 and
        section 4.3.

    Raises:
        ValueError: a size is less than 1, or the heads do not divide the hidden size.
    """
    h, s, batch = hidden_size, sequence_length, microbatch_size
    sizes = {"hidden_size": h, "num_layers": num_layers, "num_heads": num_heads, "sequence_length": s}
    for name, value in (sizes | {"vocab_size": vocab_size, "microbatch_size": batch}).items():
        if value < 1:
            raise ValueError(f"GPT: {name} is {value!r}; pass a whole number of at least 1")
    if h % num_heads:
        raise ValueError(f"GPT: {num_heads} heads do not divide hidden_size {h}; use a divisor of {h}")
    block = _block(h, s, batch, num_heads)
    blocks = tuple(replace(block, name=f"block {index}") for index in range(num_layers))
    layers = (_embedding(h, s, batch, vocab_size), *blocks, _head(h, s, batch, vocab_size))
    num_parameters = sum(layer.num_parameters for layer in layers)
    tensors = sum(len(layer.parameter_sizes) for layer in layers)
    return Workload(
        name=f"GPT {num_parameters / 1e9:.3g}B" if num_parameters >= 1e8 else f"GPT {num_parameters / 1e6:.3g}M",
        layers=layers,
        bytes_per_parameter=bytes_per_parameter,
        optimizer=Work(memory_bytes=ADAM_BYTES * num_parameters, num_kernels=tensors),
        optimizer_bytes_per_parameter=8,
        samples=batch,
        master_bytes_per_parameter=4 if bytes_per_parameter == 2 else 0,
        activation_element_bytes=2,
    )


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


def _embedding(h: int, s: int, batch: int, vocab_size: int) -> Layer:
    output = batch * s * h * 2
    return Layer(
        name="embedding",
        parameter_sizes=(vocab_size * h, s * h),
        parameter_shapes=((vocab_size, h), (s, h)),
        forward=Work(memory_bytes=2 * output, num_kernels=3),
        input_gradient=Work(),
        weight_gradient=Work(memory_bytes=2 * output, num_kernels=2),
        activation_bytes=batch * s * 8 + batch * s * h,  # token numbers, and the mask of dropout
        output_bytes=output,
        tensor_parameters=vocab_size * h,
    )


def _head(h: int, s: int, batch: int, vocab_size: int) -> Layer:
    flops = 2.0 * batch * s * h * vocab_size
    logits = batch * s * vocab_size * 4
    return Layer(
        name="head and loss",
        parameter_sizes=(),
        forward=Work(flops, 2 * logits, 3),
        input_gradient=Work(flops, 2 * logits, 3),
        weight_gradient=Work(flops, 0, 1),
        activation_bytes=batch * s * h * 4 + logits,  # inputs of the last norm and of the head
        logits_bytes=logits,
        output_bytes=0,
    )


def _block(h: int, s: int, batch: int, num_heads: int) -> Layer:
    weights = 24.0 * batch * s * h * h
    scores = 4.0 * batch * s * s * h
    kept = round(activation_bytes_per_layer(h, num_heads, s, batch))
    divided = 3 * h * h + 3 * h + h * h + 4 * h * h + 4 * h + 4 * h * h  # by columns with their biases, or by rows
    attention: tuple[tuple[int, ...], ...] = ((h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,))
    feed_forward = ((h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,))
    return Layer(
        name="block",
        parameter_sizes=tuple(math.prod(shape) for shape in (*attention, *feed_forward)),
        parameter_shapes=(*attention, *feed_forward),
        forward=Work(weights + scores, 2 * kept, BLOCK_KERNELS),
        input_gradient=Work(weights + 2 * scores, 2 * kept, BLOCK_KERNELS + 2),
        weight_gradient=Work(weights, 0, 4),
        activation_bytes=kept,
        output_bytes=batch * s * h * 2,
        tensor_activation_bytes=kept - 10 * batch * s * h,
        score_bytes=5 * batch * s * s * num_heads,
        score_forward=Work(scores, 2 * 5 * batch * s * s * num_heads, 5),  # two products, scale, softmax, dropout
        input_bytes=2 * batch * s * h,
        tensor_parameters=divided,
    )
