"""The inner part of attention, scores and mixing, in one fused kernel (flash attention) in place of the plain ones.

    plain   writes all scores, their softmax and its dropout to memory and reads them again: bytes grow with s^2. It
            computes all pairs of positions, also those that a causal mask hides.
    flash   keeps scores on the chip, and one number per row for backward, which computes the scores again: five
            products in place of four. With a causal mask it leaves out the hidden half, and with a window what lies
            outside of it: of s positions that see w each, w/s (1 - w/2s) of the pairs are left.

Utilization (MFU) counts two products in forward and four in backward over all pairs for either kernel, as the sources
of published figures do (PaLM, Llama 3, MosaicML, torchtitan, Megatron-LM). Of a window it counts twice the pairs that
are left, which is all of them where the window is the sequence.
"""

from __future__ import annotations

from dataclasses import replace

from distlab.plan import Attention, Layer, Region, Work, Workload
from distlab.plan.require import chosen
from simulator.models.parts import change_layers

ATTENTION_KERNELS = ("plain", "flash")
FLASH_BACKWARD = 2.5  # five products of the size of forward's two
ROW_BYTES = 4  # of the logarithm of a row's sum, in float32
WORKS = ("forward", "input_gradient")


def with_kernel(workload: Workload, kernel: str, document_length: int | None = None) -> Workload:
    """Return a workload of plain attention with a kernel of ATTENTION_KERNELS; see `fuse_attention`.

    Raises:
        ValueError: there is no such kernel; or there are documents, and it computes all pairs.
    """
    chosen("attention", kernel, ATTENTION_KERNELS)
    if kernel == "flash":
        return fuse_attention(workload, document_length)
    if document_length:
        why = f"document_length is {document_length} and attention is plain, which computes all pairs of positions"
        raise ValueError(f"{why}: use attention flash, or leave document_length out")
    return workload


def fuse_attention(workload: Workload, document_length: int | None = None) -> Workload:
    """Return the workload with flash attention and a causal mask: no scores in memory, half of the pairs.

    Args:
        workload: with plain attention, as `gpt_workload`, `llama_workload` and `mix_experts` make it.
        document_length: of documents packed into a sequence, each of which attends to itself alone: the mean of their
            squares over their mean, which has as many pairs. MFU counts what it counts without them. None: one.

    Cost: forward 2 B s^2 h operations per layer, backward 5: half of those without a mask.
    Source: Dao et al. 2022 (2205.14135), section 3; Dao 2023 (2307.08691), section 3.1 (causal masks).

    Raises:
        ValueError: no layer of the workload has attention with scores in memory.
    """

    def fused(layer: Layer) -> Layer | None:
        has_scores = layer.score_bytes and any(region.attention for region in layer.regions)
        return _fused(layer, workload.samples, document_length) if has_scores else None

    layers = change_layers(workload, fused)
    if layers == workload.layers:
        raise ValueError(
            f"{workload.name} has no attention that keeps scores; pass a workload of gpt_workload or llama_workload"
        )
    return replace(workload, layers=layers)


def causal_share(attention: Attention, document_length: int | None = None) -> float:
    """Return the part of all pairs of positions that a causal mask, a window and documents, if there are any, leave."""
    length = min(document_length or attention.num_positions, attention.num_positions)
    wide = min(1.0, (attention.window or length) / length)
    return wide * (1 - wide / 2) * length / attention.num_positions


def _fused(layer: Layer, samples: int, document_length: int | None) -> Layer:
    """Return the layer with a fused kernel."""
    regions = tuple(_fused_region(region, samples, document_length) for region in layer.regions)
    works = {name: getattr(layer, name) for name in WORKS}
    rows, uncounted = 0, 0.0
    for old, new in zip(layer.regions, regions, strict=True):
        for name in WORKS:
            works[name] = works[name].without(getattr(old, name)) + getattr(new, name)
            uncounted += getattr(new, name).flops - getattr(old, name).flops
        if old.attention is not None:
            inner = old.attention.forward + old.attention.backward
            uncounted += (1 - 2 * causal_share(old.attention)) * inner.flops
            rows += samples * old.attention.num_positions * old.attention.num_heads
    dropped = layer.score_bytes - ROW_BYTES * rows
    divides = layer.tensor_activation_bytes >= layer.score_bytes
    kept = layer.activation_bytes - dropped
    until = layer.kept_until_weights_bytes
    return replace(
        layer,
        **works,
        regions=regions,
        activation_bytes=kept,
        tensor_activation_bytes=layer.tensor_activation_bytes - (dropped if divides else 0),
        score_bytes=0,
        score_forward=Work(),
        uncounted_flops=layer.uncounted_flops + uncounted,
        kept_until_weights_bytes=None if until is None else min(kept, until),
    )


def _fused_region(region: Region, samples: int, document_length: int | None) -> Region:
    old = region.attention
    if old is None:
        return region
    if document_length and document_length > old.num_positions:
        raise ValueError(f"document_length is {document_length}; write at most the sequence's {old.num_positions}")
    pairs = old.forward.matmul_flops * causal_share(old, document_length)
    new = replace(old, forward=Work(0.0, 0.0, 1, pairs), backward=Work(0.0, 0.0, 2, FLASH_BACKWARD * pairs))
    return replace(
        region,
        attention=new,
        again=region.again and region.again.without(old.forward),
        kept_bytes=region.kept_bytes + old.query_bytes + ROW_BYTES * samples * old.num_positions * old.num_heads,
        forward=region.forward.without(old.forward) + new.forward,
        input_gradient=region.input_gradient.without(old.backward) + new.backward,
    )
