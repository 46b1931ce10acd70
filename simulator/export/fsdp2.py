"""A plan as FSDP2 code: a Python file with `shard(model)` and `train_step`, to be read, copied and run.

torch has no configuration for this; the plan is a few calls of `fully_shard`. Stage 3 is what FSDP2 does. Stage 2 is
FSDP2 that keeps parameters whole between forward and backward. Stages 0 and 1 are DistributedDataParallel, the latter
with ZeroRedundancyOptimizer.

Source: torch.distributed.fsdp (`fully_shard`, `MixedPrecisionPolicy`, `CPUOffloadPolicy`), torch 2.11 to 2.13.
"""

from __future__ import annotations

from distlab.plan import Plan
from simulator.export.parts import HALVES, notes


def fsdp2_code(plan: Plan, *, layers: str = "blocks", max_norm: float | None = None) -> str:
    """Return Python code that means the plan.

    Args:
        plan: what to express.
        layers: name of the model's ModuleList of layers, such as "blocks" or "model.layers".
        max_norm: the gradients' global norm to clip to; a plan says nothing of it.

    Raises:
        ValueError: the name of the layers is not a dotted name, or max_norm is not positive.
    """
    if not all(part.isidentifier() for part in layers.split(".")):
        raise ValueError(f"layers is {layers!r}; pass the dotted name of the model's list of layers, such as 'blocks'")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; pass a positive number")
    fully = plan.sharding.stage >= 2
    comments = "".join(f"# {note}\n" for note in notes("fsdp2", plan))
    body = [*_imports(plan, fully), "", "", *(_shard(plan, layers) if fully else _replicate(plan, layers)), "", ""]
    if not fully:
        body += [*_optimizer(plan), "", ""]
    body += _train_step(plan, fully, max_norm)
    title = f"ZeRO stage {plan.sharding.stage} over {plan.data} ranks, {_microbatches(plan)} a step."
    return f'"""{title}"""\n\n{comments}' + "\n".join(body) + "\n"


def _microbatches(plan: Plan) -> str:
    return "1 micro-batch" if plan.num_microbatches == 1 else f"{plan.num_microbatches} micro-batches"


def _imports(plan: Plan, fully: bool) -> list[str]:
    lines = ["from collections.abc import Callable, Sequence", ""]
    if plan.recompute == "full":
        lines.insert(1, "from functools import partial")
    lines += ["import torch", "from torch import nn"]
    if fully:
        names = ["MixedPrecisionPolicy"] if _policy(plan) else []
        names += ["CPUOffloadPolicy"] if plan.sharding.offload != "none" else []
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            f"from torch.distributed.fsdp import {', '.join(sorted([*names, 'fully_shard']))}",
        ]
    elif plan.sharding.stage == 1:
        lines.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if plan.recompute == "full":
        lines.append("from torch.utils.checkpoint import checkpoint")
    return lines


def _policy(plan: Plan) -> str:
    """Return the arguments of MixedPrecisionPolicy, or nothing."""
    precision = plan.precision
    if precision is None or (precision.compute not in HALVES and precision.reduce == precision.compute):
        return ""
    parts = [f"param_dtype=torch.{precision.compute}"] if precision.has_master_weights else []
    return ", ".join([*parts, f"reduce_dtype=torch.{precision.reduce}"])


def _converted(plan: Plan) -> list[str]:
    precision = plan.precision
    if precision is None:
        return []
    kind = "float32" if precision.has_master_weights else precision.compute
    return [f"    model.to(torch.{kind})"]


def _recomputed(plan: Plan, layers: str) -> list[str]:
    if plan.recompute != "full":
        return []
    some = {"every": f"[::{plan.recompute_layers}]", "block": f"[: {plan.recompute_layers}]"}
    return [
        f"    for layer in model.{layers}{some.get(plan.recompute_method, '')}:",
        "        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)",
    ]


def _shard(plan: Plan, layers: str) -> list[str]:
    sharding = plan.sharding
    shards = sharding.num_shards(plan.data)
    mesh = (
        f'init_device_mesh(device_type, ({shards},), mesh_dim_names=("shard",))'
        if sharding.replicas == 1
        else f'init_device_mesh(device_type, ({sharding.replicas}, {shards}), mesh_dim_names=("replicate", "shard"))'
    )
    reshard = sharding.reshard_after_forward and sharding.stage == 3
    options = [f'        "mesh": {mesh},', f'        "reshard_after_forward": {reshard},']
    if _policy(plan):
        options.append(f'        "mp_policy": MixedPrecisionPolicy({_policy(plan)}),')
    if sharding.offload != "none":
        options.append('        "offload_policy": CPUOffloadPolicy(pin_memory=device_type == "cuda"),')
    size = sharding.unit_layers
    lines = [
        'def shard(model: nn.Module, device_type: str = "cuda") -> nn.Module:',
        '    """Shard the model in place; build the optimizer of its parameters afterwards."""',
        *_converted(plan),
        *_recomputed(plan, layers),
        "    options = {",
        *options,
        "    }",
        f"    layers = list(model.{layers})",
        f"    units = [layers[first : first + {size}] for first in range(0, len(layers), {size})]",
        "    for unit in units:",
        f"        fully_shard({'unit[0]' if size == 1 else 'unit'}, **options)",
        "    fully_shard(model, **options)  # the rest: embeddings, the last norm",
    ]
    ahead = sharding.prefetch
    if ahead > 1:  # FSDP2 gathers one unit ahead by itself
        lines += [
            "    for place, unit in enumerate(units):",
            f"        later = [one[0] for one in units[place + 1 : place + {ahead + 1}]]",
            f"        earlier = [one[0] for one in reversed(units[max(0, place - {ahead}) : place])]",
            "        unit[0].set_modules_to_forward_prefetch(later)",
            "        unit[0].set_modules_to_backward_prefetch(earlier)",
        ]
    return [*lines, "    return model"]


def _replicate(plan: Plan, layers: str) -> list[str]:
    megabytes = f"{plan.bucket_bytes / 2**20:g}"
    return [
        "def shard(model: nn.Module) -> nn.Module:",
        '    """Replicate the model: below stage 2 parameters and gradients are whole on every rank."""',
        *_converted(plan),
        *_recomputed(plan, layers),
        "    return nn.parallel.DistributedDataParallel(",
        f"        model, bucket_cap_mb={megabytes}, gradient_as_bucket_view=True",
        "    )",
    ]


def _optimizer(plan: Plan) -> list[str]:
    sharded = plan.sharding.stage == 1
    build = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)"
    return [
        "def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:",
        f'    """Build AdamW{", its state sharded over the ranks" if sharded else ""}."""',
        f"    return {build if sharded else 'torch.optim.AdamW(model.parameters(), lr=lr)'}",
    ]


def _train_step(plan: Plan, fully: bool, max_norm: float | None) -> list[str]:
    many = plan.num_microbatches > 1
    lines = [
        "def train_step(",
        "    model: nn.Module,",
        "    optimizer: torch.optim.Optimizer,",
        "    microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]],",
        "    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],",
        ") -> float:",
        f'    """Run one update from {_microbatches(plan)}; return this rank\'s mean loss."""',
        "    total = 0.0",
        "    for index, (inputs, targets) in enumerate(microbatches):",
    ]
    if many:
        last = "index == len(microbatches) - 1"
        lines.append(
            f"        model.set_requires_gradient_sync({last})"
            if fully
            else f"        model.require_backward_grad_sync = {last}"
        )
    lines += [
        "        loss = loss_fn(model(inputs), targets) / len(microbatches)",
        "        loss.backward()",
        "        total += loss.item()",
    ]
    if max_norm is not None:
        lines.append(f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm!r})")
    return [*lines, "    optimizer.step()", "    optimizer.zero_grad()", "    return total"]
