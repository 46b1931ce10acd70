"""Count a whole GPT for every layout at once: what its layers ask of a device, and which parts ranks may share.

`workload_from_module` counts work by layers. This adds where tensor-parallel regions begin and end, what attention and
experts exchange, and which ranks divide which parameter. So the simulator can time any plan from one count in one
process.

How unevenly tokens fall on the ranks that share experts is taken from timed steps (`expert_loads`), and makes a
workload what its busiest rank has. Only a balance loss makes a router choose evenly: without one a few updates are
enough for two experts to get all tokens. The others wait in the exchange, so a layer of experts takes as long as on the
rank with the most tokens. A rank that computes while the others wait has a core to itself: where ranks share cores it
is faster then. At n times the speed of a rank among n an uneven load would cost nothing.

Symbols: B samples of a micro-batch, S positions, H features, A heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.expert_parallel import Load, mix_experts
from distlab.measure.count.module import BACKWARD_KERNELS, FORWARD_KERNELS, HEAD, count_layers
from distlab.plan import Attention, Experts, Layer, Plan, Region, Work, Workload, split_evenly

SPLIT_BY_FEATURES = ("query_key_value.weight", "query_key_value.bias", "widen.weight", "widen.bias", "output.weight")
NUMBER_BYTES = 4  # of a float32
WORKS = ("forward", "input_gradient", "weight_gradient")


def make_gpt(config: GPTConfig, seed: int, *, num_experts: int = 0, top_k: int = 2) -> GPT:
    """Build the GPT of a layout, with experts in each block where there are any."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, generator)
    return mix_experts(model, num_experts, generator, top_k=top_k) if num_experts else model


def count_gpt(
    config: GPTConfig, samples: int, *, num_experts: int = 0, top_k: int = 2, device: torch.device | None = None
) -> Workload:
    """Count a micro-batch of whole sequences in one process, and an update by SGD with momentum.

    Args:
        config: sizes; sequences are as long as its context.
        samples: samples of a micro-batch of one replica.
        num_experts: experts of each block; 0 for ordinary feed-forward layers.
        top_k: experts of each token.
        device: where to count.
    """
    model = make_gpt(config, 0, num_experts=num_experts, top_k=top_k).to(device or torch.device("cpu"))
    tokens = torch.randint(config.vocab_size, (samples, config.context), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def loss() -> Tensor:
        return model.loss(model(tokens), tokens)

    whole, parts = count_layers(model, loss, optimizer=optimizer, samples=samples, name="small GPT", inner=True)
    inner, layers = _attention(samples, config), []
    for layer in whole.layers:  # a tied parameter belongs to the first layer that has it
        named = (name for name, _ in model.named_parameters() if name.startswith(f"{layer.name}."))
        axes = tuple(map(_axis_of, named))
        divided = sum(size for size, axis in zip(layer.parameter_sizes, axes, strict=True) if axis == "tensor")
        layer = replace(layer, splits_positions=True, parameter_axes=axes, tensor_parameters=divided)
        declared = replace(layer, **_calls_of(layer, parts, inner, config.hidden_size, samples))
        layers.append(_with_experts(declared, parts, inner, num_experts, top_k))
    return replace(whole, layers=tuple(layers))


def merge_stages(workload: Workload, num_stages: int) -> Workload:
    """Make one layer of each stage's layers, so that the simulator cuts where `split_gpt` did: blocks evenly.

    Raises:
        ValueError: there are experts, of which a layer has one set.
    """
    if num_stages == 1:
        return workload
    if any(layer.experts for layer in workload.layers):
        raise ValueError("stages with experts are not counted here; use pipeline=1 with experts, or no experts")
    blocks = [index for index, layer in enumerate(workload.layers) if layer.name.startswith("blocks.")]
    starts = [blocks[start] for start, _ in split_evenly(len(blocks), num_stages)]
    starts[0] = 0  # the embeddings go with the first blocks, and the rest with the last
    merged = [
        replace(reduce(_joined, workload.layers[start:stop]), name=f"stage {stage}")
        for stage, (start, stop) in enumerate(pairwise([*starts, len(workload.layers)]))
    ]
    return replace(workload, layers=tuple(merged))


def without_accumulation(workload: Workload) -> Workload:
    """Return the workload without adding gradients to earlier ones: sharding takes gradients as they come."""

    def taken(layer: Layer) -> Layer:
        work, adds_bytes = layer.weight_gradient, 3 * layer.num_parameters * workload.bytes_per_parameter
        kernels = max(0, work.num_kernels - BACKWARD_KERNELS * len(layer.parameter_sizes))
        rest = Work(work.matmul_flops, max(0.0, work.memory_bytes - adds_bytes), kernels)
        return replace(layer, weight_gradient=rest)

    return replace(workload, layers=tuple(taken(layer) for layer in workload.layers))


def _attention(samples: int, config: GPTConfig) -> Attention:
    row_bytes = samples * config.context * config.hidden_size * NUMBER_BYTES  # [B, S, H]
    product = 2.0 * samples * config.context**2 * config.hidden_size  # [S, d] x [d, S] for all heads
    return Attention(
        num_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        num_positions=config.context,
        query_bytes=row_bytes,
        key_value_bytes=2 * row_bytes,
        key_value_gradient_bytes=2 * row_bytes,
        forward=Work(2 * product, 0.0, FORWARD_KERNELS),
        backward=Work(5 * product, 0.0, BACKWARD_KERNELS),
    )


def _axis_of(name: str) -> str:
    if ".experts." in name:
        return "expert"
    return "tensor" if name == "token_embedding.weight" or name.endswith(SPLIT_BY_FEATURES) else ""


def _calls_of(layer: Layer, parts: dict[str, Layer], inner: Attention, features: int, samples: int) -> dict[str, Any]:
    """Return the parts of a counted layer that tensor ranks divide, and the calls of sequence parallelism."""
    row_bytes, norm = inner.query_bytes, ("all_reduce", 2 * features)
    if layer.name.startswith("blocks."):
        names = ("attention", "feed_forward") if f"{layer.name}.feed_forward.widen" in parts else ("attention",)
        return {
            "regions": tuple(_region(layer.name, name, parts, inner) for name in names),
            "sequence_calls": (norm, norm),
        }
    works, one = _works(layer), samples * inner.num_positions * NUMBER_BYTES
    calls: dict[str, dict[str, Any]] = {
        # Every rank looks all tokens up, and has zeros for those of others.
        "token_embedding": {"regions": (Region("embedding", output_bytes=row_bytes),)},
        "position_embedding": {"sequence_calls": (("all_gather", inner.num_positions * features),)},
        "norm": {"sequence_calls": (norm,)},
        "output": {"regions": (Region("scores", **works, input_bytes=row_bytes, beside=layer.weight_gradient),)},
        HEAD: {"regions": (Region("loss", **works, sums_bytes=(one, 2 * one)),)},
    }
    return calls.get(layer.name, {})


def _works(layer: Layer) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in WORKS}


def _region(block: str, name: str, parts: dict[str, Layer], inner: Attention) -> Region:
    first = "query_key_value" if name == "attention" else "widen"
    return Region(
        name,
        **_works(parts[f"{block}.{name}"]),
        input_bytes=inner.query_bytes,
        output_bytes=inner.query_bytes,
        beside=parts[f"{block}.{name}.{first}"].weight_gradient,
        attention=inner if name == "attention" else None,
    )


def _with_experts(layer: Layer, parts: dict[str, Layer], inner: Attention, num_experts: int, top_k: int) -> Layer:
    own = [parts.get(f"{layer.name}.feed_forward.experts.{number}") for number in range(num_experts)]
    found = [part for part in own if part is not None]
    if not found:
        return layer
    works: dict[str, Any] = {name: sum((getattr(part, name) for part in found), Work()) for name in WORKS}
    kernels = min(work.num_kernels for work in works.values()) // num_experts
    experts = Experts(num_experts, top_k, top_k * inner.query_bytes, **works, kernels_each=kernels)
    return replace(layer, experts=experts)


def _joined(layer: Layer, behind: Layer) -> Layer:
    names = ["parameter_sizes", "parameter_shapes", "parameter_axes", "tensor_parameters", "activation_bytes", *WORKS]
    names += ["frozen_bytes", "logits_bytes", "regions", "sequence_calls"]
    added = {name: getattr(layer, name) + getattr(behind, name) for name in names}
    return replace(
        layer,
        **added,
        output_bytes=behind.output_bytes or layer.output_bytes,
        widest_bytes=max(layer.widest_bytes, behind.widest_bytes),
    )


def expert_loads(modules: Iterable[nn.Module], plan: Plan, device: torch.device) -> tuple[float, ...]:
    """Return the busiest rank's tokens over its even share, in the last forward pass; every rank calls this.

    Returns:
        One number per layer of experts, in forward order; () for none. 1 is even; the most is the number of ranks that
        share them.
    """
    loads = [load for module in modules for each in module.modules() if (load := getattr(each, "load", None))]
    kept = [load.kept for load in loads if isinstance(load, Load)]
    if not kept:
        return ()
    counts = torch.tensor(kept, dtype=torch.float64, device=device)  # [layers, experts]
    dist.all_reduce(counts)
    ends = split_evenly(counts.shape[1], plan.expert)
    of_ranks = torch.stack([counts[:, start:stop].sum(1) for start, stop in ends])
    even = counts.sum(1) * max(stop - start for start, stop in ends) / counts.shape[1]
    return tuple((of_ranks.max(0).values / even).tolist())


def with_expert_loads(workload: Workload, loads: Sequence[float], plan: Plan, *, cores: int | None = None) -> Workload:
    """Return the workload with each layer's experts busier by a factor; () leaves it as it is.

    Args:
        workload: counted with even loads.
        loads: of each layer of experts, as `expert_loads` returns them.
        plan: whose ranks share the experts.
        cores: shared by all ranks; None: one core for each.
    """
    if not loads or plan.expert == 1:
        return workload
    faster = max(1.0, plan.world_size / cores) if cores else 1.0  # while the others wait
    felt = max(0.0, (plan.expert / faster - 1) / (plan.expert - 1))  # of what the busiest rank has beyond its share
    left, layers = iter(loads), list[Layer]()
    for layer in workload.layers:
        if (experts := layer.experts) is not None:
            factor = 1 + felt * (next(left) - 1)
            own = {name: getattr(experts, name) for name in WORKS}
            busier = {name: work.times(factor) for name, work in own.items()}
            rest = {name: getattr(layer, name).without(work) + busier[name] for name, work in own.items()}
            rows = round(factor * experts.row_bytes)
            layer = replace(layer, experts=replace(experts, **busier, row_bytes=rows), **rest)
        layers.append(layer)
    return replace(workload, layers=tuple(layers))
