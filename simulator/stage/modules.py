"""Single modules that backward runs again: what each keeps in a block, and the work of making it once more.

    core_attn       attention's inner part, whose scores alone are dropped: backward needs the rest
    layernorm       the norms before attention and before the feed-forward part or the experts
    mla_up_proj     of latent attention, the products that make queries, keys and values
    mlp             the feed-forward part of a block without experts
    mlp_act         what its activation makes
    shared_experts  the part of a block with experts that every token passes
    moe_act         what experts' activation makes
    moe             experts, what goes to them and comes back, and the part that every token passes

MaxText's remat_policy full is "full", minimal_with_context is "layernorm,mlp_act" (minimal_offloaded is near it, with
offload_activations), save_dot_with_context_except_mlp is "layernorm,mlp" (save_qkv_proj keeps less); custom, where it
offloads decoder_layer_input and projections, is near "full" with offload_activations.

Source: NVIDIA/Megatron-LM, transformer_config.py, recompute_modules, 2025; AI-Hypercomputer/maxtext, decoders.py, 2025
    (get_remat_policy: mlp_act).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from distlab.plan import Experts, Layer, Plan, Product, Region, Work, Workload
from distlab.plan.records import RECOMPUTES
from distlab.plan.require import changed

ORDERINGS = 4  # how often rows are read and written on their way to experts and back, as in simulator.models.parts


class ModulePart(NamedTuple):
    """A part of a module: what backward runs again of it, and what it keeps otherwise, in elements of a micro-batch.

    Attributes:
        again: a region, which tensor ranks divide; experts; or work that no tensor rank divides.
        states: kept in 16 bits.
        inputs: of products, which are kept in 8 bits where these are.
        gates: kept unless one kernel makes a gate and its activation.
    """

    again: Region | Experts | Work
    states: float = 0.0
    inputs: float = 0.0
    gates: float = 0.0


def names_in(plan: Plan) -> frozenset[str]:
    """Return the single modules that a plan recomputes; parts of one that it names too are left out."""
    names = frozenset() if plan.recompute in RECOMPUTES else frozenset(plan.recompute.split(","))
    inside = {"moe": {"moe_act", "shared_experts"}, "mlp": {"mlp_act"}}
    return names.difference(*(parts for name, parts in inside.items() if name in names))


def check_modules(workload: Workload, plan: Plan) -> None:
    """Refuse to recompute a module that no block has.

    Raises:
        ValueError: which one, and which ones there are.
    """
    if not (names := names_in(plan)):
        return
    kinds = dict(zip(workload.kinds, workload.layers, strict=True))
    known = list(dict.fromkeys(name for layer in kinds.values() for name in modules_of(layer)))
    if lacking := sorted(names.difference(known)):
        text = f"no block of {workload.name} has {' or '.join(lacking)}, which recompute names"
        raise ValueError(f"{text}; choose among {', '.join(known) or 'none, full'}")


def modules_of(layer: Layer) -> dict[str, tuple[ModulePart, ...]]:
    """Return the modules of a block by name; of a layer that is no block, none."""
    found: dict[str, tuple[ModulePart, ...]] = {}
    if not layer.input_bytes or not layer.parameter_shapes:
        return found
    if norms := min(2, len(layer.sequence_calls)):
        h, size = layer.parameter_shapes[0][-1], layer.output_bytes / 2
        into = min(norms, sum(region.products[0].depth == h for region in layer.regions if region.products))
        again = Work(memory_bytes=2 * norms * layer.output_bytes, num_kernels=norms)
        found["layernorm"] = (ModulePart(again, (norms - into) * size, into * size),)
    shared: tuple[ModulePart, ...] = ()
    for region in layer.regions:
        if inner := region.attention:
            found["core_attn"] = (ModulePart(Region("attention", inner.forward, attention=inner)),)
            if len(region.products) > 2:  # from a narrow vector, whose own products are no tensor rank's
                found["mla_up_proj"] = (ModulePart(_up(region), (inner.query_bytes + inner.key_value_bytes) / 2),)
        elif region.name == "feed-forward":
            shared = (_wide(region, region.products, 1),)
            found["shared_experts" if layer.experts else "mlp"] = shared
            if not layer.experts:
                found["mlp_act"] = (_act(shared[0]),)
    if (experts := layer.experts) and experts.products:
        wide, rows = _wide(experts, experts.products, experts.num_experts), experts.row_bytes / 2
        found["moe_act"] = (_act(wide),)
        # What goes to experts and what comes back, which a kernel that makes gates does not keep.
        states, gates = wide.states + rows * (not wide.gates), wide.gates + rows * bool(wide.gates)
        orderings = ModulePart(Work(memory_bytes=4 * ORDERINGS * rows, num_kernels=ORDERINGS))
        found["moe"] = (ModulePart(experts, states, wide.inputs + rows, gates), orderings, *shared)
    return found


def _wide(again: Region | Experts, products: Sequence[Product], count: int) -> ModulePart:
    """Return a feed-forward part, or so many experts: what its first product makes, and what goes into the last."""
    first, last = products[0], products[-1]
    made, inside = count * first.rows * first.columns, count * last.rows * last.depth
    return ModulePart(again, made, inside, inside * (first.columns == 2 * last.depth))


def _act(wide: ModulePart) -> ModulePart:
    """Return the activation of a feed-forward part, or of experts: what goes into the last product, and a gate."""
    work = Work(memory_bytes=2 * (wide.states + wide.inputs), num_kernels=1)
    is_divided = isinstance(wide.again, Region)
    return ModulePart(Region("feed-forward", work) if is_divided else work, 0.0, wide.inputs, wide.gates)


def _up(region: Region) -> Region:
    """Return the products of a region before its last one."""
    *first, last = (math.prod((product.rows, product.columns, product.depth)) for product in region.products)
    inner = region.attention.forward.matmul_flops if region.attention else 0.0
    streams = 4 * sum(product.rows * product.columns for product in region.products[:-1])
    work = Work((region.forward.matmul_flops - inner) * sum(first) / (sum(first) + last), streams, len(first))
    return Region("attention", work, input_bytes=region.input_bytes, products=region.products[:-1])


def _parts(layer: Layer, names: frozenset[str]) -> list[ModulePart]:
    return [part for name, parts in modules_of(layer).items() if name in names for part in parts]


def modules_again(layer: Layer, names: frozenset[str]) -> Layer | None:
    """Return the layer with a forward of some modules alone, or None: it has none of them."""
    found = [part.again for part in _parts(layer, names)]
    works = [each if isinstance(each, Work) else each.forward for each in found]
    regions = tuple(each for each in found if isinstance(each, Region))
    experts = next((each for each in found if isinstance(each, Experts)), None)
    return changed(layer, forward=sum(works, Work()), regions=regions, experts=experts) if found else None


def dropped_bytes(layer: Layer, names: frozenset[str], input_bytes: float, *, fused_gate: bool) -> tuple[float, float]:
    """Return what a layer does not keep of modules that run again: what tensor ranks do not divide, and what they do.

    An element that goes into a product has `input_bytes`; others have 2.
    """
    found = [0.0, 0.0]
    for part in _parts(layer, names):
        size = 2 * part.states + input_bytes * part.inputs + (0 if fused_gate else 2 * part.gates)
        found[isinstance(part.again, Region)] += size
    return found[0], found[1]
