"""LoRA and QLoRA: adapters of a low rank beside frozen weights, which may have 4 bits.

A product [n, d] x [d, c] with a frozen weight gets two narrow ones beside it, [n, d] x [d, r] and [n, r] x [r, c]; the
output of these is added to its own. Adapters alone are trained: they alone have gradients and states, and data-parallel
ranks send theirs alone. The base keeps its products for outputs and for gradients of inputs, and has none for gradients
of weights. What backward needs of the base's activations stays, since the adapters have the same inputs.

    bfloat16    the base has 16 bits, with or without a precision in the plan
    nf4         weights inside the blocks have 4 bits, and each 64 of them a scale of 8 bits, each 256 scales one of 32:
                4.127 bits in all. Each pass unpacks a weight into 16 bits before its product. Embedding, head and norms
                keep 16 bits.

Source: Hu et al. 2021 (2106.09685), section 4; Dettmers et al. 2023 (2305.14314), section 3 (double quantization).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from distlab.plan import Experts, Layer, Product, Region, Work, Workload
from simulator.models.parts import PASSES, Parts, change_layers, parameters
from simulator.units import in_words

LORA_MODULES = ("query-value", "attention", "all-linear")
WEIGHTS = ("bfloat16", "nf4")
HALF_BYTES = 2
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
ADDING = 6  # bytes of an element: two are read and their sum is written, in 16 bits


def with_adapters(workload: Workload, rank: int, *, modules: str = "all-linear", weights: str = "bfloat16") -> Workload:
    """Return the workload with a frozen base and adapters that are trained.

    Args:
        workload: of parameters that are all trained.
        rank: of the adapters.
        modules: which products of a block have them: queries' and values' ("query-value"; of a fused product of
            queries, keys and values all of it), all of attention's ("attention"), or the feed-forward part's and the
            experts' too ("all-linear").
        weights: type of the base, one of WEIGHTS.

    Cost: forward 2 n r (d + c) operations for each weight, backward twice that.
    """
    layers = change_layers(workload, lambda layer: _adapted(layer, rank, modules, weights))
    base = f"{in_words(workload.num_parameters)} parameters, frozen{', nf4' if weights == 'nf4' else ''}"
    return replace(workload, name=f"{workload.name} ({base}) with LoRA of rank {rank}", layers=layers)


def _adapted(layer: Layer, rank: int, modules: str, weights: str) -> Layer:
    is_block, unpacks = layer.input_bytes > 0, weights == "nf4" and layer.input_bytes > 0
    shapes = {axis: _shapes(layer, axis) for axis in ("tensor", "expert")}
    added: dict[str, Work] = dict.fromkeys(PASSES, Work())
    regions: list[Region] = []
    parts: Parts = []
    tokens = 0
    for region in layer.regions:
        own = list(_weights(region.products, shapes["tensor"])) if is_block else []
        chosen = _chosen(region, own, modules)
        works = _works(chosen, rank, own if unpacks else ())
        parts += [part for product in chosen for part in _parts(product, rank)]
        tokens += sum(product.rows for product in chosen)
        again = region.again and region.again + works["forward"]
        changes = {name: getattr(region, name) + works[name] for name in PASSES[:2]}
        regions.append(replace(region, **changes, weight_gradient=works[PASSES[2]], beside=Work(), again=again))
        added = {name: added[name] + works[name] for name in PASSES}
    experts = layer.experts
    if experts:
        own = list(_weights(experts.products, shapes["expert"]))
        chosen = own if modules == "all-linear" else []
        works = _works(chosen, rank, own if unpacks else (), experts.num_experts)
        parts += [(shape, "expert") for product in chosen for shape, _ in _parts(product, rank)] * experts.num_experts
        tokens += experts.num_experts * sum(product.rows for product in chosen)
        experts = _with_works(experts, works)
        added = {name: added[name] + works[name] for name in PASSES}
    changes = {name: getattr(layer, name) + added[name] for name in PASSES[:2]}
    return replace(
        layer,
        **changes,
        **parameters(parts),
        weight_gradient=added[PASSES[2]],
        regions=tuple(regions),
        experts=experts,
        activation_bytes=layer.activation_bytes + HALF_BYTES * rank * tokens,
        base_bytes=_base_bytes(layer, unpacks=unpacks),
        sequence_calls=(),
    )


def _shapes(layer: Layer, axis: str) -> Iterator[tuple[int, ...]]:
    pairs = zip(layer.parameter_shapes, layer.parameter_axes, strict=True)
    return iter([shape for shape, own in pairs if own == axis and len(shape) == 2])


def _weights(products: Sequence[Product], shapes: Iterator[tuple[int, ...]]) -> Iterator[Product]:
    """Yield a product for each weight: those with one input, such as queries and keys, are listed as one product."""
    for product in products:
        left = product.columns
        while left > 0 and (shape := next(shapes, None)):
            if shape[1] == product.depth:  # else no product has it, as a convolution's
                left -= shape[0]
                yield product._replace(columns=shape[0])


def _chosen(region: Region, own: list[Product], modules: str) -> list[Product]:
    if modules == "all-linear":
        return own
    if region.attention is None:
        return []
    return [own[0], *own[2:3]] if modules == "query-value" and len(own) > 2 else own[: 1 if modules[0] == "q" else None]


def _parts(product: Product, rank: int) -> Parts:
    """Return the shapes of a weight's adapter, and which of them tensor ranks divide: the side that they divide."""
    into, out = ("tensor" if product.divided == side else "" for side in ("depth", "columns"))
    return [((rank, product.depth), into), ((product.columns, rank), out)]


def _works(chosen: Sequence[Product], rank: int, packed: Sequence[Product], count: int = 1) -> dict[str, Work]:
    """Return the work of adapters, and of unpacking weights, in each pass; of `count` experts alike.

    A narrow product streams its wide side: it reads or writes it once, which takes longer than its operations do.
    """
    flops = 2.0 * rank * sum(p.rows * (p.depth + p.columns) for p in chosen)
    streamed = HALF_BYTES * sum(p.rows * (p.depth + 2 * rank + p.columns) for p in chosen)
    unpacking = (NF4_BYTES + HALF_BYTES) * sum(p.columns * p.depth for p in packed)
    kernels = 3 * len(chosen)
    sums = {"forward": sum(p.rows * p.columns for p in chosen), "input_gradient": sum(p.rows * p.depth for p in chosen)}
    works = {
        name: Work(flops, streamed + ADDING * size + unpacking, kernels + len(packed)) for name, size in sums.items()
    } | {"weight_gradient": Work(flops, streamed, kernels)}
    return {name: replace(work.times(count), num_kernels=count * work.num_kernels) for name, work in works.items()}


def _with_works(experts: Experts, works: dict[str, Work]) -> Experts:
    kernels = works["forward"].num_kernels // experts.num_experts
    changes: dict[str, Any] = {name: getattr(experts, name) + works[name] for name in PASSES[:2]}
    return replace(
        experts, **changes, weight_gradient=works["weight_gradient"], kernels_each=experts.kernels_each + kernels
    )


def _base_bytes(layer: Layer, *, unpacks: bool) -> tuple[float, ...]:
    """Return bytes of the base: whole on every rank, divided by tensor and by expert ranks; and what is unpacked."""
    found, largest = {"": 0.0, "tensor": 0.0, "expert": 0.0}, 0
    for size, shape, axis in zip(layer.parameter_sizes, layer.parameter_shapes, layer.parameter_axes, strict=True):
        is_packed = unpacks and len(shape) == 2
        found[axis] += size * (NF4_BYTES if is_packed else HALF_BYTES)
        largest = max(largest, size * is_packed)
    return *found.values(), HALF_BYTES * largest
