"""LoRA and QLoRA: adapters of a low rank beside frozen weights, which may have 4 bits.

A product [n, d] x [d, c] with a frozen weight gets two narrow ones beside it, [n, d] x [d, r] and [n, r] x [r, c]; the
output of these is added to its own. Adapters alone are trained: they alone have gradients and states, and data-parallel
ranks send theirs alone. The base keeps its products for outputs and for gradients of inputs, and has none for gradients
of weights. What backward needs of its activations stays, since the adapters have the same inputs.

    bfloat16    the base has 16 bits
    nf4         weights in blocks have 4 bits, each 64 of them a scale of 8, each 256 scales one of 32: 4.127 bits in
                all. Each pass unpacks a weight into 16 bits before its product. Embedding, head and norms keep 16 bits.

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


def with_adapters(workload: Workload, rank: int, modules: str = "all-linear", weights: str = "bfloat16") -> Workload:
    """Return the workload with a frozen base and adapters that are trained.

    Args:
        workload: of parameters that are all trained.
        rank: of the adapters.
        modules: which products of a block have them: queries' and values' ("query-value"; of one product of queries,
            keys and values all), attention's ("attention"), or the feed-forward part's and experts' too ("all-linear").
        weights: type of the base, one of WEIGHTS.

    Cost: forward 2 n r (d + c) operations for each weight, backward twice that.
    """
    layers = change_layers(workload, lambda layer: _adapted(layer, rank, modules, weights))
    base = f"{in_words(workload.num_parameters)} parameters, frozen{', nf4' if weights == 'nf4' else ''}"
    return replace(workload, name=f"{workload.name} ({base}) with LoRA of rank {rank}", layers=layers)


def _adapted(layer: Layer, rank: int, modules: str, weights: str) -> Layer:
    unpacks = weights == "nf4" and layer.input_bytes > 0
    pairs = [*zip(layer.parameter_shapes, layer.parameter_axes, strict=True)]
    shapes = {axis: iter([s for s, own in pairs if own == axis and len(s) == 2]) for axis in ("tensor", "expert")}
    changed: list[Any] = []
    parts: Parts = []
    added, rows = dict.fromkeys(PASSES, Work()), 0
    every: list[Region | Experts] = [*layer.regions, *([layer.experts] if layer.experts else [])]
    for part in every:
        axis, count = ("expert", part.num_experts) if isinstance(part, Experts) else ("tensor", 1)
        own = list(_weights(part.products, shapes[axis])) if layer.input_bytes else []  # of a block
        chosen = _chosen(part, own, modules)
        works = _works(chosen, rank, own if unpacks else (), count)
        parts += [each for p in chosen for each in _parts(p, rank, axis)] * count
        added, rows = {name: added[name] + works[name] for name in PASSES}, rows + count * sum(p.rows for p in chosen)
        changed.append(_with(part, works))
    return replace(
        layer,
        **parameters(parts),
        **{name: getattr(layer, name) + added[name] for name in PASSES[:2]},
        weight_gradient=added[PASSES[2]],
        regions=tuple(changed[: len(layer.regions)]),
        experts=changed[-1] if layer.experts else None,
        activation_bytes=layer.activation_bytes + HALF_BYTES * rank * rows,
        base_bytes=_base_bytes(layer, unpacks=unpacks),
        sequence_calls=(),
    )


def _weights(products: Sequence[Product], shapes: Iterator[tuple[int, ...]]) -> Iterator[Product]:
    """Yield a product for each weight: those with one input, such as queries and keys, are listed as one product."""
    for product in products:
        left = product.columns
        while left > 0 and (shape := next(shapes, None)):
            if shape[1] == product.depth:  # else no product has it, as a convolution's
                left -= shape[0]
                yield product._replace(columns=shape[0])


def _chosen(part: Region | Experts, own: list[Product], modules: str) -> list[Product]:
    if modules == "all-linear" or isinstance(part, Experts) or part.attention is None:
        return own if modules == "all-linear" else []
    return own if modules == "attention" else [*own[:1], *own[2:3]] if len(own) > 2 else own[:1]


def _parts(product: Product, rank: int, axis: str) -> Parts:
    """Return the shapes of a weight's adapter, and whether ranks divide them: on the side that tensor ranks divide."""
    into, out = (axis if axis == "expert" or product.divided == side else "" for side in ("depth", "columns"))
    return [((rank, product.depth), into), ((product.columns, rank), out)]


def _works(chosen: Sequence[Product], rank: int, packed: Sequence[Product], count: int) -> dict[str, Work]:
    """Return the work of adapters, and of unpacking weights, in each pass; of `count` experts alike.

    A narrow product streams its wide side, which takes longer than its operations do.
    """
    flops = 2.0 * count * rank * sum(p.rows * (p.depth + p.columns) for p in chosen)
    streamed = HALF_BYTES * count * sum(p.rows * (p.depth + 2 * rank + p.columns) for p in chosen)
    unpacking = (NF4_BYTES + HALF_BYTES) * count * sum(p.columns * p.depth for p in packed)
    kernels = count * 3 * len(chosen)
    sums = (sum(p.rows * p.columns for p in chosen), sum(p.rows * p.depth for p in chosen))
    both = [Work(flops, streamed + ADDING * count * each + unpacking, kernels + count * len(packed)) for each in sums]
    return dict(zip(PASSES, (*both, Work(flops, streamed, kernels)), strict=True))


def _with(part: Region | Experts, works: dict[str, Work]) -> Region | Experts:
    changes: dict[str, Any] = {name: getattr(part, name) + works[name] for name in PASSES[:2]}
    changes["weight_gradient"] = works["weight_gradient"]
    if isinstance(part, Experts):
        kernels = part.kernels_each + works["forward"].num_kernels // part.num_experts
        return replace(part, **changes, kernels_each=kernels)
    return replace(part, **changes, beside=Work(), again=part.again and part.again + works["forward"])


def _base_bytes(layer: Layer, *, unpacks: bool) -> tuple[float, ...]:
    """Return bytes of the base: whole on every rank, divided by tensor and by expert ranks; and what is unpacked."""
    found, largest = {"": 0.0, "tensor": 0.0, "expert": 0.0}, 0
    for size, shape, axis in zip(layer.parameter_sizes, layer.parameter_shapes, layer.parameter_axes, strict=True):
        is_packed = unpacks and len(shape) == 2
        found[axis] += size * (NF4_BYTES if is_packed else HALF_BYTES)
        largest = max(largest, size * is_packed)
    return *found.values(), HALF_BYTES * largest
